"""Which pipelines train at each step, where each may join and leave.

A *turn* in this package is one step of every pipeline: one batch that all share, or one batch for each. Steps
are numbered over the life of a run. The members of a step are decided before any process begins it; which of
them count in it, when it ends: a lost pipeline counts in the steps that all its processes had published, and
in none after. Every process of every pipeline has the same roster, and decides the same from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from avgpipe_ext.ring import Bell, Memory

VERSION = 1
OVER = "the run is over"  # why a pipeline that joins too late is ended
JOIN = "join"  # first message of another command that starts a pipeline
ENDED = "ended"  # its last message
_NEVER = 2**62


@dataclass(frozen=True)
class Term:
    """The steps from a pipeline's joining to its leaving. One that was lost and joined again has two terms.

    Attributes:
        pipeline: its number.
        number: identifies the term over the life of a run.
        first: the first step of which it is a member.
        donor: the member whose state it begins with; None for a pipeline that begins the run.
        published: the first step that it has not published, in which it does not count.
        end: the first step of which it is no longer a member; its steps from ``published`` to here are lost.
    """

    pipeline: int
    number: int
    first: int
    donor: int | None = None
    published: int = _NEVER
    end: int = _NEVER

    @property
    def has_ended(self) -> bool:
        return self.end != _NEVER


class Roster:
    """The known terms of all pipelines."""

    def __init__(self, terms: Sequence[Term] = ()) -> None:
        self.terms = list(terms)

    def members(self, turn: int) -> list[int]:
        """Return the members of a step, in ascending order."""
        return sorted(term.pipeline for term in self.terms if term.first <= turn < term.end)

    def counting(self, turn: int) -> dict[int, Term]:
        """Return the terms that count in a step, by pipeline; one may still be lost before publishing it."""
        found = {term.pipeline: term for term in self.terms if term.first <= turn < term.published}
        return dict(sorted(found.items()))

    def joining(self, turn: int) -> list[Term]:
        """Return the terms that begin with a step and with a donor's state."""
        return [term for term in self.terms if term.first == turn and term.donor is not None]

    @property
    def present(self) -> list[Term]:
        """The terms whose end is not known."""
        return [term for term in self.terms if not term.has_ended]

    # ---- changes -----------------------------------------------------------------------------------------------------

    def enter(self, term: Term) -> None:
        """Add a term, whose first step no process has begun."""
        self.terms.append(term)

    def leave(self, pipeline: int, published: int, begun: int) -> Term:
        """End a member's term; it published the steps before ``published``, and none has begun ``begun``."""
        number, term = next(
            (n, s) for n, s in enumerate(self.terms) if s.pipeline == pipeline and not s.has_ended
        )
        end = max(begun, term.first)
        self.terms[number] = gone = replace(term, published=min(published, end), end=end)
        heirs = [other for other in self.present if other.first < begun]
        for n, other in enumerate(self.terms):  # another member can be the donor: all have that state
            if heirs and other.donor == pipeline and other.first >= begun and not other.has_ended:
                self.terms[n] = replace(other, donor=heirs[0].pipeline)
        return gone

    def forget(self, turn: int) -> None:
        """Drop the terms that ended before step ``turn``."""
        self.terms = [term for term in self.terms if term.end > turn]

    # ---- over the wire -----------------------------------------------------------------------------------------------

    def to_json(self) -> list[Any]:
        return [astuple(term) for term in self.terms]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Roster:
        return cls([Term(*value) for value in values])


def encoded(message: Sequence[Any]) -> bytes:
    return json.dumps(message).encode()


def received(connection: Connection, most_bytes: int = 2**20) -> list[Any]:
    """Read a message; OSError or EOFError for a closed connection, ValueError for an invalid message."""
    message = json.loads(connection.recv_bytes(most_bytes))
    if not isinstance(message, list) or not message:
        raise ValueError(f"not a message: {message!r}")
    return message


@dataclass
class Process:
    """One process of a pipeline, as far as it has reported.

    Attributes:
        name: its name in messages.
        pid: its process id, from the kernel.
        heard_at: time of its last message, on the monotonic clock.
        doing: what it was doing then.
        batches: the number of the loader's batches that it has begun; None before its first report.
        begun: the number of steps that it has begun, its answer to the newest freeze.
        wants: "enter", or "leave" once it is done.
        late: the step on which it timed out, and the timeout in seconds, until that is handled.
        reported_late: the last step on which it timed out although every pipeline had published it.
    """

    connection: Connection
    name: str
    pid: int
    heard_at: float
    doing: str = "its start"
    batches: int | None = None
    begun: int | None = None
    wants: str = ""
    late: tuple[int, float] | None = None
    reported_late: int = -1


@dataclass
class JoiningGroup:
    """The processes of a pipeline that were started together.

    Attributes:
        number: identifies the group over the life of the run.
        size: the number of processes.
        published: for each of its stage replicas (``places``), the number of steps published since the
            pipeline joined.
        period: the number of steps from one published update to the next.
        found: the position of the run when the first of them connected, which all of them get.
        bells: by rank, the bell that others ring for it.
        digests: by rank, digests of what must be the same in all pipelines, and of the initial weights.
        memory: by name, the memory that its processes have requested.
        given: by name, the state that others have sent to it, until it has begun with that state.
        is_far: whether its processes are on another host.
        ready_at: when its processes wanted to enter, on the monotonic clock.
        is_done: whether it has left the run regularly.
        has_ended: whether all its processes have ended.
    """

    pipeline: int
    number: int
    size: int
    published: Memory
    places: int
    period: int
    found: Mapping[str, Any]
    bells: dict[int, Any] = field(default_factory=dict)
    digests: dict[int, list[str]] = field(default_factory=dict)
    processes: dict[int, Process] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)
    given: dict[str, Memory | None] = field(default_factory=dict)
    is_far: bool = False
    ready_at: float = float("inf")
    is_done: bool = False
    has_ended: bool = False

    def all_want(self, what: str) -> bool:
        return len(self.processes) == self.size and all(p.wants == what for p in self.processes.values())

    def turns_published(self) -> int:
        """Return how many steps all its stage replicas have published."""
        return min(Bell(self.published, n * Bell.BYTES).count() for n in range(self.places))
