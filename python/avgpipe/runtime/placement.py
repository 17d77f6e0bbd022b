"""Who runs what: seats, and the workers that hold them.

A seat is a replica of a stage; with one replica of each stage, seat k is stage k. Micro-batches go round robin, m to
replica m % R of each stage, and back through the same ones. A worker holds one seat, or those that the schedule gives
it; a process is a worker, or all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from avgpipe.plan import Plan


class Seat(NamedTuple):
    stage: int
    replica: int


@dataclass(frozen=True)
class Placement:
    """``workers``: the seats of each. ``ranks``: processes, one or as many as workers."""

    seats: tuple[Seat, ...]
    workers: tuple[tuple[int, ...], ...]
    ranks: int

    @classmethod
    def of(cls, plan: Plan, ranks: int) -> Placement:
        """ValueError for a number of ranks that is neither one nor that of the plan's workers."""
        replication = plan.replication or [1] * plan.stages
        seats = tuple(Seat(k, r) for k, replicas in enumerate(replication) for r in range(replicas))
        if ranks not in (1, plan.workers):
            raise ValueError(
                f"the plan is for {plan.workers} workers and there are {ranks} ranks: start one rank per worker, "
                "or a single process for all"
            )
        alone = tuple((seat,) for seat in range(len(seats)))
        return cls(seats, alone if plan.replication else plan.build_schedule().placement, ranks)

    @property
    def stages(self) -> int:
        return self.seats[-1].stage + 1

    @property
    def is_replicated(self) -> bool:
        return len(self.seats) > self.stages

    @cached_property
    def _seats_of(self) -> list[list[int]]:
        return [[n for n, seat in enumerate(self.seats) if seat.stage == k] for k in range(self.stages)]

    @cached_property
    def _worker_of(self) -> dict[int, int]:
        return {seat: worker for worker, seats in enumerate(self.workers) for seat in seats}

    def held_by(self, rank: int) -> list[int]:
        """The seats of a process."""
        return list(range(len(self.seats))) if self.ranks == 1 else list(self.workers[rank])

    def rank_of(self, seat: int) -> int:
        return 0 if self.ranks == 1 else self._worker_of[seat]

    def worker_of(self, seat: int) -> int:
        return self._worker_of[seat]

    def seats_of(self, stage: int) -> list[int]:
        """The stage's replicas."""
        return self._seats_of[stage]

    def at(self, stage: int, micro_batch: int) -> int:
        """The seat of a stage that a micro-batch goes to."""
        seats = self._seats_of[stage]
        return seats[micro_batch % len(seats)]

    def informant(self, seat: int, stage: int) -> int:
        """Which seat of another stage tells ``seat`` what all of them know."""
        return self.at(stage, self.seats[seat].replica)

    def informed(self, seat: int, stage: int) -> list[int]:
        """The seats of another stage that ``seat`` tells what all of its stage know."""
        return [
            other for other in self._seats_of[stage] if self.informant(other, self.seats[seat].stage) == seat
        ]

    def describe(self, rank: int) -> str:
        """What a process does, in words."""
        return "; ".join(map(self.name, self.held_by(rank)))

    def name(self, seat: int) -> str:
        stage, replica = self.seats[seat]
        alone = len(self._seats_of[stage]) == 1
        return f"stage {stage}" if alone else f"stage {stage}, replica {replica}"
