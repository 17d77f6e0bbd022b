"""The default partitioner: the least simulated time per batch of the schedule that will run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

from avgpipe.errors import nearest
from avgpipe.planning import Costs, steady_batch_s
from avgpipe.planning.chain import Chain
from avgpipe.planning.cuts import check_stages
from avgpipe.planning.memory import check_limit, stage_bytes
from avgpipe.planning.network import network
from avgpipe.planning.options import check_count, micro_batch_size_of, transfer_notes
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe.planning.result import Partition
from avgpipe.planning.search import Cut, CutSearch
from avgpipe.planning.stage_costs import RECOMPUTE, recomputed, stage_costs, weight_versions
from avgpipe.schedule.builders import build_schedule
from avgpipe.schedule.schedule import Schedule


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
    (:func:`avgpipe.planning.stage_costs.stage_costs`).

    Searched as :class:`avgpipe.planning.search.CutSearch` does: the optimum where cuts are few, else by local
    search; a note says so.

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
    training = Training(chain, order, pipelines, recompute)
    limits = None if memory_limit_bytes is None else [memory_limit_bytes] * order.workers
    cut, batch_s, exact = CutSearch(training, limits).best()
    notes = transfer_notes(net.bytes_per_s)
    if not exact:
        notes += ("found by local search: there are too many cuts to simulate all that may be better",)
    bounds = [0, *cut, chain.layers]
    return Partition(
        method="simulated",
        layers=chain.layers,
        boundaries=list(cut),
        replication=[1] * count,
        stage_s=[training.compute_s(*block) for block in pairwise(bounds)],
        objective=f"one batch of {micro_batches} micro-batches, {order.name}"
        + (f", {pipelines} pipelines" if pipelines > 1 else "")
        + (f", recomputing {recompute}" if recompute != "never" else ""),
        value=batch_s,
        micro_batch_size=chain.micro_batch_size,
        workers=order.workers,
        memory_bytes=[training.stage_bytes(k, *block) for k, block in enumerate(pairwise(bounds))],
        notes=notes,
    )


class Training:
    """A schedule of ``pipelines`` pipelines over a chain, as an objective of the search over cuts."""

    def __init__(self, chain: Chain, schedule: Schedule, pipelines: int, recompute: str) -> None:
        self._chain, self._schedule, self._pipelines = chain, schedule, pipelines
        self._recompute = recompute
        self._share = sum(recomputed(schedule.micro_batches, recompute)) / schedule.micro_batches
        self._versions = weight_versions(schedule)
        self.layers = chain.layers
        self.placement = schedule.placement
        self.process_bytes = chain.profile.process_bytes
        self.actions = 24 * pipelines * schedule.stages * (2 * schedule.micro_batches + 1)

    def seconds(self, cut: Cut) -> float:
        return steady_batch_s(self._schedule, self.costs(cut), pipelines=self._pipelines)

    def costs(self, cut: Cut) -> Costs:
        """What a simulation is told."""
        bounds = [0, *cut, self.layers]
        return stage_costs(
            self._chain, bounds, self._schedule.micro_batches, self._pipelines, self._recompute
        )

    def compute_s(self, first: int, last: int) -> float:
        """Of a micro-batch, on average over those of a batch."""
        return self._chain.compute_s(first, last) + self._share * self._chain.forward_s(first, last)

    def work_s(self, k: int, first: int, last: int) -> float:
        chain = self._chain
        once_s = chain.update_s(first, last, self._pipelines > 1) - chain.accumulate_s(first, last)
        return self._schedule.micro_batches * self.compute_s(first, last) + once_s

    def moved_s(self, k: int, first: int, last: int) -> float:
        way_s = self._chain.incoming_s(first) + self._chain.outgoing_s(last)
        return 2 * self._schedule.micro_batches * way_s

    def stage_bytes(self, k: int, first: int, last: int) -> float:
        """Of stage k alone, with what a worker needs before it has a model."""
        return self.bytes_with(k, first, last, self._pipelines * self._in_flight[k])

    def bytes_with(self, k: int, first: int, last: int, in_flight: int) -> float:
        """The same with so many micro-batches in flight, of all pipelines."""
        return stage_bytes(
            self._chain,
            first,
            last,
            in_flight=in_flight,
            versions=self._versions[k],
            copies=self._pipelines,
            extra_copies=1 + self._pipelines if self._pipelines > 1 else 0,
            recompute=self._recompute != "never",
            # A device recomputes one at a time; the last of each pipeline's batch may be there as well.
            whole=1 + (self._pipelines if self._recompute == "except-last" else 0),
        )

    @cached_property
    def _in_flight(self) -> list[int]:
        return self._schedule.peak_in_flight
