"""Actions, and the rows of actions that workers run.

A schedule is one row of actions per worker, executed unchanged. A worker may have several stages (their
actions are mixed in the row), and a stage several workers, its replicas: micro-batch m is then in the row of
replica m % R.

A row is one turn of an endless loop. Turn t runs an action with ``ahead=a`` for batch t + a of the pipeline;
actions of batches and micro-batches that do not exist are left out. So a row without any ``ahead`` flushes:
it runs one batch from the first forward to the update. With ``ahead``, the forwards of later batches are
between the backwards of this one, and the warm-up (the turns before batch 0) and the end (the remaining
backwards) follow from the same row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import cached_property
from itertools import accumulate
from operator import eq
from typing import NamedTuple, overload


class Kind(str, Enum):
    """The kind of an action. A backward is either whole, or split into its input and its weight part."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"  # computes the gradient of the input, for the stage before
    BACKWARD_WEIGHT = "W"  # runs later, needed by the update only
    UPDATE = "U"

    def __str__(self) -> str:
        return self.value

    @property
    def holds(self) -> int:
        """Return the change in the number of micro-batches in flight on the action's stage."""
        return {"F": 1, "B": -1, "W": -1}.get(self.value, 0)


class Version(NamedTuple):
    """Weights that a batch runs on.

    Attributes:
        number: Updates that the weights include.
        delay: Updates between these weights and the batch's own update, for which weights may be predicted.
    """

    number: int
    delay: int = 0


# Nine digits: any real count fits, and a cell of nonsense digits cannot become a gigantic integer.
COUNT = "0|[1-9][0-9]{0,8}"
_TOKEN = re.compile(rf"({COUNT})?(?:(U)|([FBIW])({COUNT}))(?:\+([1-9][0-9]{{0,8}}))?")


class _Fields(NamedTuple):
    kind: Kind
    micro_batch: int | None = None
    stage: int = -1
    ahead: int = 0


class Action(_Fields):
    """One action of a worker: the forward or backward of a micro-batch on a stage, or the stage's update.

    ``str(action)`` is a token such as "F3" or "U", "2F3" with its stage, and "2F3+1" with ``ahead``; :meth:`parse`
    inverts it. A tuple of its attributes.

    Attributes:
        kind: A :class:`Kind`, or its letter.
        micro_batch: Counted from 0 in its batch; None for an update.
        stage: The stage; -1 if the context sets it, as in a column of a schedule.
        ahead: How many batches the action is ahead of the turn that it runs in.
    """

    __slots__ = ()

    def __new__(
        cls, kind: Kind | str, micro_batch: int | None = None, stage: int = -1, ahead: int = 0
    ) -> Action:
        if type(kind) is not Kind:
            if kind not in list("FBIWU"):
                raise ValueError(f"kind={kind!r}: must be one of {', '.join(Kind)}")
            kind = Kind(kind)
        if kind is Kind.UPDATE:
            if micro_batch is not None:
                raise ValueError(f"micro_batch={micro_batch!r}: an update has none, pass Action('U')")
        elif type(micro_batch) is not int or micro_batch < 0:
            raise ValueError(f"micro_batch={micro_batch!r}: {kind} needs an int of at least 0")
        if type(stage) is not int or stage < -1:
            raise ValueError(f"stage={stage!r}: must be an int of at least 0, or -1 to leave it open")
        if type(ahead) is not int or ahead < 0:
            raise ValueError(f"ahead={ahead!r}: must be an int of at least 0")
        return tuple.__new__(cls, (kind, micro_batch, stage, ahead))

    def __str__(self) -> str:
        stage = "" if self.stage < 0 else self.stage
        micro_batch = "" if self.micro_batch is None else self.micro_batch
        ahead = f"+{self.ahead}" if self.ahead else ""
        return f"{stage}{self.kind.value}{micro_batch}{ahead}"

    @classmethod
    def parse(cls, token: str) -> Action:
        """Return the action that prints as ``token``; ValueError if there is none."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise ValueError(
                f"{token!r} is not an action: write F, B, I or W with a micro-batch, as F3, or U"
            )
        stage, update, kind, micro_batch, ahead = match.groups()
        number = None if update else int(micro_batch)
        return cls(Kind(update or kind), number, int(stage or -1), int(ahead or 0))


class Loop(NamedTuple):
    """``actions``, repeated ``repeats`` times; their micro-batches rise by ``stride`` with each repetition."""

    actions: tuple[Action, ...]
    repeats: int = 1
    stride: int = 1


class Row(Sequence[Action]):
    """The actions of a worker in order. They are kept as loops, so that millions of them take no memory.

    Equal to every row with the same actions, however they are divided into loops.
    """

    def __init__(self, actions: Iterable[Action] | None = None, *, loops: Iterable[Loop] = ()) -> None:
        kept = loops if actions is None else [Loop(tuple(actions))]
        self.loops = tuple(loop for loop in kept if loop.actions and loop.repeats)

    def __len__(self) -> int:
        return sum(len(loop.actions) * loop.repeats for loop in self.loops)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Action]: ...
    def __getitem__(self, index: int | slice) -> Action | Sequence[Action]:
        if isinstance(index, slice):
            return tuple(self)[index]
        left = index + len(self) if index < 0 else index
        for loop in self.loops if left >= 0 else ():
            turn, position = divmod(left, len(loop.actions))
            if turn < loop.repeats:
                return _moved(loop.actions[position], turn * loop.stride)
            left -= len(loop.actions) * loop.repeats
        raise IndexError(f"index {index}: the row has {len(self)} actions")

    def __iter__(self) -> Iterator[Action]:
        for loop in self.loops:
            for turn in range(loop.repeats):
                for action in loop.actions:
                    yield _moved(action, turn * loop.stride)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Row):
            return NotImplemented
        return self.loops == other.loops or (len(self) == len(other) and all(map(eq, self, other)))

    def __hash__(self) -> int:
        return hash((len(self), self[0], self[-1]) if self.loops else 0)

    def __repr__(self) -> str:
        return f"Row([{' '.join(map(str, self))}])"

    @cached_property
    def kinds(self) -> tuple[Action, ...]:
        """Return one action for each place in a loop: enough to know which kinds, stages and batches there are."""
        return tuple(action for loop in self.loops for action in loop.actions)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Return the stages that the row has actions of, ascending."""
        return tuple(sorted({action.stage for action in self.kinds}))

    @cached_property
    def ahead(self) -> int:
        """Return by how many batches the row runs ahead at most; 0 with a flush."""
        return max((action.ahead for action in self.kinds), default=0)

    @cached_property
    def lookahead(self) -> int:
        """Return how many later batches must have begun before the row reaches the last update of a turn's batch."""
        ahead = before = 0
        for action in self.kinds:
            if action.kind is Kind.UPDATE:
                before = ahead
            ahead = max(ahead, action.ahead)
        return max(before, ahead - 1)

    def peak_in_flight(self, stage: int | None = None) -> int:
        """Return the most micro-batches in flight at once in steady state, on ``stage`` or on all of the row."""

        def holds(action: Action) -> int:
            return action.kind.holds if stage in (None, action.stage) else 0

        held = peak = sum(loop.repeats * holds(a) * a.ahead for loop in self.loops for a in loop.actions)
        for loop in self.loops:
            *_, rise = each = list(accumulate(map(holds, loop.actions)))  # change of each repetition
            peak = max(peak, held + max(each) + max(0, (loop.repeats - 1) * rise))
            held += loop.repeats * rise
        return peak


def _moved(action: Action, by: int) -> Action:
    if not by or action.micro_batch is None:
        return action
    return action._replace(micro_batch=action.micro_batch + by)


class RowCursor:
    """Yields the actions of one pipeline on one worker, in order, as its batches become known.

    Args:
        row: Row of the worker in the schedule.
        weights: The version of the weights that a batch runs on; versions are counted in updates. "flush":
            not counted, as each batch runs on the newest. "stash", "predicted": the newest when the row
            reaches the batch's first forward on the stage. "vertical-sync": the version of the first stage,
            on all stages. "double-buffer": version max(t-1, 0) for batch t, counted from 0.
        first_row: The row of the first stage, for "vertical-sync".
        warmup: The number of first batches that run on the newest version; each begins after the one before
            has ended.
    """

    def __init__(
        self, row: Row, weights: str = "flush", first_row: Row | None = None, warmup: int = 0
    ) -> None:
        self._row, self._weights = tuple(row), weights
        self._ahead = row.ahead
        self._first_row = () if first_row is None else tuple(first_row)
        self._delays: dict[int, int] = {}
        self.resume(0, warmup)

    def resume(self, updates: int, warmup: int | None = None) -> None:
        """Refill the pipeline after all batches have ended and the weights have had ``updates`` updates.

        ``warmup``: batches that are still to run on the newest version; None: as many as at first.
        """
        if warmup is not None:
            self._late_from = updates + warmup
        self._updates = updates  # at the start of turn 0
        self._begun = 0  # batches since then
        self._turn, self._index = -self._ahead, 0
        self._known: dict[int, tuple[int, int]] = {}  # by turn, of batches that may have actions left

    def version(self, stage: int, later: int = 0) -> int:
        """Return the version on ``stage`` of the next batch, or of one ``later`` later; it never decreases."""
        if self._weights == "flush":
            return 0
        begun = self._begun + later
        if self._weights == "double-buffer":
            turn = self._updates + begun
            return turn if turn < self._late_from else max(turn - 1, 0)
        return self._updates + max(0, begun - self.steady_delay(stage))

    def delay(self, stage: int, later: int = 0) -> int:
        """Return the number of updates between the version that such a batch runs on and the batch's own update."""
        return (
            0
            if self._weights == "flush"
            else self._updates + self._begun + later - self.version(stage, later)
        )

    def steady_delay(self, stage: int) -> int:
        """Return :meth:`delay` once the pipeline is full."""
        if self._weights in ("flush", "double-buffer"):
            return int(self._weights == "double-buffer")
        if stage not in self._delays:
            synced = self._weights == "vertical-sync"
            row, first = (self._first_row, 0) if synced else (self._row, stage)
            self._delays[stage] = -_updates_before_first_forward(row, first)
        return self._delays[stage]

    def begin(self, batch: int, micro_batches: int) -> list[tuple[Action, int]]:
        """Return the actions that are determined once ``batch`` follows, each with its batch.

        These are all actions up to the first one of an unknown batch; with a flush, all of this batch.
        """
        self._known[self._begun] = batch, micro_batches
        self._begun += 1
        return list(self._go_on(until_end=False))

    def end(self) -> list[tuple[Action, int]]:
        """Return all remaining actions, as no batch follows for now; a later batch begins with another warm-up."""
        found = list(self._go_on(until_end=True))
        self.resume(self._updates + self._begun)
        return found

    def _go_on(self, until_end: bool) -> Iterator[tuple[Action, int]]:
        while self._turn < self._begun:
            while self._index < len(self._row):
                action = self._row[self._index]
                turn = self._turn + action.ahead
                if turn >= self._begun and not until_end:
                    return
                batch, micro_batches = self._known.get(turn, (-1, 0))
                if batch >= 0 and (action.micro_batch is None or action.micro_batch < micro_batches):
                    yield action, batch
                self._index += 1
            self._known.pop(self._turn, None)
            self._turn, self._index = self._turn + 1, 0


def _updates_before_first_forward(row: Sequence[Action], stage: int) -> int:
    """Return how many turns' updates of the stage precede the first forward of a turn's batch, minus the turn."""
    own = [a for a in row if a.stage == stage]
    forwards = [(-a.ahead, n) for n, a in enumerate(own) if a.kind is Kind.FORWARD]
    if not forwards:
        return 0
    turn, position = min(forwards)
    return turn + any(a.kind is Kind.UPDATE for a in own[:position])


# ---- events ----------------------------------------------------------------------------------------------------------


class EventKind(str, Enum):
    """An activity of a worker. Of events that overlap, the first kind in this order counts for that time.

    A device that computes is not idle, whatever its host does meanwhile; and while nothing can run, the
    worker waits for background transfers.

    Attributes:
        GRAPH: All forwards and backwards of a batch, or some, launched as one CUDA graph.
        AVERAGE: Elastic averaging.
        HOST: Other work of the host; the detail names it: "loader", "caller" or any other word.
        RECEIVE: Nothing could run until a message arrived; the detail names it: "F" (an activation), "B" (a
            gradient) or any other word. Stage, batch and micro-batch are those of the action that needed the
            message.
        SEND: Handing tensors to a link.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UPDATE = "U"
    GRAPH = "graph"
    AVERAGE = "average"
    HOST = "host"
    RECEIVE = "recv"
    SEND = "send"

    def __str__(self) -> str:
        return self.value


ACTIONS = tuple(EventKind)[:5]
COMPUTE_KINDS = frozenset((*ACTIONS, EventKind.GRAPH, EventKind.AVERAGE))


class _EventFields(NamedTuple):
    stage: int
    pipeline: int
    batch: int
    micro_batch: int | None
    kind: str
    start_s: float
    end_s: float
    detail: str
    worker: int


class Event(_EventFields):
    """An activity of a worker for a stage and a pipeline; times in seconds on a clock common to all workers.

    Attributes:
        micro_batch: None if there is none, as for an update.
        kind: An :class:`EventKind`, or any other word.
        detail: What was awaited, or what the host did; "" if unknown.
        worker: Row of the timeline; by default the stage, for schedules with one worker per stage.
    """

    __slots__ = ()

    def __new__(
        cls,
        stage: int,
        pipeline: int,
        batch: int,
        micro_batch: int | None,
        kind: str,
        start_s: float,
        end_s: float,
        detail: str = "",
        worker: int | None = None,
    ) -> Event:
        row = stage if worker is None else worker
        return cls._make((stage, pipeline, batch, micro_batch, kind, start_s, end_s, detail, row))

    def __str__(self) -> str:
        return f"{self.kind}" if self.micro_batch is None else f"{self.kind}{self.micro_batch}"

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s
