"""A process's part of a pipeline: its seats, a lane for each pipeline on each of them, and the links to the others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from avgpipe.device import Handed, LaneStream, streams_of
from avgpipe.elastic import Arena, Reference
from avgpipe.links.choose import Links
from avgpipe.links.message import Channel, Key
from avgpipe.plan import Plan
from avgpipe.ranks.watchdog import Watchdog
from avgpipe.ranks.world import SPARE_S, World
from avgpipe.runtime.exchange import Exchange
from avgpipe.runtime.group_sum import GroupSum, sum_group
from avgpipe.runtime.lane import Lane
from avgpipe.runtime.loss_scale import LossScale
from avgpipe.runtime.model import Model, trainable_parameters
from avgpipe.runtime.nonfinite import NonfiniteNotice
from avgpipe.runtime.options import TrainingOptions
from avgpipe.runtime.order import OneByOne, Order, Overlapping, ranks_of
from avgpipe.runtime.placement import Placement
from avgpipe.runtime.replica import OptimizerFn, Replica, SchedulerFn
from avgpipe.runtime.scheduler import Scheduler
from avgpipe.runtime.stage import Stage
from avgpipe.runtime.steps import Place, channels_into
from avgpipe.schedule.replicated import warm_up


class Worker:
    def __init__(
        self,
        model: Model,
        layers: Sequence[nn.Module],
        plan: Plan,
        placement: Placement,
        world: World,
        device: torch.device,
        seed: int,
        options: TrainingOptions,
        optimizer: OptimizerFn,
        lr_scheduler: SchedulerFn | None,
        link: str,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self.world, self.device, self.placement = world, device, placement
        self.seats = placement.held_by(world.rank)
        self.model, self._plan, self._options, self._seed = model, plan, options, seed
        self._make_optimizer, self._make_lr_scheduler = optimizer, lr_scheduler
        rank_of = [placement.rank_of(seat) for seat in range(len(placement.seats))]
        into = [self._channels_into(rank) for rank in range(world.size)]
        self._links = Links(world, rank_of, into, device, link, wire_dtype)
        self.links, self.mailbox = self._links.by_seat, self._links.mailbox
        self.replicas: dict[tuple[int, int], Replica] = {}  # by (seat, pipeline)
        self.references: dict[int, Reference | None] = {}  # by seat
        self.lanes: dict[tuple[int, int], Lane] = {}  # by (seat, pipeline)
        self._sums: list[GroupSum] = []
        self.streams = streams_of(device)
        self.columns = lru_cache(maxsize=None)(plan.columns)
        self.notice = NonfiniteNotice(world, placement, not options.skip_nonfinite)
        groups = self._replica_groups()
        for seat in self.seats:
            self._build_seat(seat, layers)
            shared = model.shared[placement.seats[seat].stage]
            for i in placement.pipelines_of(seat):
                place = self._place(seat, i)
                stream = self._stream(place)
                self.lanes[seat, i] = Lane(
                    *(self.replicas[seat, i], place, options, self._order(place)),
                    *(self.mailbox, self.links, shared, self.notice),
                    *(self._summing(place, groups), self._exchange(place, stream), stream),
                )
        clock = self.streams.clock if self.streams is not None else None
        self.scheduler = Scheduler(list(self.lanes.values()), self.mailbox, world, placement, clock)
        self._watchdog = (
            Watchdog(world, self.mailbox, self.scheduler.doing, self._links.processes)
            if world.size > 1
            else None
        )

    # ---- who is here ---------------------------------------------------------------------------------------------

    def holds(self, stage: int) -> bool:
        return any(self.placement.seats[seat].stage == stage for seat in self.seats)

    # ---- what is built -------------------------------------------------------------------------------------------

    def _place(self, seat: int, pipeline: int) -> Place:
        stage = self.placement.seats[seat].stage
        shared, skips = self.model.shared[stage], self.model.skips[stage]
        norm, scales = self._options.needs_norm, self._options.scales_late
        return Place(self.placement, seat, pipeline, tuple(sorted(shared)), norm, skips, scales)

    def _channels_into(self, rank: int) -> list[Channel]:
        placement = self.placement
        places = [self._place(s, i) for s in placement.held_by(rank) for i in placement.pipelines_of(s)]
        return channels_into(rank, placement, places)

    def _order(self, place: Place) -> Order:
        plan = self._plan
        if plan.weights == "flush":
            ordered = len(self.placement.workers) < len(self.placement.seats)
            ranks = lru_cache(maxsize=None)(lambda m: ranks_of(plan.build_schedule(m))) if ordered else None
            column = place.seat - self.placement.speakers(place.pipeline)[0]  # among its pipeline's seats
            return OneByOne(column, lambda m: self.columns(m), ranks)
        assert plan.weights is not None
        replication = plan.replication or [1] * plan.stages
        stage, replica, _ = self.placement.seats[place.seat]
        warm_ups = warm_up(replication, stage), warm_up(replication, 0)
        return Overlapping(plan.weights, *warm_ups, replica, replication[stage])

    def _replica_groups(self) -> dict[tuple[int, int], dist.ProcessGroup]:
        """By stage and pipeline, the group of the ranks that hold replicas of it; every rank makes all of them."""
        placement = self.placement
        return {
            (stage, i): self._group(placement.seats_of(stage, i))
            for stage in range(placement.stages)
            if placement.ranks > 1 and len(placement.seats_of(stage)) > 1
            for i in range(placement.pipelines)
        }

    def _group(self, seats: Sequence[int]) -> dist.ProcessGroup:
        limit_s = self.world.timeout_s + SPARE_S
        # Decided for the whole world: members that choose each for itself could name different backends.
        backend = "nccl" if self._links.has_nccl else "gloo"
        ranks = [self.placement.rank_of(seat) for seat in seats]
        return self.world.connect(lambda: sum_group(ranks, self.device, limit_s, backend))

    def _summing(self, place: Place, groups: dict[tuple[int, int], dist.ProcessGroup]) -> GroupSum | None:
        group = groups.get((place.stage, place.pipeline))
        if group is None:
            return None
        parameters = self.replicas[place.seat, place.pipeline].arena.parameters
        key = Key("Z", place.pipeline, place.seat, place.seat, -1, -1)
        self._sums.append(GroupSum(parameters, group, self.mailbox, key, self.device))
        return self._sums[-1]

    def _exchange(self, place: Place, stream: LaneStream | None) -> Exchange | None:
        reference = self.references[place.seat]
        if reference is None or not place.others:
            return None
        return Exchange(reference, self.mailbox, place.seat, place.others, stream)

    def _stream(self, place: Place) -> LaneStream | None:
        if self.streams is None:
            return None
        reference = self.references[place.seat]
        pulls = reference is not None and reference.elasticity.pulls_at_the_end
        k, r, _ = self.placement.seats[place.seat]
        # Spread pipelines that are all here have seats of their own, but share the first one's reference.
        return self.streams.lane(self.placement.seats_of(k)[r], pulls or bool(place.others))

    def copy_ahead(self, inputs: Any, targets: Any) -> Handed | None:
        """Begin to copy what this worker's stages need of a batch to their device; None on the CPU."""
        if self.streams is None:
            return None
        first, last = self.holds(0), self.holds(self.placement.stages - 1)
        return self.streams.copies.start((inputs if first else None, targets if last else None))

    def _build_seat(self, seat: int, layers: Sequence[nn.Module]) -> None:
        """``layers``: of the whole model."""
        k, r, _ = self.placement.seats[seat]
        pipelines = self.placement.pipelines_of(seat)
        first, end = self.model.bounds[k : k + 2]
        compiler = self._options.compiler
        stages = [Stage(layers[first:end], first, k, self._seed, self.device, compiler) for _ in pipelines]
        arenas = [Arena(trainable_parameters(stage)) for stage in stages]
        given = trainable_parameters(nn.ModuleList(layers[first:end]))
        hooks = [list((p._backward_hooks or {}).values()) for p in given]
        same = self.references.get(self.placement.seats_of(k)[r])  # of spread pipelines that are all here
        self.references[seat] = same or self._reference(arenas[0], pipelines)
        for i, stage, arena in zip(pipelines, stages, arenas):
            self.replicas[seat, i] = Replica(
                *(stage, i, self._make_optimizer, self._make_lr_scheduler, self.references[seat], arena),
                versioned=self._plan.weights != "flush",
                loss_scale=self._loss_scale() if k == self.model.stages - 1 else None,
                hooks=hooks,
            )

    def _loss_scale(self) -> LossScale | None:
        scale = self._options.loss_scale
        if scale is None:
            return None
        return LossScale(None if scale == "dynamic" else float(scale), self._plan.weights != "flush")

    def _reference(self, arena: Arena, here: Sequence[int]) -> Reference | None:
        """``here``: pipelines of the seat."""
        plan = self._plan
        if plan.pipelines == 1 or not arena.parameters:
            return None  # a lone pipeline has nobody to agree with
        return Reference(
            arena.weights,
            plan.pipelines,
            alpha=plan.alpha,
            rule=plan.rule,
            staleness=plan.staleness,
            period=plan.period,
            elsewhere=() if self.placement.ranks == 1 else set(range(plan.pipelines)) - set(here),
        )

    def weights(self, seat: int, which: str | int) -> Sequence[torch.Tensor]:
        """Flat weights of a seat: the reference's, or a pipeline's."""
        reference = self.references[seat]
        if which == "reference" and reference is not None:
            return reference.parameters
        pipeline = self.placement.pipelines_of(seat)[0] if which == "reference" else int(which)
        return self.replicas[seat, pipeline].arena.weights

    def settle(self, batches: int) -> None:
        """Wait until this process has what all of the first ``batches`` have told the references."""
        exchanges = [lane.exchange for lane in self.lanes.values() if lane.exchange is not None]
        streams = [lane.stream for lane in self.lanes.values() if lane.exchange and lane.stream]
        for stream in streams:
            stream.begin(None)  # after what the caller did to the reference since the lane's last batch

        def missing() -> list[Key]:
            for exchange in exchanges:
                exchange.collect()
            return [key for exchange in exchanges for key in exchange.missing(batches)]

        if exchanges and (keys := missing()):
            self.scheduler.wait_for(keys, lambda: not missing(), missing)
        for stream in streams:
            stream.end()

    def close(self, patience_s: float) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
        self._links.close(patience_s)
        for summing in self._sums:
            summing.close()
