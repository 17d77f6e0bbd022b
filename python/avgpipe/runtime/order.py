"""In which order a lane runs the actions of its batches, and on which version of the weights each batch runs."""

from __future__ import annotations

from typing import Protocol

from avgpipe.schedule import Schedule
from avgpipe.schedule.stream import Step as Act
from avgpipe.schedule.stream import Stream


class Order(Protocol):
    def begin(self, batch: int, schedule: Schedule) -> list[Act]:
        """A batch is there: the actions that are certain now and were not before."""

    def end(self) -> list[Act]:
        """No batch comes for now: all actions that are left."""

    def version(self) -> int:
        """On which version the next batch runs; a later one never runs on a lower version."""

    def resume(self, updates: int) -> None:
        """Everything has ended, and the weights have seen so many updates."""


class OneByOne:
    """Each batch of the pipeline is flushed before the next one begins, and runs on the newest weights."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._begun = 0

    def begin(self, batch: int, schedule: Schedule) -> list[Act]:
        self._begun += 1
        column = schedule.columns[self._stage]
        return [Act(a.kind, batch, -1 if a.micro_batch is None else a.micro_batch) for a in column]

    def end(self) -> list[Act]:
        return []

    def version(self) -> int:
        return self._begun

    def resume(self, updates: int) -> None:
        self._begun = updates


class Overlapping:
    """1F1B that goes on over the batches, so that several are in flight.

    rule: "stash": a batch runs on the version that is the newest when its first forward runs on this stage, or with
    "vertical-sync" on the first stage (PipeDream: Narayanan et al. 2019, section 3.3). "double-buffer": batch t,
    counted from 0, runs on version max(t - 1, 0) (PipeDream-2BW: Narayanan et al. 2021, section 3.1).
    """

    def __init__(self, stage: int, stages: int, rule: str) -> None:
        self._own, self._first = Stream(stages - stage), Stream(stages)
        self._rule = rule
        self.resume(0)

    def resume(self, updates: int) -> None:
        self._begun = self._own_updates = self._first_updates = updates

    def begin(self, batch: int, schedule: Schedule) -> list[Act]:
        self._begun += 1
        return self._noted(
            self._own.add(batch, schedule.micro_batches), self._first.add(batch, schedule.micro_batches)
        )

    def end(self) -> list[Act]:
        return self._noted(self._own.drain(), self._first.drain())

    def version(self) -> int:
        # Of the actions that are certain already, all run before the next batch's first forward.
        return {
            "stash": self._own_updates,
            "vertical-sync": self._first_updates,
            "double-buffer": max(self._begun - 1, 0),
        }[self._rule]

    def _noted(self, own: list[Act], first: list[Act]) -> list[Act]:
        self._own_updates += sum(act.kind == "U" for act in own)
        self._first_updates += sum(act.kind == "U" for act in first)
        return own
