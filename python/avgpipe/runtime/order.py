"""In which order a lane runs the actions of its batches, and on which version of the weights each batch runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from avgpipe.schedule import Action, Schedule
from avgpipe.schedule.stream import Step as Act
from avgpipe.schedule.stream import Stream

Urgency: TypeAlias = tuple[bool, int, int]
Ranks: TypeAlias = dict[tuple[int, str, int], int]  # by stage, kind and micro-batch (-1: none)
Columns: TypeAlias = Callable[
    [int], Sequence[Sequence[Action]]
]  # of a number of micro-batches, the columns of all seats


class Order(Protocol):
    @property
    def updates_late(self) -> bool:
        """Whether forwards and backwards may go on while an update waits, as no batch under way needs it."""

    def own(self, micro_batches: int) -> int:
        """How many of a batch's micro-batches come here."""

    def begin(self, batch: int, micro_batches: int) -> list[Act]:
        """A batch is there: the actions that are certain now and were not before."""

    def end(self) -> list[Act]:
        """No batch comes for now: all actions that are left."""

    def version(self) -> int:
        """On which version the next batch runs; a later one never runs on a lower version."""

    def urgency(self, act: Act) -> Urgency:
        """Of what could run on a worker, the least runs."""

    def resume(self, updates: int) -> None:
        """Everything has ended, and the weights have seen so many updates."""


class OneByOne:
    """Each batch of the pipeline is flushed before the next one begins, and runs on the newest weights.

    ranks: where a worker has several stages, of a number of micro-batches, the place of each action in its order.
    """

    updates_late = False

    def __init__(self, seat: int, columns: Columns, ranks: Callable[[int], Ranks] | None = None) -> None:
        self._seat, self._columns, self._ranks = seat, columns, ranks
        self._places: Ranks = {}

    def own(self, micro_batches: int) -> int:
        return sum(action.kind == "F" for action in self._columns(micro_batches)[self._seat])

    def begin(self, batch: int, micro_batches: int) -> list[Act]:
        column = self._columns(micro_batches)[self._seat]
        if self._ranks is not None:
            self._places = self._ranks(micro_batches)
        return [Act(a.kind, batch, -1 if a.micro_batch is None else a.micro_batch) for a in column]

    def end(self) -> list[Act]:
        return []

    def version(self) -> int:
        return 0

    def urgency(self, act: Act) -> Urgency:
        if self._ranks is None:
            return backwards_first(act, self._seat)
        return False, act.batch, self._places[self._seat, act.kind, act.micro_batch]

    def resume(self, updates: int) -> None:
        pass


class Overlapping:
    """1F1B that goes on over the batches, so that several are in flight.

    replica, replicas: of the stage; a replica runs every ``replicas``-th micro-batch of a batch. warm_up,
    first_warm_up: forwards in flight here, and on the first stage.
    rule: "stash": a batch runs on the version that is the newest when its first forward runs on this stage, or with
    "vertical-sync" on the first stage (PipeDream: Narayanan et al. 2019, section 3.3). "double-buffer": batch t,
    counted from 0, runs on version max(t - 1, 0) (PipeDream-2BW: Narayanan et al. 2021, section 3.1).
    """

    def __init__(self, rule: str, warm_up: int, first_warm_up: int, replica: int, replicas: int) -> None:
        self._own, self._first = Stream(warm_up), Stream(first_warm_up)
        self._rule, self._replica, self._replicas = rule, replica, replicas
        self.resume(0)

    @property
    def updates_late(self) -> bool:
        # A batch that runs on the newest version needs it at once; and sums of replicas use the same memory again.
        return self._rule != "stash" and self._replicas == 1

    def resume(self, updates: int) -> None:
        self._begun = self._own_updates = self._first_updates = updates

    def own(self, micro_batches: int) -> int:
        return len(range(self._replica, micro_batches, self._replicas))

    def begin(self, batch: int, micro_batches: int) -> list[Act]:
        self._begun += 1
        first = self._first.add(batch, micro_batches)
        self._first_updates += _updates(first)
        own = self.own(micro_batches)
        return self._noted(self._own.add(batch, own) if own else [*self._own.drain(), Act("U", batch, -1)])

    def end(self) -> list[Act]:
        self._first_updates += _updates(self._first.drain())
        return self._noted(self._own.drain())

    def version(self) -> int:
        # Of the actions that are certain already, all run before the next batch's first forward.
        return {
            "stash": self._own_updates,
            "vertical-sync": self._first_updates,
            "double-buffer": max(self._begun - 1, 0),
        }[self._rule]

    def urgency(self, act: Act) -> Urgency:
        return backwards_first(act, 0)

    def _noted(self, own: list[Act]) -> list[Act]:
        self._own_updates += _updates(own)
        step = self._replicas
        return [
            act if act.kind == "U" else act._replace(micro_batch=self._replica + step * act.micro_batch)
            for act in own
        ]


def backwards_first(act: Act, seat: int) -> Urgency:
    """Backwards before forwards, then the oldest batch; of several stages the later."""
    return act.kind == "F", act.batch, -seat


def ranks_of(schedule: Schedule) -> Ranks:
    """The place of each action in its worker's order."""
    return {
        (action.stage, action.kind, -1 if action.micro_batch is None else action.micro_batch): n
        for row in schedule.rows
        for n, action in enumerate(row)
    }


def _updates(acts: list[Act]) -> int:
    return sum(act.kind == "U" for act in acts)
