"""The activities of workers with their times: recorded by runs and computed by simulations."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class EventKind(str, Enum):
    """An activity of a worker. Of events that overlap, the first kind in this order counts for that time.

    A device that computes is not idle, whatever its host does meanwhile; and while nothing can run, the
    worker waits for background transfers.

    Attributes:
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
    AVERAGE = "average"
    HOST = "host"
    RECEIVE = "recv"
    SEND = "send"

    def __str__(self) -> str:
        return self.value


ACTIONS = tuple(EventKind)[:5]
COMPUTE_KINDS = frozenset((*ACTIONS, EventKind.AVERAGE))


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
