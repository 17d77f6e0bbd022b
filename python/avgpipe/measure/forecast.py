"""Forecast of a plan on a cluster, from a profile: seconds per batch by simulation, and bytes of each worker."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any

from avgpipe.plan import Plan
from avgpipe.planning import Costs, steady_batch_s
from avgpipe.planning.chain import Chain
from avgpipe.planning.cluster import Cluster, ring_s
from avgpipe.planning.cuts import Cut, Training
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe.rules import RULES
from avgpipe.schedule import build_schedule

# Bucket of the runtime's sum of gradients over replicas: the sum of the last one begins after the backward.
_BUCKET_BYTES = 8 * 2**20
_JITTERED = 48  # batches of each pipeline, which give the mean to about 1 %
_AT_ONCE = LinkProfile(0.0, inf)


@dataclass(frozen=True)
class Forecast:
    """The prediction for a plan.

    Attributes:
        batch_s: Seconds from one batch's end to the next one's in the steady state.
        memory_bytes: Memory of each worker, with the replicas of a stage one after the other.
    """

    plan: Plan
    batch_s: float
    memory_bytes: tuple[float, ...]


class OnCluster(Training):
    """A plan without partition on the first workers of a cluster: an objective of the search over cuts.

    Its seconds are of one pipeline's part of a batch. Replicas of a stage are neighbours, as the runtime
    numbers them, and each runs its share of the micro-batches.
    """

    def __init__(self, profile: Profile, plan: Plan, batch_size: int, cluster: Cluster) -> None:
        if plan.workers > cluster.workers:
            raise ValueError(f"the plan needs {plan.workers} workers, the cluster has {cluster.workers}")
        if plan.spread or len(set(plan.replication or [1])) > 1:
            raise ValueError(
                "forecasts need pipelines that share all workers, and equally many replicas of each stage; this plan "
                f"has replication {list(plan.replication or ()) or None}, spread {plan.spread}"
            )
        self.plan, self._cluster = plan, cluster
        self._width = (plan.replication or [1])[0]
        own = -(-plan.micro_batches_each // self._width)
        schedule = build_schedule(plan.schedule, plan.stages, own, plan.advance, plan.stages_per_worker)
        chain = Chain(profile, batch_size / plan.micro_batches)
        shared = RULES[plan.rule or ""].tries
        super().__init__(chain, schedule, plan.pipelines, plan.recompute, plan.weights or "flush", shared)
        worker_of = {k: n for n, stages in enumerate(schedule.placement) for k in stages}
        self._workers = [
            range(self._width * worker_of[k], self._width * (worker_of[k] + 1)) for k in range(plan.stages)
        ]
        self._speeds = [min(cluster.devices[n].speed for n in workers) for workers in self._workers]
        self._links = [self._link(*pair) for pair in pairwise(self._workers)]

    @property
    def _gain(self) -> float:
        """Return the throughput of two pipelines on a device over that of one."""
        return self._chain.profile.lane_gain(self._chain.micro_batch_size) if self.plan.pipelines > 1 else 1.0

    @property
    def limits(self) -> list[float] | None:
        """Return the bytes of each worker of a replica of the model, the least of all replicas; None: no limit."""
        devices = self._cluster.devices
        memory = [
            min(devices[n].memory_bytes or inf for n in self._workers[stages[0]]) for stages in self.placement
        ]
        return memory if min(memory) < inf else None

    def forecast(self, cut: Cut) -> Forecast:
        plan = replace(self.plan, partition=list(cut) if cut else None)
        sizes = tuple(size for size in self.worker_bytes(cut) for _ in range(self._width))
        return Forecast(plan, plan.shares * self._jittered_s(cut), sizes)

    def _jittered_s(self, cut: Cut) -> float:
        """Return ``seconds`` with jitter, which makes waits longer."""
        jitter = self._chain.profile.jitter
        if not jitter:
            return self.seconds(cut)
        costs = replace(self.costs(cut), jitter=jitter)
        return steady_batch_s(
            self._schedule, costs, pipelines=self.plan.pipelines, batches=_JITTERED * self.plan.pipelines
        )

    def worker_bytes(self, cut: Cut) -> list[float]:
        sizes = [self.stage_bytes(*block) - self.process_bytes for block in self._blocks(cut)]
        return [sum(sizes[k] for k in stages) + self.process_bytes for stages in self.placement]

    def _blocks(self, cut: Cut) -> list[tuple[int, int, int]]:
        """Return each stage's index, first layer and the one after its last."""
        bounds = [0, *cut, self.layers]
        return list(zip(range(self.plan.stages), bounds, bounds[1:]))

    def costs(self, cut: Cut) -> Costs:
        found = super().costs(cut).on_devices(self._speeds)
        updates_s: Any = found.update_s
        sent = [self._chain.boundary_bytes[first] for first in cut]
        return replace(
            found,
            update_s=[update_s + tied_s for update_s, tied_s in zip(updates_s, self._tied_s(cut))],
            transfer_s=[size / link.bytes_per_s for size, link in zip(sent, self._links)],
            latency_s=[link.latency_s for link in self._links],
            allreduce_s=[self._sum_s(*block) for block in self._blocks(cut)],
            concurrency_gain=(1.0, self._gain) if self._gain > 1 else (1.0,),
        )

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of one pipeline's part of a batch on one replica of each stage."""
        return self._schedule.micro_batches

    def costs_in_memory(self, cut: Cut) -> tuple[Costs | None, float | None]:
        """Return the costs, with the memory of a micro-batch in flight and of an idle pipeline, and the limit.

        Memory is in shares of the worker's, so the limit is 1; without limits it is in bytes, and the limit
        None. The costs are None if the memory may not be enough for 1F1B.
        """
        limits, count = self.limits, self.plan.pipelines
        least = [min(self.micro_batches, self.plan.stages - k) for k in range(self.plan.stages)]
        held, kept = [], []
        for k, first, last in self._blocks(cut):
            scale = 1.0 if limits is None else limits[k]
            # From this number on, each further micro-batch holds equally many bytes, with recomputation too.
            few = 1 + count
            size, more = (self.bytes_with(k, first, last, n * few) for n in (1, 2))
            held.append((more - size) / few / scale)
            kept.append(max(0.0, size / scale - few * held[-1]) / count)
        if limits is not None and any(count * (n * h + w) > 1 for n, h, w in zip(least, held, kept)):
            return None, None
        costs = replace(self.costs(cut), activation_bytes=held, weight_bytes=kept)
        return costs, None if limits is None else 1.0

    def work_s(self, k: int, first: Any, last: Any) -> Any:
        return super().work_s(k, first, last) / (self._speeds[k] * self._gain)

    def moved_s(self, k: int, first: Any, last: Any) -> Any:
        sizes = self._chain.boundary_bytes
        into = self._links[k - 1].seconds(sizes[first]) if k else 0.0
        out = self._links[k].seconds(sizes[last]) if k < len(self._links) else 0.0
        return 2 * self.micro_batches * (into + out)

    def _link(self, here: range, there: range) -> LinkProfile:
        """Return the link from a stage to the next, all replicas at once; free between two stages of one worker."""
        return _AT_ONCE if here == there else self._cluster.link(here, there)

    def _sum_s(self, k: int, first: int, last: int) -> float:
        """Return the seconds of the sum of gradients over replicas that do not overlap with the backward."""
        if self._width == 1:
            return 0.0
        link = self._ring(self._workers[k])
        size = self._chain.parameter_bytes(first, last)
        whole_s = ring_s(size, self._width, link.bytes_per_s) + 2 * (self._width - 1) * link.latency_s
        at_end = min(1.0, _BUCKET_BYTES / max(size, 1.0))
        return float(max(whole_s - self._chain.backward_s(first, last) / self._speeds[k], at_end * whole_s))

    def _tied_s(self, cut: Cut) -> list[float]:
        """Return each stage's seconds for gradients of shared parameters, known for measured workers only.

        Stages hardly wait for each other: when the first stage ends its backward, the last one, it has the
        other parts.
        """
        seconds = [0.0] * self.plan.stages
        measured = self._chain.profile.reduction
        if measured is None or not self._cluster.is_here:
            return seconds
        for tie in self._chain.profile.ties:
            stages = {bisect_right(cut, layer) for layer in tie.layers}
            if len({self._workers[k] for k in stages}) > 1:
                sum_s = ring_s(tie.parameter_bytes, 2, measured.bytes_per_s) + 2 * measured.latency_s
                seconds = [s + sum_s if k in stages else s for k, s in enumerate(seconds)]
        return seconds

    def _ring(self, workers: range) -> LinkProfile:
        """Return the link of a sum, as measured between the present workers, else by their links."""
        measured = self._chain.profile.reduction
        if measured is not None and self._cluster.is_here:
            return measured
        return self._cluster.link(workers, [*workers[1:], workers[0]])
