"""Placement: the worker and process that runs each stage, and for which pipelines.

A *stage replica* is one copy of a stage. Replicas are numbered over all stages; if each stage has one,
replica k is stage k. Micro-batches go round robin, m to replica m % R of each stage, and back through the
same ones. Pipelines share all replicas, or have dedicated ones. A worker holds one replica, or those that the
schedule gives it; a process (rank) runs one worker, or all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from avgpipe.plan import Plan


class StageReplica(NamedTuple):
    stage: int
    replica: int  # among those of the stage
    group: int  # of pipelines: 0, or the pipeline if each has its own replicas


@dataclass(frozen=True)
class Placement:
    """The workers and processes of a plan's stage replicas.

    Attributes:
        replicas: all of them, by their numbers.
        workers: the numbers that each worker holds.
        ranks: processes, one or as many as workers.
        pipelines: those that these processes run: all of the plan, or one that is isolated.
    """

    replicas: tuple[StageReplica, ...]
    workers: tuple[tuple[int, ...], ...]
    ranks: int
    pipelines: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, ranks: int, isolated: int | None = None) -> Placement:
        """Place ``plan`` on ``ranks`` processes; ValueError unless they are one, or as many as it has workers.

        ``isolated``: the pipeline that these processes run, if each pipeline has its own processes.
        """
        if ranks not in (1, plan.workers):
            raise ValueError(
                f"the plan is for {plan.workers} workers and there are {ranks} ranks: start one rank per worker, "
                "or a single process for all"
            )
        schedule = plan.build_schedule()
        groups = range(plan.pipelines if plan.spread else 1)
        replicas: list[StageReplica] = []
        workers: list[list[int]] = [[] for _ in range(len(groups) * schedule.workers)]
        for g in groups:
            for k, of_stage in enumerate(schedule.replicas):
                for r, worker in enumerate(of_stage):
                    workers[g * schedule.workers + worker].append(len(replicas))
                    replicas.append(StageReplica(k, r, g))
        pipelines = tuple(range(plan.pipelines)) if isolated is None else (isolated,)
        return cls(tuple(replicas), tuple(map(tuple, workers)), ranks, pipelines)

    @property
    def stages(self) -> int:
        return self.replicas[-1].stage + 1

    @property
    def is_dedicated(self) -> bool:
        """Whether each pipeline has replicas, and workers, of its own."""
        return self.replicas[-1].group > 0

    @property
    def evaluates(self) -> int:
        """The pipeline whose replicas evaluate the reference."""
        return self.pipelines[0]

    @property
    def is_replicated(self) -> bool:
        return any(replica.replica for replica in self.replicas)

    @property
    def is_plain(self) -> bool:
        """Whether worker k is stage k."""
        return self.workers == tuple((k,) for k in range(self.stages))

    @cached_property
    def _by_stage(self) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for n, replica in enumerate(self.replicas):
            found.setdefault((replica.group, replica.stage), []).append(n)
        return found

    @cached_property
    def _worker_of(self) -> dict[int, int]:
        return {n: worker for worker, held in enumerate(self.workers) for n in held}

    def held_by(self, rank: int) -> list[int]:
        """Return the replicas of a process."""
        return list(range(len(self.replicas))) if self.ranks == 1 else list(self.workers[rank])

    def rank_of(self, replica: int) -> int:
        return 0 if self.ranks == 1 else self._worker_of[replica]

    def worker_of(self, replica: int) -> int:
        return self._worker_of[replica]

    def stage_of(self, replica: int) -> int:
        return self.replicas[replica].stage

    def pipelines_of(self, replica: int) -> list[int]:
        """Return the pipelines that train on a replica."""
        return [self.replicas[replica].group] if self.is_dedicated else list(self.pipelines)

    def replicas_of(self, stage: int, pipeline: int = 0) -> list[int]:
        return self._by_stage[pipeline if self.is_dedicated else 0, stage]

    def replica_for(self, stage: int, micro_batch: int, pipeline: int = 0) -> int:
        """Return the replica of a stage that a micro-batch goes to."""
        replicas = self.replicas_of(stage, pipeline)
        return replicas[micro_batch % len(replicas)]

    def first_replicas(self, pipeline: int = 0) -> list[int]:
        """Return each stage's first replica: it evaluates, and sends what all replicas of its stage know."""
        return [self.replicas_of(stage, pipeline)[0] for stage in range(self.stages)]

    def source_for(self, replica: int, stage: int) -> int:
        """Return the replica of another stage that sends that stage's results to ``replica``."""
        _, number, group = self.replicas[replica]
        return self.replica_for(stage, number, group)

    def receivers_of(self, replica: int, stage: int) -> list[int]:
        """Return the replicas of another stage that ``replica`` sends its stage's results to."""
        own, _, group = self.replicas[replica]
        return [other for other in self.replicas_of(stage, group) if self.source_for(other, own) == replica]

    def has_part_in(self, rank: int, pipeline: int) -> bool:
        return any(pipeline in self.pipelines_of(replica) for replica in self.held_by(rank))

    def label(self, worker: int) -> str:
        """Return the label of a worker's row in a plot."""
        held = self.workers[worker]
        return self.name(held[0]) if len(held) == 1 else f"worker {worker}"

    def describe(self, rank: int) -> str:
        """Return a process's stage replicas in words."""
        return "; ".join(map(self.name, self.held_by(rank)))

    def name(self, replica: int) -> str:
        stage, number, group = self.replicas[replica]
        alone = len(self.replicas_of(stage, group)) == 1
        parts = [f"pipeline {group}"] if self.is_dedicated else []
        return ", ".join([*parts, f"stage {stage}", *([] if alone else [f"replica {number}"])])
