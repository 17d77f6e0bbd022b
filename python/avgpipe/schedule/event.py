"""What a worker did, and when: what a run notes and a simulation finds."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class EventKind(str, Enum):
    """What a worker did. Of events that overlap, the first kind in this order has the moment.

    A device that computes is not idle, whatever its host does meanwhile; and while nothing can run, transfers in the
    background are what is waited for.

    Attributes:
        AVERAGE: Elastic averaging.
        HOST: Other work of the host; the detail says what: "loader", "caller" or any other word.
        RECEIVE: Nothing could run until a message came; the detail says which: "F" (an activation), "B" (a gradient)
            or any other word. Stage, batch and micro-batch are those of the action that the message let run.
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
    """Something that a worker did for a stage and a pipeline; times in seconds on a clock common to all workers.

    Attributes:
        micro_batch: None where there is none, as for an update.
        kind: An :class:`EventKind`, or any other word.
        detail: What was awaited, or what the host did; "" if that is not known.
        worker: The row of the timeline; by default the stage, as where every worker has one.
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
