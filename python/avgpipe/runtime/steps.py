"""The steps of a lane: what it does next, and which messages it needs for that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from avgpipe.runtime.message import Key
from avgpipe.schedule.stream import Step as Act


class Step(NamedTuple):
    """``urgency``: less goes first, backwards before forwards, then the oldest batch."""

    kind: str
    micro_batch: int  # -1: none
    batch: int
    needs: tuple[Key, ...]
    begins: bool  # the first of its batch
    urgency: tuple[bool, int, int]

    def __str__(self) -> str:
        action = self.kind if self.micro_batch < 0 else f"{self.kind}{self.micro_batch}"
        return f"{action} of batch {self.batch}"


@dataclass(frozen=True)
class Neighbours:
    """Who a lane exchanges messages with. ``shared``: the other stages that hold parameters of this one."""

    pipeline: int
    stage: int
    stages: int
    shared: tuple[int, ...]
    clipping: bool

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def steps(self, acts: Iterable[Act]) -> Iterator[Step]:
        """The steps that actions are made of: an update has others before it."""
        for kind, batch, m in acts:
            for part in self._before_update() + "U" if kind == "U" else kind:
                urgency = kind == "F", batch, -self.stage
                begins = kind == "F" and m == 0
                yield Step(part, m, batch, self._needs(part, m, batch), begins, urgency)

    def _before_update(self) -> str:
        return ("TS" if self.shared else "") + ("N" if self.clipping else "")

    def _needs(self, kind: str, m: int, batch: int) -> tuple[Key, ...]:
        """Messages that a step consumes."""
        sources: Iterable[int] = ()
        message = kind
        if (kind == "F" or (kind == "U" and self.clipping)) and not self.first:
            sources, message = (self.stage - 1,), "F" if kind == "F" else "C"
        elif kind in "BN" and not self.last:
            sources = (self.stage + 1,)
        elif kind == "S":
            sources, message = self.shared, "T"
        return tuple(Key(message, self.pipeline, source, self.stage, batch, m) for source in sources)
