"""The search for the cut of a chain of layers whose batches take least time in a simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from avgpipe.model.balance import StageCost, least_bottleneck
from avgpipe.planning.chain import Chain, does_not_fit, recomputed, stage_costs, weight_versions
from avgpipe.planning.costs import Costs
from avgpipe.planning.simulation import steady_batch_s
from avgpipe.schedule import Schedule

MOST_CUTS = 5_000  # up to this number, all cuts are considered
_MOST_ACTIONS, _LEAST_SIMULATED = 10_000_000, 6
_NEGLIGIBLE = 1e-9
_STEPS = (1, -1, 2, -2, 4, -4, 8, -8)

Cut = tuple[int, ...]  # first layers of stages 1 and up


class Training:
    """A schedule of ``pipelines`` pipelines over a chain, as an objective to minimize.

    A stage is k, its first layer and the one after its last, or arrays of them.

    Attributes:
        placement: The stages of each worker.
        process_bytes: The bytes that every stage includes, but that a worker has once.
        actions: Roughly how many actions a simulation runs.
    """

    def __init__(
        self,
        chain: Chain,
        schedule: Schedule,
        pipelines: int,
        recompute: str,
        weights: str,
        one_optimizer: bool = False,
    ) -> None:
        """``one_optimizer``: whether pipelines share one optimizer, and have no state of their own."""
        self._chain, self._schedule, self._pipelines = chain, schedule, pipelines
        self._recompute, self._states = recompute, 1 if one_optimizer else pipelines
        # The reference and an update buffer for each, and the state of a shared optimizer.
        self._extra_copies = 1 + pipelines + one_optimizer if pipelines > 1 else 0
        self._share = sum(recomputed(schedule.micro_batches, recompute)) / schedule.micro_batches
        self._versions, self._in_flight = weight_versions(schedule, weights), schedule.peak_in_flight
        self.layers = chain.layers
        self.placement = schedule.placement
        self.process_bytes = chain.profile.process_bytes
        self.actions = 24 * pipelines * schedule.stages * (2 * schedule.micro_batches + 1)

    def seconds(self, cut: Cut) -> float:
        """Return the simulated seconds of a batch."""
        return steady_batch_s(self._schedule, self.costs(cut), pipelines=self._pipelines)

    def costs(self, cut: Cut) -> Costs:
        """Return the costs for a simulation."""
        bounds = [0, *cut, self.layers]
        return stage_costs(
            self._chain, bounds, self._schedule.micro_batches, self._pipelines, self._recompute
        )

    def compute_s(self, first: Any, last: Any) -> Any:
        """Return the seconds of a micro-batch, averaged over a batch."""
        return self._chain.compute_s(first, last) + self._share * self._chain.forward_s(first, last)

    def work_s(self, k: int, first: Any, last: Any) -> Any:
        """Return the seconds of the stage's work for a batch."""
        chain = self._chain
        once_s = chain.update_s(first, last, self._pipelines > 1) - chain.accumulate_s(first, last)
        return self._schedule.micro_batches * self.compute_s(first, last) + once_s

    def moved_s(self, k: int, first: Any, last: Any) -> Any:
        """Return the seconds of a batch's transfers to the stage and from it, in both directions."""
        way_s = self._chain.transfer_s[first] + self._chain.transfer_s[last]
        return 2 * self._schedule.micro_batches * way_s

    def stage_bytes(self, k: int, first: Any, last: Any) -> Any:
        """Return the bytes of stage k alone, with those of a worker without a model."""
        return self.bytes_with(k, first, last, self._pipelines * self._in_flight[k])

    def bytes_with(self, k: int, first: Any, last: Any, in_flight: int) -> Any:
        """Return the bytes of stage k with ``in_flight`` micro-batches in flight, of all pipelines."""
        return self._chain.stage_bytes(
            first,
            last,
            in_flight=in_flight,
            versions=self._versions[k],
            copies=self._pipelines,
            states=self._states,
            extra_copies=self._extra_copies,
            recompute=self._recompute != "never",
            # A device recomputes one micro-batch at a time; the last one of each pipeline's batch may be held
            # as well.
            whole=1 + (self._pipelines if self._recompute == "except-last" else 0),
        )


class CutSearch:
    """Finds the cut whose batches take least time.

    Cuts are simulated in ascending order of the time of their busiest worker, a lower bound of a batch, until
    that exceeds the best time found: with up to 5,000 cuts this is the optimum, if the simulations fit into
    the budget. Otherwise local search begins from cuts that balance work, work with transfers, and memory,
    and moves single boundaries.

    Args:
        objective: Objective of a cut.
        limits: Bytes of each worker; None: unlimited.
    """

    def __init__(self, objective: Training, limits: Sequence[float] | None) -> None:
        self._objective = objective
        self._layers, self._placement = objective.layers, objective.placement
        self._limited = limits is not None
        self._limits = [math.inf] * len(self._placement) if limits is None else limits
        self._limit_of = {k: limit for limit, own in zip(self._limits, self._placement) for k in own}
        self._stages = len(self._limit_of)
        self._few = math.comb(self._layers - 1, self._stages - 1) <= MOST_CUTS
        # Compared cuts have most stages in common.
        self._work_s = cache(lambda *stage: float(objective.work_s(*stage)))
        self._bytes = cache(lambda *stage: float(objective.stage_bytes(*stage)))
        self._known: dict[Cut, float] = {}
        self._budget = max(_LEAST_SIMULATED, _MOST_ACTIONS // objective.actions)

    def best(self) -> tuple[Cut, float, bool]:
        """Return the cut, its seconds per batch, and whether it is the optimum.

        Raises ValueError if no cut fits, as far as is known.
        """
        if self._limited:
            excess, size, limit = self.excess(self.min_memory())
            if excess > 0:
                advice = "use more stages, fewer pipelines, smaller micro-batches or less advance"
                raise does_not_fit(limit, size, advice)
        exact = self._few and self._try_all()
        if not exact:
            for start in self._starts():
                if len(self._known) < self._budget or not self._known:
                    self._descend(start, self._seconds)
        best = min(self._known, key=lambda cut: (self._known[cut], cut))
        return best, self._known[best], exact

    def first(self) -> Cut | None:
        """Return the best of the cuts from which local search begins; None if no cut fits, as far as is known."""
        return min(self._starts(), key=self._seconds, default=None)

    def _of_workers(self, cost: StageCost, cut: Cut) -> list[float]:
        """Return the sum over each worker's stages."""
        found = [cost(k, *block) for k, block in enumerate(pairwise([0, *cut, self._layers]))]
        return [sum(found[k] for k in stages) for stages in self._placement]

    # ---- memory ----------------------------------------------------------------------------------------------------

    def excess(self, cut: Cut) -> tuple[float, float, float]:
        """Return, for the worker furthest beyond its limit, the excess, its bytes and its limit."""
        process = self._objective.process_bytes
        sizes = [
            size - (len(stages) - 1) * process
            for size, stages in zip(self._of_workers(self._bytes, cut), self._placement)
        ]
        return max((size - limit, size, limit) for size, limit in zip(sizes, self._limits))

    def _fits(self, cut: Cut) -> bool:
        return not self._limited or self.excess(cut)[0] <= 0

    def min_memory(self) -> Cut:
        """Return the cut that needs least memory relative to the limits.

        It is the best of those tried if workers have several stages, or if there are many layers.
        """
        by_stage = self._least_bottleneck(self._share)
        if all(len(stages) == 1 for stages in self._placement):
            return by_stage
        if self._few:
            return min(self._every(), key=self.excess)
        starts = (by_stage, self._least_bottleneck(self._objective.work_s))
        return min((self._descend(cut, lambda near: self.excess(near)[0]) for cut in starts), key=self.excess)

    def _share(self, k: int, first: Any, last: Any) -> Any:
        """Return the share of the worker's memory."""
        return self._objective.stage_bytes(k, first, last) / self._limit_of[k]

    # ---- time ------------------------------------------------------------------------------------------------------

    def _every(self) -> Iterator[Cut]:
        return combinations(range(1, self._layers), self._stages - 1)

    def busiest_s(self, cut: Cut) -> float:
        """Return a lower bound of a batch: the work of the busiest worker."""
        return max(self._of_workers(self._work_s, cut))

    def _seconds(self, cut: Cut) -> float:
        if cut not in self._known:
            self._known[cut] = self._objective.seconds(cut)
        return self._known[cut]

    def _try_all(self) -> bool:
        """Simulate all cuts that may be best; False if the budget did not suffice."""
        best_s = math.inf
        for least_s, cut in sorted((self.busiest_s(cut), cut) for cut in self._every() if self._fits(cut)):
            if least_s > best_s * (1 + _NEGLIGIBLE):
                break
            if len(self._known) >= self._budget:
                return False
            best_s = min(best_s, self._seconds(cut))
        return True

    def _starts(self) -> list[Cut]:
        """Return starting cuts that fit."""

        def work_s(k: int, first: Any, last: Any) -> Any:
            seconds = self._objective.work_s(k, first, last)
            return np.where(self._share(k, first, last) <= 1, seconds, math.inf) if self._limited else seconds

        def with_transfers(k: int, first: Any, last: Any) -> Any:
            return work_s(k, first, last) + self._objective.moved_s(k, first, last)

        found = [self._least_bottleneck(work_s), self._least_bottleneck(with_transfers)]
        if self._limited:
            found.append(self.min_memory())
        return [cut for cut in dict.fromkeys(found) if self._fits(cut)]

    def _least_bottleneck(self, cost: StageCost) -> Cut:
        return tuple(least_bottleneck(self._layers, self._stages, cost)[1])

    def _descend(self, cut: Cut, measure: Callable[[Cut], float]) -> Cut:
        """Move to better neighbours, one boundary moved, until there is none or the budget is spent."""
        best = measure(cut)
        better = True
        while better:
            better = False
            for near in self._near(cut):
                if measure == self._seconds and not self._worth(near, best):
                    continue
                value = measure(near)
                if value < best - abs(best) * _NEGLIGIBLE:
                    cut, best, better = near, value, True
                    break
        return cut

    def _worth(self, cut: Cut, best_s: float) -> bool:
        """Return whether a cut needs to be simulated."""
        known = cut in self._known or len(self._known) < self._budget
        return known and self._fits(cut) and self.busiest_s(cut) < best_s

    def _near(self, cut: Cut) -> Iterator[Cut]:
        for step in _STEPS:
            for k in range(len(cut)):
                bounds = (0, *cut, self._layers)
                moved = cut[k] + step
                if bounds[k] < moved < bounds[k + 2]:
                    yield (*cut[:k], moved, *cut[k + 1 :])
