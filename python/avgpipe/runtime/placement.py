"""Who runs what: seats, and the workers that hold them.

A seat is a replica of a stage; with one replica of each stage, seat k is stage k. Micro-batches go round robin, m to
replica m % R of each stage, and back through the same ones. Pipelines share all seats, or are spread: each has its own.
A worker holds one seat, or those that the schedule gives it; a process is a worker, or all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from avgpipe.plan import Plan


class Seat(NamedTuple):
    stage: int
    replica: int
    group: int  # of pipelines: 0, or the pipeline where each has its own seats


@dataclass(frozen=True)
class Placement:
    """``workers``: the seats of each. ``ranks``: processes, one or as many as workers. ``pipelines``: N."""

    seats: tuple[Seat, ...]
    workers: tuple[tuple[int, ...], ...]
    ranks: int
    pipelines: int

    @classmethod
    def of(cls, plan: Plan, ranks: int) -> Placement:
        """ValueError for a number of ranks that is neither one nor that of the plan's workers."""
        replication = plan.replication or [1] * plan.stages
        groups = range(plan.pipelines if plan.spread else 1)
        seats = tuple(
            Seat(k, r, g) for g in groups for k, count in enumerate(replication) for r in range(count)
        )
        if ranks not in (1, plan.workers):
            raise ValueError(
                f"the plan is for {plan.workers} workers and there are {ranks} ranks: start one rank per worker, "
                "or a single process for all"
            )
        size = len(seats) // len(groups)
        of_one = [(seat,) for seat in range(size)] if plan.replication else plan.build_schedule().placement
        workers = tuple(tuple(g * size + seat for seat in held) for g in groups for held in of_one)
        return cls(seats, workers, ranks, plan.pipelines)

    @property
    def stages(self) -> int:
        return self.seats[-1].stage + 1

    @property
    def is_spread(self) -> bool:
        return self.seats[-1].group > 0

    @property
    def is_replicated(self) -> bool:
        return any(seat.replica for seat in self.seats)

    @cached_property
    def _seats_of(self) -> dict[tuple[int, int], list[int]]:
        """By group and stage."""
        found: dict[tuple[int, int], list[int]] = {}
        for n, seat in enumerate(self.seats):
            found.setdefault((seat.group, seat.stage), []).append(n)
        return found

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

    def pipelines_of(self, seat: int) -> list[int]:
        """Those that have a lane there."""
        return [self.seats[seat].group] if self.is_spread else list(range(self.pipelines))

    def seats_of(self, stage: int, pipeline: int = 0) -> list[int]:
        """The stage's replicas."""
        return self._seats_of[pipeline if self.is_spread else 0, stage]

    def at(self, stage: int, micro_batch: int, pipeline: int = 0) -> int:
        """The seat of a stage that a micro-batch goes to."""
        seats = self.seats_of(stage, pipeline)
        return seats[micro_batch % len(seats)]

    def speakers(self, pipeline: int = 0) -> list[int]:
        """Of each stage, the seat that speaks for it."""
        return [self.seats_of(stage, pipeline)[0] for stage in range(self.stages)]

    def informant(self, seat: int, stage: int) -> int:
        """Which seat of another stage of its pipelines tells ``seat`` what all of them know."""
        _, replica, group = self.seats[seat]
        return self.at(stage, replica, group)

    def informed(self, seat: int, stage: int) -> list[int]:
        """The seats of another stage that ``seat`` tells what all of its stage know."""
        own, _, group = self.seats[seat]
        return [other for other in self.seats_of(stage, group) if self.informant(other, own) == seat]

    def label(self, worker: int) -> str:
        """Of a row of a picture."""
        seats = self.workers[worker]
        return self.name(seats[0]) if len(seats) == 1 else f"worker {worker}"

    def describe(self, rank: int) -> str:
        """What a process does, in words."""
        return "; ".join(map(self.name, self.held_by(rank)))

    def name(self, seat: int) -> str:
        stage, replica, group = self.seats[seat]
        alone = len(self.seats_of(stage, group)) == 1
        parts = [f"pipeline {group}"] if self.is_spread else []
        return ", ".join([*parts, f"stage {stage}", *([] if alone else [f"replica {replica}"])])
