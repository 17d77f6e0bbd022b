"""What the membership of isolated pipelines knows of processes, and the commands that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_NEVER = float("inf")
OVER = "the run is over"  # why a pipeline that joins too late is ended
REFUSED = (
    "it is refused: "  # begins the reason of a pipeline that cannot take part, however often it is started
)
WEIGHTS = "initial weights"  # among what must be the same in all pipelines; only as the run begins


# ---- commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Send a message to a process."""

    group: int
    rank: int
    message: Sequence[Any]


@dataclass(frozen=True)
class Kill:
    """End the processes of a group; ``rank`` is to blame, if known. ``why``: "" where its exit code says more."""

    group: int
    rank: int | None
    why: str


@dataclass(frozen=True)
class Say:
    """Print a line for the user."""

    line: str


Command = Send | Kill | Say


# ---- what is known ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A process's answer to a freeze.

    Attributes:
        freeze: its number.
        begun: the number of steps that it has begun.
        whole: the number of steps whose sums its host has whole, for its rank.
        seen: by the number of a lost group on its host, how many steps that has published as far as this
            process will count them.
    """

    freeze: int
    begun: int
    whole: int
    seen: Mapping[int, int]


@dataclass(eq=False)
class Process:
    """One process of a pipeline, as far as it has reported.

    Attributes:
        group, rank: its place.
        name: its name in messages.
        heard_at: time of its last message.
        doing: what it was doing then.
        batches: the number of the loader's batches that it has begun; None before its first report.
        begun, ended: the number of steps that it has begun, and of those that have ended for it.
        published: the number of steps that its stages have published since its pipeline joined.
        wants: "enter", or "leave" once it is done.
        digests: of what must be the same in all pipelines, by its names.
        facts: what other processes must know of it.
        has_state: whether it has the state that it begins with.
        reported_late: the last step on which it timed out although every pipeline had published it.
    """

    group: Group = field(repr=False)
    rank: int
    name: str
    heard_at: float
    doing: str = "its start"
    batches: int | None = None
    begun: int = 0
    ended: int = 0
    published: int = 0
    wants: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    facts: Any = None
    has_state: bool = False
    answer: Answer | None = None
    reported_late: int = -1

    def send(self, message: Sequence[Any]) -> Send:
        """Return the command to send it a message."""
        return Send(self.group.number, self.rank, message)


@dataclass
class Group:
    """The processes of a pipeline that were started together.

    Attributes:
        number: identifies the group over the life of the run.
        size: the number of processes.
        period: the number of steps from one published update to the next.
        host: names the host of its processes.
        first: the first step of which it is a member; 0 before that is decided.
        ready_at: when its processes wanted to enter, or to leave.
        left_at: the number of steps that it had begun when it left.
        is_lost: whether its processes have ended, or are ended.
    """

    pipeline: int
    number: int
    size: int
    period: int
    host: str
    processes: dict[int, Process] = field(default_factory=dict)
    first: int = 0
    ready_at: float = _NEVER
    left_at: int | None = None
    is_lost: bool = False
    has_ended: bool = False

    def all_want(self, what: str) -> bool:
        return len(self.processes) == self.size and all(p.wants == what for p in self.processes.values())

    def has_state(self) -> bool:
        """Whether all its processes have the state that they began with."""
        return all(p.has_state for p in self.processes.values()) or self.published() > 0

    def begun(self) -> int:
        """Return the most steps that one of its processes has reported as begun."""
        return max(p.begun for p in self.processes.values())

    def published(self) -> int:
        """Return how many steps all its processes have reported as published."""
        return min((p.published for p in self.processes.values()), default=0)


@dataclass(frozen=True)
class Freeze:
    """A request to begin no further step, for a change.

    Attributes:
        lost: numbers of groups.
        breaks: whether sums over hosts that are under way are given up.
    """

    lost: frozenset[int]
    breaks: bool
