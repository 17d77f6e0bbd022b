"""A process's part of a pipeline: the stages it owns, a lane for each of their replicas, and the links to the
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from avgpipe.averaging import Reference
from avgpipe.plan import Plan
from avgpipe.runtime.lane import Lane, TrainingOptions
from avgpipe.runtime.links.channel import Channel, channels_into
from avgpipe.runtime.links.choose import Links
from avgpipe.runtime.model import Model
from avgpipe.runtime.order import OneByOne, Order, Overlapping
from avgpipe.runtime.replica import OptimizerFn, Replica, SchedulerFn
from avgpipe.runtime.scheduler import Scheduler
from avgpipe.runtime.stage import Stage
from avgpipe.runtime.streams import Handed, LaneStream, streams_of
from avgpipe.runtime.watchdog import Watchdog
from avgpipe.runtime.world import World
from avgpipe.weights import Arena


class Worker:
    def __init__(
        self,
        model: Model,
        plan: Plan,
        world: World,
        device: torch.device,
        seed: int,
        options: TrainingOptions,
        optimizer: OptimizerFn,
        lr_scheduler: SchedulerFn | None,
        link: str,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self.world, self.device = world, device
        self.stages = list(range(plan.stages)) if world.size == 1 else [world.rank]
        self._last = plan.stages - 1
        clipping = options.clip_grad_norm is not None

        def into(k: int) -> list[Channel]:
            return channels_into(k, plan.stages, plan.pipelines, model.shared(k), clipping)

        self._links = Links(world, self.stages, plan.stages, into, device, link, wire_dtype)
        self.links, self.mailbox = self._links.by_stage, self._links.mailbox
        self.replicas: dict[tuple[int, int], Replica] = {}  # by (stage, pipeline)
        self.references: dict[int, Reference | None] = {}
        self.lanes: dict[tuple[int, int], Lane] = {}
        self.streams = streams_of(device)
        for k in self.stages:
            self._build_stage(model, plan, k, seed, optimizer, lr_scheduler)
            for i in range(plan.pipelines):
                self.lanes[k, i] = Lane(
                    *(self.replicas[k, i], options, _order(plan, k)),
                    *(self.mailbox, self.links, model.shared(k)),
                    self._stream(k),
                )
        clock = self.streams.clock if self.streams is not None else None
        self.scheduler = Scheduler(list(self.lanes.values()), self.mailbox, world, clock)
        self._watchdog = (
            Watchdog(world, self.mailbox, self.scheduler.doing, self._links.processes)
            if world.size > 1
            else None
        )

    def _stream(self, k: int) -> LaneStream | None:
        if self.streams is None:
            return None
        reference = self.references[k]
        return self.streams.lane(k, reference is not None and reference.elasticity.pulls_at_the_end)

    def copy_ahead(self, inputs: Any, targets: Any) -> Handed | None:
        """Begin to copy what this worker's stages need of a batch to their device; None on the CPU."""
        if self.streams is None:
            return None
        first, last = self.stages[0] == 0, self.stages[-1] == self._last
        return self.streams.copies.start((inputs if first else None, targets if last else None))

    def _build_stage(
        self,
        model: Model,
        plan: Plan,
        k: int,
        seed: int,
        optimizer: OptimizerFn,
        lr_scheduler: SchedulerFn | None,
    ) -> None:
        stages = [
            Stage(model.stage_layers(k), model.bounds[k], k, seed, self.device) for _ in range(plan.pipelines)
        ]
        arenas = [Arena(p for p in stage.parameters() if p.requires_grad) for stage in stages]
        # A lone pipeline has nobody to agree with.
        self.references[k] = (
            Reference(
                arenas[0].weights,
                plan.pipelines,
                alpha=plan.alpha,
                rule=plan.rule,
                staleness=plan.staleness,
                period=plan.period,
            )
            if plan.pipelines > 1 and arenas[0].parameters
            else None
        )
        for i, (stage, arena) in enumerate(zip(stages, arenas)):
            self.replicas[k, i] = Replica(
                *(stage, i, optimizer, lr_scheduler, self.references[k], arena),
                versioned=plan.weights != "flush",
            )

    def weights(self, stage: int, which: str | int) -> Sequence[torch.Tensor]:
        """Flat weights of a stage: the reference's, or a pipeline's."""
        reference = self.references[stage]
        if which == "reference" and reference is not None:
            return reference.parameters
        return self.replicas[stage, 0 if which == "reference" else int(which)].arena.weights

    def close(self, patience_s: float) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
        self._links.close(patience_s)


def _order(plan: Plan, stage: int) -> Order:
    return OneByOne(stage) if plan.weights == "flush" else Overlapping(stage, plan.stages, plan.weights)
