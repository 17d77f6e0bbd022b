"""DAPPLE's planner: the shortest latency of a synchronous batch, over stages and devices (Fan et al. 2021)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from avgpipe.errors import check_count
from avgpipe.model.balance import table_of
from avgpipe.planning.chain import Chain, does_not_fit, limit_of
from avgpipe.planning.cluster import ring_s
from avgpipe.planning.costs import Array
from avgpipe.planning.partition import Partition
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe_lab.planning.divisions import Divisions, Levels, network


def dapple(
    profile: Profile,
    stages: int | None = None,
    *,
    micro_batches: int = 8,
    workers: int | None = None,
    levels: Sequence[Sequence[float]] | None = None,
    link: LinkProfile | None = None,
    micro_batch_size: float | None = None,
    memory_limit_bytes: float | None = None,
) -> Partition:
    """Method "dapple" of :func:`avgpipe.partition`, for batches of ``micro_batches``.

    A stage's devices are chosen by one of three policies: fresh first fills machines without stages, so that
    the all-reduce of the replicas stays inside; append first fills the machines that earlier stages left
    partly used; scatter first spreads evenly over all machines, for stages whose weights are small compared
    with their activations.

    A stage on m devices takes 1/m of the seconds of one; its all-reduce, over a ring, 2 (m - 1) |w| / (m B);
    a transfer the bytes over as many links as both sides have machines. The result is the optimum over all
    stages, devices and policies if there are up to 20,000 plans; beyond, local search from stages of equal
    compute, with a note.

    Args:
        profile, stages, micro_batches: The model, K (None: the optimum) and M.
        workers: With ``link``, the devices of a single machine.
        levels: Devices in a machine, and machines, instead of ``workers`` and ``link``.
        link: Link between two devices.
        micro_batch_size: Samples of a micro-batch.
        memory_limit_bytes: Memory of a worker, for weights, gradients, optimizer state, and the values kept
            for the micro-batches in flight.
    """
    check_count("micro_batches", micro_batches)
    limit = limit_of(memory_limit_bytes)
    nets = _machines(network(profile, stages, workers, levels, link))
    chain = Chain(profile, micro_batch_size, nets[-1].link)
    model = Model(chain, nets, micro_batches, limit)
    total = sum(model.devices)
    (batch_s, _), layout, exact = find(model, stages)
    several = len(model.devices) > 1
    if batch_s == math.inf:
        least, _ = Divisions(chain.layers, model.held_bytes).best(total, stages)
        raise does_not_fit(limit, least, "use more workers, fewer or smaller micro-batches")
    spans = model.spans(layout)[::2]
    return Partition.of_chain(
        chain,
        [placed.first for placed in layout],
        exact=exact,
        method="dapple",
        replication=[placed.workers for placed in layout],
        stage_s=[span.forward_s + span.backward_s for span in spans],
        objective=f"one batch of {micro_batches} micro-batches",
        value=batch_s,
        workers=total,
        memory_bytes=model.bytes(layout),
        placement=_workers_of(layout) if several else None,
        machines=[placed.taken for placed in layout] if several else None,
        system="dapple",
        micro_batches=micro_batches,
    )


def _machines(levels: Levels) -> Levels:
    """Return the levels of a network; ValueError if they are more than devices and machines."""
    if len(levels) > 2:
        raise ValueError(
            f"levels has {len(levels)}: dapple has devices in a machine, and machines: give one or two"
        )
    return levels


def _workers_of(layout: Sequence[PlacedStage]) -> list[list[int]]:
    """Return each stage's workers: only used ones count, machine by machine, and there stage by stage."""
    on_machines = zip(*(placed.taken for placed in layout))
    stages = [k for counts in on_machines for k, count in enumerate(counts) for _ in range(count)]
    return [[worker for worker, k in enumerate(stages) if k == stage] for stage in range(len(layout))]


# ---- devices of a stage --------------------------------------------------------------------------------------------


Free = tuple[int, ...]  # free devices of each machine
Taken = tuple[int, ...]  # devices of one stage on each machine
Policy = Callable[[Free, int, int], Taken]


def fresh_first(free: Free, size: int, count: int) -> Taken:
    """Take unused machines first, then the others: for stages whose all-reduce is long."""
    return _filled(free, sorted(range(len(free)), key=lambda m: free[m] < size), count)


def append_first(free: Free, size: int, count: int) -> Taken:
    """Take partly used machines first, then unused ones: leaves no machine partly used."""
    return _filled(free, sorted(range(len(free)), key=lambda m: free[m] == size), count)


def scatter_first(free: Free, size: int, count: int) -> Taken:
    """Spread evenly over the machines with most free devices: for stages with few weights and a short all-reduce."""
    # Ordered by the number of devices that are free on the machine when each of its devices is taken.
    order = sorted((-level, m) for m, n in enumerate(free) for level in range(1, n + 1))
    taken = Counter(m for _, m in order[:count])
    return tuple(taken[m] for m in range(len(free)))


POLICIES: tuple[Policy, ...] = (fresh_first, append_first, scatter_first)


@lru_cache(maxsize=100_000)  # a search repeats the same arguments
def placements(free: Free, size: int, count: int) -> list[Taken]:
    """Return the distinct results of the policies. ``size``: devices of a machine. Needs ``count`` free devices."""
    return list(dict.fromkeys(policy(free, size, count) for policy in POLICIES))


def _filled(free: Free, order: list[int], count: int) -> Taken:
    taken = [0] * len(free)
    for m in order:
        taken[m] = min(free[m], count)
        count -= taken[m]
    return tuple(taken)


def left(free: Free, taken: Taken) -> Free:
    return tuple(a - b for a, b in zip(free, taken))


def added(one: Taken, other: Taken) -> Taken:
    return tuple(a + b for a, b in zip(one, other))


# ---- latency of a synchronous batch --------------------------------------------------------------------------------


class Span(NamedTuple):
    """A stage, or a transfer between two, which counts as a stage.

    Seconds of a micro-batch, and of the all-reduce of a batch's gradients.
    """

    forward_s: float
    backward_s: float
    reduce_s: float = 0.0


def latency_s(spans: Sequence[Span], micro_batches: int) -> float:
    """Return T_w + T_s + T_e: until the pivot begins, while it works without a pause, and until all others end.

    With pivot Q, T_w = sum_{s<=Q} F_s, T_s = (M - 1)(F_Q + B_Q), and T_e = max_s (AR_s + sum_{a=s..Q} B_a for
    s <= Q, AR_s - sum_{a=Q..s} B_a for s > Q).
    """
    q = pivot(spans, micro_batches)
    warm_s = sum(span.forward_s for span in spans[: q + 1])
    steady_s = (micro_batches - 1) * (spans[q].forward_s + spans[q].backward_s)
    end_s, back_s = 0.0, 0.0
    for span in reversed(spans[: q + 1]):
        back_s += span.backward_s
        end_s = max(end_s, span.reduce_s + back_s)
    gone_s = spans[q].backward_s
    for span in spans[q + 1 :]:
        gone_s += span.backward_s
        end_s = max(end_s, span.reduce_s - gone_s)
    return warm_s + steady_s + end_s


def pivot(spans: Sequence[Span], micro_batches: int) -> int:
    """Return the pivot, the stage with the fewest bubbles.

    From the last stage on, an earlier stage takes over if its own steady phase is longer than that of the
    pivot plus the forwards and backwards of the stages between.
    """
    q, between_s = len(spans) - 1, 0.0
    for s in reversed(range(len(spans) - 1)):
        own_s = (micro_batches - 1) * (spans[s].forward_s + spans[s].backward_s)
        pivot_s = (micro_batches - 1) * (spans[q].forward_s + spans[q].backward_s)
        if own_s > pivot_s + between_s:
            q, between_s = s, 0.0
        else:
            between_s += spans[s].forward_s + spans[s].backward_s
    return q


class PlacedStage(NamedTuple):
    """Layers ``first`` to ``last`` - 1, and the number of devices that they have on each machine."""

    first: int
    last: int
    taken: Taken

    @property
    def workers(self) -> int:
        return sum(self.taken)

    @property
    def machines(self) -> int:
        return len(self.taken) - self.taken.count(0)


Layout = tuple[PlacedStage, ...]
Value = tuple[float, float]


class Model:
    """Time and memory of placed stages, for batches of ``micro_batches``.

    Attributes:
        devices: Devices of each machine. A single machine has only the first level.
        size: Devices of a machine.
    """

    def __init__(self, chain: Chain, levels: Levels, micro_batches: int, limit: float) -> None:
        self.chain, self._levels, self._micro_batches, self.limit = chain, levels, micro_batches, limit
        self.size = levels[0].units
        self.devices = (self.size,) * (levels[1].units if len(levels) == 2 else 1)
        self._stage, self._transfer = cache(self._stage_span), cache(self._transfer_span)
        self._table = cache(self._bytes_in_flight)
        self._compute_s = table_of(chain.layers, chain.compute_s)
        self._weights = chain.parameter_bytes(*np.ogrid[: chain.layers + 1, : chain.layers + 1])

    def _stage_span(self, placed: PlacedStage) -> Span:
        """Return the span of a stage: each of m replicas has every m-th micro-batch; the all-reduce is a ring."""
        first, last, _ = placed
        rate = self._levels[placed.machines > 1].bytes_per_s
        return Span(
            float(self.chain.forward_s(first, last) / placed.workers),
            float(self.chain.backward_s(first, last) / placed.workers),
            float(ring_s(self.chain.parameter_bytes(first, last), placed.workers, rate)),
        )

    def _transfer_span(self, before: PlacedStage, after: PlacedStage) -> Span:
        """Return the span of a transfer, which pairs of machines or devices carry in parallel."""
        crosses = PlacedStage(0, 0, added(before.taken, after.taken)).machines > 1
        lanes = min(before.machines, after.machines) if crosses else min(before.workers, after.workers)
        seconds = self._levels[crosses].link.seconds(float(self.chain.boundary_bytes[after.first]) / lanes)
        return Span(seconds, seconds)

    def spans(self, layout: Layout) -> list[Span]:
        """Return the spans of the stages, and between them of their transfers."""
        found = [self._stage(layout[0])]
        for before, after in pairwise(layout):
            found += [self._transfer(before, after), self._stage(after)]
        return found

    def order(self, layout: Layout) -> Value:
        """Return the sort key of plans: among plans that do not fit, or take equal time, less memory is better."""
        most = max(self.bytes(layout))
        return (latency_s(self.spans(layout), self._micro_batches) if most <= self.limit else math.inf), most

    def bytes(self, layout: Layout) -> list[float]:
        """Return the bytes of a worker of each stage."""
        found, behind = [], 0
        for placed in reversed(layout):
            found.append(float(self.held_bytes(placed.workers, behind)[placed.first, placed.last]))
            behind += placed.workers
        return found[::-1]

    def held_bytes(self, workers: int, behind: int) -> Array:
        """Return the bytes of m workers with n behind: 1 + ceil(n / m) in flight, at most their share."""
        return self._table(min(math.ceil(self._micro_batches / workers), 1 + math.ceil(behind / workers)))

    def batch_s(self, workers: int, behind: int) -> Array:
        """Return seconds of a batch on a stage and of its all-reduce; math.inf if the stage does not fit."""
        rate = self._levels[workers > self.size].bytes_per_s
        seconds = self._micro_batches * self._compute_s / workers + ring_s(self._weights, workers, rate)
        return np.where(self.held_bytes(workers, behind) <= self.limit, seconds, math.inf)

    def cut_s(self) -> Array:
        """Return the seconds of a batch's transfers, before each layer."""
        once_s: Array = self._levels[-1].link.seconds(self.chain.boundary_bytes)
        return 2 * self._micro_batches * once_s

    def _bytes_in_flight(self, in_flight: int) -> Array:
        return table_of(self.chain.layers, lambda *block: self.chain.stage_bytes(*block, in_flight=in_flight))


# ---- searching -----------------------------------------------------------------------------------------------------


MOST_PLANS = 20_000
_FEW = 8  # numbers of stages to start from
_STARTS = 6  # starts of local search
_LOOKED_AT = 150_000  # most stages of plans that are evaluated from each start
_STEPS = (-8, -4, -2, -1, 1, 2, 4, 8)


def find(model: Model, stages: int | None) -> tuple[Value, Layout, bool]:
    """Return the value of the first plan by ``Model.order``, the plan, and whether all plans were evaluated."""
    exact = _plans(model, stages) <= MOST_PLANS
    if exact:
        best = min((model.order(layout), layout) for layout in _every(model, stages, (), model.devices))
    else:
        starts = sorted(_balanced(model, stages), key=model.order)[:_STARTS]
        best = min((_improved(model, stages, layout) for layout in starts), default=((math.inf, 0.0), ()))
    return *best, exact


def _plans(model: Model, stages: int | None) -> int:
    """Return an upper bound of the number of plans."""
    layers, workers = model.chain.layers, sum(model.devices)
    policies = 1 if 1 in (len(model.devices), model.size) else len(POLICIES)
    counts = range(1, min(layers, workers) + 1) if stages is None else [stages]
    return sum(math.comb(layers - 1, s - 1) * math.comb(workers, s) * policies**s for s in counts)


def _every(model: Model, stages: int | None, layout: Layout, free: Free) -> Iterator[Layout]:
    """Yield all plans that begin with ``layout``, which left the devices ``free``."""
    first = layout[-1].last if layout else 0
    if first == model.chain.layers and stages in (None, len(layout)):
        yield layout
    if len(layout) == stages:
        return
    for last in range(first + 1, model.chain.layers + 1):
        for count in range(1, sum(free) + 1):
            for taken in placements(free, model.size, count):
                longer = (*layout, PlacedStage(first, last, taken))
                yield from _every(model, stages, longer, left(free, taken))


def _balanced(model: Model, stages: int | None) -> Iterator[Layout]:
    """Yield, for each number of stages, the plan with the least bottleneck, on unused machines first."""
    layers, workers = model.chain.layers, sum(model.devices)
    divisions = Divisions(layers, model.batch_s, cut=model.cut_s())
    counts = (None, *range(1, min(layers, workers, _FEW) + 1))
    for count in counts if stages is None else (stages,):
        layout, free = list[PlacedStage](), model.devices
        for block in divisions.best(workers, count)[1]:
            taken = placements(free, model.size, block.workers)[0]
            layout.append(PlacedStage(block.first, block.last, taken))
            free = left(free, taken)
        if layout:
            yield tuple(layout)


def _improved(model: Model, stages: int | None, layout: Layout) -> tuple[Value, Layout]:
    """Move from a plan to the best of its neighbours until none is better."""
    best, looked = (model.order(layout), layout), 0
    while looked < _LOOKED_AT:
        nearby = [
            (model.order(near), near)
            for near in _near(model, best[1], stages is None)
            if all(first < last and any(taken) for first, last, taken in near)
        ]
        looked += len(best[1]) * len(nearby)
        better = min(nearby, default=best)
        if better[0] >= best[0]:
            break
        best = better
    return best


def _near(model: Model, layout: Layout, any_number: bool) -> Iterator[Layout]:
    """Yield neighbours: a cut moved, devices changed or handed to the stage beside, stages joined or split.

    Some of them have a stage without layers or devices.
    """
    free, size = model.devices, model.size
    for placed in layout:
        free = left(free, placed.taken)
    for k, (first, last, own) in enumerate(layout):
        before, behind, n = layout[:k], layout[k + 1 :], sum(own)
        counts = {n - size, n - 1, n, n + 1, n + size}
        for taken, _ in _shares(model, added(free, own), counts):
            yield (*before, PlacedStage(first, last, taken), *behind)
        if any_number:
            for shares in _shares(model, own, {1, n // 2, n - 1, size, n - size}):
                for cut in {first + 1, (first + last) // 2, last - 1}:
                    yield (*before, *_pair(first, cut, last, *shares), *behind)
        if not behind:
            continue
        (_, end, theirs), *others = behind
        for step in _STEPS:
            yield (*before, *_pair(first, last + step, end, own, theirs), *others)
        for shares in _shares(model, added(own, theirs), counts - {n}):
            yield (*before, *_pair(first, last, end, *shares), *others)
        if any_number:
            yield (*before, PlacedStage(first, end, added(own, theirs)), *others)


def _pair(first: int, cut: int, last: int, one: Taken, other: Taken) -> Layout:
    return PlacedStage(first, cut, one), PlacedStage(cut, last, other)


def _shares(model: Model, devices: Free, counts: set[int]) -> Iterator[tuple[Taken, Free]]:
    """Yield choices of ``counts`` of the devices, with the remaining ones."""
    for count in sorted(counts):
        if 1 <= count <= sum(devices):
            for taken in placements(devices, model.size, count):
                yield taken, left(devices, taken)
