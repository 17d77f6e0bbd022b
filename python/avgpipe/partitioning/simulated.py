"""The default partitioner: the least simulated time per batch of the schedule that will run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise

from avgpipe.errors import nearest
from avgpipe.partitioning.chain import Chain
from avgpipe.partitioning.cuts import check_stages, least_dearest
from avgpipe.partitioning.memory import check_limit, does_not_fit, stage_bytes
from avgpipe.partitioning.network import network
from avgpipe.partitioning.options import check_count, micro_batch_size_of, transfer_notes
from avgpipe.partitioning.result import Partition
from avgpipe.partitioning.stage_costs import RECOMPUTE, recomputed, stage_costs, weight_versions
from avgpipe.profiling.profile import LinkProfile, Profile
from avgpipe.schedule.builders import build_schedule
from avgpipe.schedule.schedule import Schedule
from avgpipe.simulation import steady_batch_s

MOST_CUTS = 5_000  # that are all looked at
_MOST_ACTIONS, _LEAST_SIMULATED = 10_000_000, 6
_NEGLIGIBLE = 1 + 1e-9
_STEPS = (1, -1, 2, -2, 4, -4, 8, -8)

Cut = tuple[int, ...]


def simulated(
    profile: Profile,
    stages: int | None = None,
    *,
    micro_batches: int = 8,
    pipelines: int = 1,
    schedule: str = "advance-forward",
    advance: int | Sequence[int] | str | None = None,
    stages_per_worker: int | None = None,
    recompute: str = "never",
    link: LinkProfile | None = None,
    micro_batch_size: float | None = None,
    memory_limit_bytes: float | None = None,
) -> Partition:
    """Method "simulated" of :func:`avgpipe.partition`.

    micro_batches: of a batch. pipelines: that share the workers. schedule, advance, stages_per_worker: as
    ``build_schedule`` takes them. recompute: as in ``Plan``. The time is ``steady_batch_s`` of the stages' costs
    (:func:`avgpipe.partitioning.stage_costs.stage_costs`).

    Cuts are simulated in the order of their busiest worker, below which no batch takes less time, until that is above
    the best found: with up to 5,000 cuts the optimum, if the simulations it takes are not too long altogether. Else
    local search begins from cuts that balance compute, compute with transfers, and memory, and moves single
    boundaries; a note says so.

    memory_limit_bytes: of a worker. Counted are weights, gradients and optimizer state of each pipeline, the weights in
    as many versions as the schedule needs, with several pipelines the reference and an update buffer of each, and the
    micro-batches in flight on all pipelines at once.
    """
    count = min(4, len(profile.layers)) if stages is None else stages
    check_count("pipelines", pipelines)
    check_limit(memory_limit_bytes)
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute!r}: {nearest(str(recompute), RECOMPUTE)}")
    check_stages(len(profile.layers), count)
    order = build_schedule(schedule, count, micro_batches, advance, stages_per_worker)
    net = network(profile, count, order.workers, None, link)[0]
    chain = Chain(profile, micro_batch_size_of(profile, micro_batch_size), net.link)
    search = _Search(chain, order, pipelines, recompute, memory_limit_bytes)
    search.check_fits()
    cut, batch_s, exact = search.best()
    notes = transfer_notes(net.bytes_per_s)
    if not exact:
        notes += ("found by local search: there are too many cuts to simulate all that may be better",)
    bounds = [0, *cut, chain.layers]
    return Partition(
        method="simulated",
        layers=chain.layers,
        boundaries=list(cut),
        replication=[1] * count,
        stage_s=[search.compute_s(*block) for block in pairwise(bounds)],
        objective=f"one batch of {micro_batches} micro-batches, {order.name}"
        + (f", {pipelines} pipelines" if pipelines > 1 else "")
        + (f", recomputing {recompute}" if recompute != "never" else ""),
        value=batch_s,
        micro_batch_size=chain.micro_batch_size,
        workers=order.workers,
        memory_bytes=[search.stage_bytes(k, *block) for k, block in enumerate(pairwise(bounds))],
        notes=notes,
    )


class _Search:
    def __init__(
        self, chain: Chain, schedule: Schedule, pipelines: int, recompute: str, limit: float | None
    ) -> None:
        self._chain, self._schedule, self._pipelines, self._limit = chain, schedule, pipelines, limit
        self._recompute = recompute
        self._share = sum(recomputed(schedule.micro_batches, recompute)) / schedule.micro_batches
        self._stages = schedule.stages
        self._in_flight = schedule.peak_in_flight
        self._versions = weight_versions(schedule)
        self._placement = schedule.placement
        self._known: dict[Cut, float] = {}
        actions = 24 * pipelines * self._stages * (2 * schedule.micro_batches + 1)
        self._budget = max(_LEAST_SIMULATED, _MOST_ACTIONS // actions)

    def stage_bytes(self, k: int, first: int, last: int) -> float:
        """Of stage k alone, with what a worker needs before it has a model."""
        return stage_bytes(
            self._chain,
            first,
            last,
            in_flight=self._pipelines * self._in_flight[k],
            versions=self._versions[k],
            copies=self._pipelines,
            extra_copies=1 + self._pipelines if self._pipelines > 1 else 0,
            recompute=self._recompute != "never",
            # A device recomputes one at a time; the last of each pipeline's batch may be there as well.
            whole=1 + (self._pipelines if self._recompute == "except-last" else 0),
        )

    def _worker_bytes(self, cut: Cut) -> float:
        """Of the worker that needs most."""
        blocks = list(pairwise([0, *cut, self._chain.layers]))
        sizes = [self.stage_bytes(k, *block) for k, block in enumerate(blocks)]
        process = self._chain.profile.process_bytes
        return max(sum(sizes[k] for k in stages) - (len(stages) - 1) * process for stages in self._placement)

    def _fits(self, cut: Cut) -> bool:
        return self._limit is None or self._worker_bytes(cut) <= self._limit

    def check_fits(self) -> None:
        """ValueError where no cut fits, as far as is known."""
        if self._limit is None:
            return
        lean = self._lean()
        if not self._fits(lean):
            raise does_not_fit(
                self._limit,
                self._worker_bytes(lean),
                "use more stages, fewer pipelines, smaller micro-batches or less advance",
            )

    def _lean(self) -> Cut:
        """The cut that needs least memory; of many where workers have several stages, the best of those tried."""
        _, by_stage = least_dearest(self._chain.layers, self._stages, self.stage_bytes)
        if all(len(stages) == 1 for stages in self._placement):
            return tuple(by_stage)
        if self._few:
            return min(self._every(), key=self._worker_bytes)
        _, by_time = least_dearest(self._chain.layers, self._stages, self._of_stage_s)
        starts = (tuple(by_stage), tuple(by_time))
        return min((self._descend(cut, self._worker_bytes) for cut in starts), key=self._worker_bytes)

    @property
    def _few(self) -> bool:
        return math.comb(self._chain.layers - 1, self._stages - 1) <= MOST_CUTS

    def _every(self) -> Iterator[Cut]:
        return combinations(range(1, self._chain.layers), self._stages - 1)

    def compute_s(self, first: int, last: int) -> float:
        """Of a micro-batch, on average over those of a batch."""
        return self._chain.compute_s(first, last) + self._share * self._chain.forward_s(first, last)

    def _of_stage_s(self, k: int, first: int, last: int) -> float:
        return self.compute_s(first, last)

    def busiest_s(self, cut: Cut) -> float:
        """No batch takes less: what the busiest worker has to do for it."""
        chain, many = self._chain, self._schedule.micro_batches
        bounds = [0, *cut, chain.layers]
        elastic = self._pipelines > 1
        work = [many * self.compute_s(*b) + chain.update_s(*b, elastic) for b in pairwise(bounds)]
        return max(sum(work[k] for k in stages) for stages in self._placement)

    def _seconds(self, cut: Cut) -> float:
        if cut not in self._known:
            bounds = [0, *cut, self._chain.layers]
            many = self._schedule.micro_batches
            costs = stage_costs(self._chain, bounds, many, self._pipelines, self._recompute)
            self._known[cut] = steady_batch_s(self._schedule, costs, pipelines=self._pipelines)
        return self._known[cut]

    def best(self) -> tuple[Cut, float, bool]:
        """The cut, its seconds per batch, and whether no other can be better."""
        exact = self._few and self._try_all()
        if not exact:
            for start in self._starts():
                if len(self._known) < self._budget or not self._known:
                    self._descend(start, self._seconds)
        best = min(self._known, key=lambda cut: (self._known[cut], cut))
        return best, self._known[best], exact

    def _try_all(self) -> bool:
        """Simulate what may be best; False if the budget was not enough for all of it."""
        best_s = math.inf
        for least_s, cut in sorted((self.busiest_s(cut), cut) for cut in self._every() if self._fits(cut)):
            if least_s > best_s * _NEGLIGIBLE:
                break
            if len(self._known) >= self._budget:
                return False
            best_s = min(best_s, self._seconds(cut))
        return True

    def _starts(self) -> list[Cut]:
        """Cuts to begin from, that fit."""
        chain = self._chain

        def compute(k: int, first: int, last: int) -> float:
            return self._allowed(self.compute_s(first, last), k, first, last)

        def with_transfers(k: int, first: int, last: int) -> float:
            moved_s = 2 * (chain.incoming_s(first) + chain.outgoing_s(last))
            return self._allowed(self.compute_s(first, last) + moved_s, k, first, last)

        found = [
            tuple(least_dearest(chain.layers, self._stages, cost)[1]) for cost in (compute, with_transfers)
        ]
        if self._limit is not None:
            found.append(self._lean())
        return [cut for cut in dict.fromkeys(found) if self._fits(cut)]

    def _allowed(self, cost: float, k: int, first: int, last: int) -> float:
        """The cost, or math.inf where the stage alone does not fit."""
        fits = self._limit is None or self.stage_bytes(k, first, last) <= self._limit
        return cost if fits else math.inf

    def _descend(self, cut: Cut, measure: Callable[[Cut], float]) -> Cut:
        """Go to a better neighbour, one boundary moved, until there is none or the budget is spent."""
        best = measure(cut)
        better = True
        while better:
            better = False
            for near in self._near(cut):
                if measure == self._seconds and not self._worth(near, best):
                    continue
                value = measure(near)
                if value * _NEGLIGIBLE < best:
                    cut, best, better = near, value, True
                    break
        return cut

    def _worth(self, cut: Cut, best_s: float) -> bool:
        """Whether to simulate it."""
        known = cut in self._known or len(self._known) < self._budget
        return known and self._fits(cut) and self.busiest_s(cut) < best_s

    def _near(self, cut: Cut) -> Iterator[Cut]:
        for step in _STEPS:
            for k in range(len(cut)):
                bounds = (0, *cut, self._chain.layers)
                moved = cut[k] + step
                if bounds[k] < moved < bounds[k + 2]:
                    yield (*cut[:k], moved, *cut[k + 1 :])
