"""DAPPLE's planner: the shortest latency of a synchronous batch, over stages and devices (Fan et al. 2021)."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from avgpipe.planning.chain import Chain, check_limit, does_not_fit, stage_bytes
from avgpipe.planning.cluster import Levels, check_enough, network, ring_s
from avgpipe.planning.cuts import NOT_THIS, TOO_LONG, Block, check_stages, fewest, smallest, tightest
from avgpipe.planning.partition import Partition, balance, micro_batch_size_of, transfer_notes
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe.planning.simulation import check_count

# ---- stages with least memory --------------------------------------------------------------------------------------


_CLOSE, _ROUGHLY = 1e-6, 1e-2


class Held(NamedTuple):
    """The memory of a worker of a stage with batches of ``micro_batches`` and a flush."""

    chain: Chain
    micro_batches: int

    def bytes(self, first: int, last: int, workers: int, behind: int) -> float:
        """Each of m workers with n behind has 1 + ceil(n / m) in flight, never more than it has of a batch."""
        own = math.ceil(self.micro_batches / workers)
        in_flight = min(own, 1 + math.ceil(behind / workers))
        return stage_bytes(self.chain, first, last, in_flight=in_flight)


def fewest_workers(
    held: Held, workers: int, stages: int | None, limit: float, stage_s: float = math.inf
) -> list[Block] | None:
    """The fewest workers with which every stage fits into the limit and computes a micro-batch in ``stage_s``."""

    def need(first: int, last: int, behind: int) -> int:
        compute_s = held.chain.compute_s(first, last)
        low = max(1, math.ceil(compute_s / stage_s))
        if low > workers:
            return TOO_LONG

        def fits(own: int) -> bool:
            return held.bytes(first, last, own, behind) <= limit

        return smallest(low, workers - behind, fits) or NOT_THIS

    return fewest(held.chain.layers, need, workers, stages)


def steady(held: Held, workers: int, stages: int | None, limit: float) -> list[Block] | None:
    """Stages of which the slowest is about as quick as can be within the limit; None if nothing fits."""

    def within(stage_s: float) -> tuple[float, list[Block]] | None:
        blocks = fewest_workers(held, workers, stages, limit, stage_s)
        return None if blocks is None else (_slowest_s(held, blocks), blocks)

    start = within(math.inf)
    if start is None:
        return None
    return tightest(within, held.chain.compute_s(0, held.chain.layers) / workers, start, _ROUGHLY)[1]


def _slowest_s(held: Held, blocks: list[Block]) -> float:
    return max(held.chain.compute_s(block.first, block.last) / block.workers for block in blocks)


def least_limit(held: Held, workers: int, stages: int | None) -> float:
    """The least limit for which there is a plan; to a millionth."""

    def within(limit: float) -> tuple[float, list[Block]] | None:
        blocks = fewest_workers(held, workers, stages, limit)
        return None if blocks is None else (most_bytes(held, blocks), blocks)

    start = within(math.inf)
    assert start is not None
    return tightest(within, 0.0, start, _CLOSE)[0]


def most_bytes(held: Held, blocks: list[Block]) -> float:
    behind, most = 0, 0.0
    for block in reversed(blocks):
        most = max(most, held.bytes(*block, behind))
        behind += block.workers
    return most


# ---- devices of a stage --------------------------------------------------------------------------------------------


Free = tuple[int, ...]  # by machine, devices that no stage has yet
Taken = tuple[int, ...]  # by machine, devices of one stage
Policy = Callable[[Free, int, int], Taken]


def fresh_first(free: Free, size: int, count: int) -> Taken:
    """From machines that no stage is on yet, then from the others: for stages whose all-reduce is long."""
    return _filled(free, sorted(range(len(free)), key=lambda m: free[m] < size), count)


def append_first(free: Free, size: int, count: int) -> Taken:
    """From machines that other stages are on already, then from fresh ones: leaves no machine half used."""
    return _filled(free, sorted(range(len(free)), key=lambda m: free[m] == size), count)


def scatter_first(free: Free, size: int, count: int) -> Taken:
    """Evenly from the machines with most free devices: for stages with few weights, which can do without fast links."""
    level = size
    while sum(max(0, n - level) for n in free) < count:
        level -= 1
    taken = [max(0, n - level) for n in free]
    spare = sum(taken) - count
    for m in reversed(range(len(free))):
        if spare and taken[m]:
            taken[m] -= 1
            spare -= 1
    return tuple(taken)


POLICIES: tuple[Policy, ...] = (fresh_first, append_first, scatter_first)


def placements(free: Free, size: int, count: int) -> list[Taken]:
    """What the policies make of it, each once. ``size``: devices of a machine. Needs ``count`` free ones."""
    if len(free) == 1:
        return [(count,)]
    return list(dict.fromkeys(policy(free, size, count) for policy in POLICIES))


def _filled(free: Free, order: list[int], count: int) -> Taken:
    taken = [0] * len(free)
    for m in order:
        taken[m] = min(free[m], count)
        count -= taken[m]
    return tuple(taken)


def left(free: Free, taken: Taken) -> Free:
    return tuple(a - b for a, b in zip(free, taken))


# ---- latency of a synchronous batch --------------------------------------------------------------------------------


class Span(NamedTuple):
    """A stage, or a transfer between two, which counts as a stage of its own.

    Seconds of a micro-batch, and of the all-reduce of a batch's gradients.
    """

    forward_s: float
    backward_s: float
    reduce_s: float = 0.0


class PlacedStage(NamedTuple):
    """Layers ``first`` to ``last`` - 1, and the devices of each machine that they are on."""

    first: int
    last: int
    taken: Taken

    @property
    def workers(self) -> int:
        return sum(self.taken)


class Machines(NamedTuple):
    """``machines`` of ``devices`` each. inside, between: the network's levels; one machine has the first alone."""

    machines: int
    devices: int
    levels: Levels

    @classmethod
    def of(cls, levels: Levels) -> Machines:
        if len(levels) > 2:
            raise ValueError(
                f"levels has {len(levels)}: dapple knows devices in a machine and machines, give one or two"
            )
        return cls(levels[1].units if len(levels) == 2 else 1, levels[0].units, levels)

    def bytes_per_s(self, taken: Taken) -> float:
        """Bandwidth of the slowest link among these devices."""
        return self.levels[_machines(taken) > 1].bytes_per_s


def _machines(taken: Taken) -> int:
    return len(taken) - taken.count(0)


class Model:
    """What placed stages take, for batches of ``micro_batches``."""

    def __init__(self, chain: Chain, machines: Machines, micro_batches: int, limit: float | None) -> None:
        self.chain, self.machines, self.micro_batches, self.limit = chain, machines, micro_batches, limit
        self.held = Held(chain, micro_batches)
        self._stages: dict[PlacedStage, Span] = {}
        self._transfers: dict[tuple[PlacedStage, PlacedStage], Span] = {}

    def stage(self, placed: PlacedStage) -> Span:
        """Each of m replicas takes every m-th micro-batch; a ring over the slowest link makes the all-reduce."""
        workers = placed.workers
        weights = self.chain.parameter_bytes(placed.first, placed.last)
        return Span(
            self.chain.forward_s(placed.first, placed.last) / workers,
            self.chain.backward_s(placed.first, placed.last) / workers,
            ring_s(weights, workers, self.machines.bytes_per_s(placed.taken)),
        )

    def transfer(self, before: PlacedStage, after: PlacedStage) -> Span:
        """Each pair of machines, or of devices inside one, carries its share at the same time as the others."""
        union = tuple(a + b for a, b in zip(before.taken, after.taken))
        crosses = _machines(union) > 1
        lanes = min(_machines(before.taken), _machines(after.taken)) if crosses else 0
        lanes = lanes or min(before.workers, after.workers)
        size = self.chain.boundary_bytes[before.last - 1]
        seconds = self.machines.levels[crosses].link.seconds(size / lanes)
        return Span(seconds, seconds)

    def spans(self, layout: Sequence[PlacedStage]) -> list[Span]:
        """The stages, and between them their transfers."""
        for placed in layout:
            if placed not in self._stages:
                self._stages[placed] = self.stage(placed)
        found = [self._stages[layout[0]]]
        for pair in pairwise(layout):
            if pair not in self._transfers:
                self._transfers[pair] = self.transfer(*pair)
            found += [self._transfers[pair], self._stages[pair[1]]]
        return found

    def order(self, layout: Sequence[PlacedStage]) -> tuple[float, float]:
        """What plans are ordered by: among those that do not fit, or take the same time, what needs less is better."""
        most = max(self.bytes(layout))
        if self.limit is not None and most > self.limit:
            return math.inf, most
        return latency_s(self.spans(layout), self.micro_batches), most

    def bytes(self, layout: Sequence[PlacedStage]) -> list[float]:
        """Bytes of a worker of each stage."""
        found = []
        behind = 0
        for placed in reversed(layout):
            found.append(self.held.bytes(placed.first, placed.last, placed.workers, behind))
            behind += placed.workers
        return found[::-1]


def latency_s(spans: Sequence[Span], micro_batches: int) -> float:
    """T_w + T_s + T_e: until the pivot begins, while it works without a pause, and until all others are done.

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

    From the last on, a stage before takes over if its own steady phase is longer than that of the pivot and the
    forwards and backwards of the stages between together.
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


# ---- searching -----------------------------------------------------------------------------------------------------


MOST_PLANS = 20_000
_BEAM, _CUTS, _FRUITLESS = 4, 40, 3
_IMPROVED, _STEPS = 4, 150_000  # starts of local search; stages of plans that each may look at

Layout = tuple[PlacedStage, ...]
Value = tuple[float, float]


def find(model: Model, stages: int | None) -> tuple[Value, Layout, bool]:
    """The first plan by ``Model.order``, with what that says, and whether all plans were looked at."""
    if _plans(model, stages) <= MOST_PLANS:
        return (*min((model.order(layout), layout) for layout in _every(model, stages)), True)
    starts = [*_even(model, stages), _beam(model, stages)[1]]
    if model.limit is not None:
        starts.append(_steady(model, stages, model.limit))
    starts = sorted((layout for layout in starts if layout), key=model.order)
    return (*min(_improved(model, stages, layout) for layout in starts[:_IMPROVED]), False)


def _steady(model: Model, stages: int | None, limit: float) -> Layout:
    """Stages that are about equally quick and fit into the memory; none if nothing does."""
    blocks = steady(model.held, sum(_all_free(model)), stages, limit)
    return _placed(model, blocks or [])


def _even(model: Model, stages: int | None) -> Iterator[Layout]:
    """Stages cut at about equal compute, with devices in proportion to it."""
    layers, workers = model.chain.layers, sum(_all_free(model))
    most = min(layers, workers)
    for count in [stages] if stages else [2**n for n in range(most.bit_length())]:
        bounds = [0, *balance([model.chain.compute_s(n, n + 1) for n in range(layers)], count), layers]
        share = [model.chain.compute_s(a, b) for a, b in pairwise(bounds)]
        reached = [(workers - count) * s / max(sum(share), 1e-300) for s in accumulate(share)]
        own = [1 + int(b) - int(a) for a, b in pairwise([0.0, *reached])]
        yield _placed(model, [Block(a, b, n) for (a, b), n in zip(pairwise(bounds), own)])


def _placed(model: Model, blocks: list[Block]) -> Layout:
    """On fresh machines first."""
    free = _all_free(model)
    layout: Layout = ()
    for block in blocks:
        taken = placements(free, model.machines.devices, block.workers)[0]
        layout, free = (*layout, PlacedStage(block.first, block.last, taken)), left(free, taken)
    return layout


def _plans(model: Model, stages: int | None) -> int:
    """At most so many plans there are."""
    layers, workers = model.chain.layers, model.machines.machines * model.machines.devices
    policies = 1 if 1 in (model.machines.machines, model.machines.devices) else len(POLICIES)
    counts = range(1, min(layers, workers) + 1) if stages is None else [stages]
    return sum(math.comb(layers - 1, s - 1) * math.comb(workers, s) * policies**s for s in counts)


def _all_free(model: Model) -> Free:
    return (model.machines.devices,) * model.machines.machines


def _every(model: Model, stages: int | None) -> Iterator[Layout]:
    def after(layout: Layout, first: int, free: Free) -> Iterator[Layout]:
        if stages is not None and len(layout) == stages:
            if first == model.chain.layers:
                yield layout
            return
        if first == model.chain.layers:
            if stages is None:
                yield layout
            return
        for count in range(1, sum(free) + 1):
            for taken in placements(free, model.machines.devices, count):
                for last in range(first + 1, model.chain.layers + 1):
                    yield from after((*layout, PlacedStage(first, last, taken)), last, left(free, taken))

    yield from after((), 0, _all_free(model))


def _beam(model: Model, stages: int | None) -> tuple[Value, Layout]:
    """Stages are split off the front; what is left makes one last stage, and the few best of each length go on."""
    layers, free = model.chain.layers, _all_free(model)
    kept: list[tuple[Layout, Free]] = [((), free)]
    best: tuple[Value, Layout] = ((math.inf, math.inf), ())
    fruitless = 0
    length = 1
    while kept and fruitless < _FRUITLESS:
        found = []
        for layout, rest in kept:
            first = layout[-1].last if layout else 0
            for taken in _last_placements(model, rest):
                plan = (*layout, PlacedStage(first, layers, taken))
                found.append((model.order(plan), plan))
        lead = min(found)
        fruitless = fruitless + 1 if stages is None and lead >= best else 0
        if lead < best and (stages is None or length == stages):
            best = lead
        if length == stages:
            break
        kept = _extended(model, kept, 0 if stages is None else stages - length - 1)
        length += 1
    return best


def _extended(model: Model, kept: list[tuple[Layout, Free]], later: int) -> list[tuple[Layout, Free]]:
    """The best with one more stage in front; ``later``: stages that must still find a layer and a device behind."""
    layers, size = model.chain.layers, model.machines.devices
    found: list[tuple[Value, Layout, Free]] = []
    for layout, free in kept:
        first = layout[-1].last if layout else 0
        for cut in _cuts(model, first, layers - 1 - later):
            for count in _counts(model, first, cut, sum(free), later + 1):
                for taken in placements(free, size, count):
                    longer, rest = (*layout, PlacedStage(first, cut, taken)), left(free, taken)
                    value = model.order((*longer, PlacedStage(cut, layers, rest)))
                    found.append((value, longer, rest))
    return [(layout, free) for _, layout, free in heapq.nsmallest(_BEAM, found)]


def _last_placements(model: Model, free: Free) -> list[Free]:
    """All devices that are left, those of one machine, one alone."""
    some = {sum(free), max(free), 1}
    return [taken for count in some for taken in placements(free, model.machines.devices, count)]


def _cuts(model: Model, first: int, last: int) -> list[int]:
    """Where a stage from ``first`` on may end: everywhere, or at places spread evenly over the compute."""
    if last - first <= _CUTS:
        return list(range(first + 1, last + 1))
    ends = range(first + 1, last + 1)
    reached = [model.chain.compute_s(first, end) for end in ends]
    places = {bisect_left(reached, reached[-1] * n / _CUTS) for n in range(1, _CUTS + 1)}
    return [ends[min(place, len(ends) - 1)] for place in sorted(places)]


def _counts(model: Model, first: int, cut: int, free: int, later: int) -> list[int]:
    """How many devices these layers may get: all numbers if few, else about their share of the compute."""
    most = free - later
    if most <= 16:
        return list(range(1, most + 1))
    size = model.machines.devices
    share = (
        free
        * model.chain.compute_s(first, cut)
        / max(model.chain.compute_s(first, model.chain.layers), 1e-300)
    )
    near = {1, int(share), int(share) + 1, int(share / size) * size, (int(share / size) + 1) * size}
    return sorted(count for count in near if 1 <= count <= most)


def _improved(model: Model, stages: int | None, layout: Layout) -> tuple[Value, Layout]:
    """Goes from a plan to the best of its neighbours until none is better."""
    value = model.order(layout)
    looked = 0
    while looked < _STEPS:
        close = [
            *_near(model, layout),
            *([] if stages else _merged(layout)),
            *([] if stages else _parted(layout)),
        ]
        nearby = [(model.order(near), near) for near in close]
        looked += len(layout) * len(nearby)
        better = min(nearby, default=(value, layout))
        if better[0] >= value:
            break
        value, layout = better
    return value, layout


def _near(model: Model, layout: Layout) -> Iterator[Layout]:
    """A cut moved, a stage with other devices out of what is free."""
    for k in range(len(layout) - 1):
        a, b = layout[k], layout[k + 1]
        for step in (-8, -4, -2, -1, 1, 2, 4, 8):
            cut = a.last + step
            if a.first < cut < b.last:
                moved = (PlacedStage(a.first, cut, a.taken), PlacedStage(cut, b.last, b.taken))
                yield (*layout[:k], *moved, *layout[k + 2 :])
    free = _all_free(model)
    for placed in layout:
        free = left(free, placed.taken)
    size = model.machines.devices
    for k, placed in enumerate(layout):
        room = tuple(a + b for a, b in zip(free, placed.taken))
        for count in {
            placed.workers - size,
            placed.workers - 1,
            placed.workers,
            placed.workers + 1,
            placed.workers + size,
        }:
            if 1 <= count <= sum(room):
                for taken in placements(room, size, count):
                    yield (*layout[:k], PlacedStage(placed.first, placed.last, taken), *layout[k + 1 :])
    yield from _handed_over(layout)


def _handed_over(layout: Layout) -> Iterator[Layout]:
    """A device given by one stage to the one beside it."""
    for k in range(len(layout) - 1):
        for giver, taker in ((k, k + 1), (k + 1, k)):
            if layout[giver].workers > 1:
                place = max(range(len(layout[giver].taken)), key=layout[giver].taken.__getitem__)
                changed = list(layout)
                changed[giver] = _with(layout[giver], place, -1)
                changed[taker] = _with(layout[taker], place, 1)
                yield tuple(changed)


def _with(placed: PlacedStage, place: int, more: int) -> PlacedStage:
    taken = tuple(n + more if m == place else n for m, n in enumerate(placed.taken))
    return PlacedStage(placed.first, placed.last, taken)


def _merged(layout: Layout) -> Iterator[Layout]:
    """Two neighbours as one stage."""
    for k, (a, b) in enumerate(pairwise(layout)):
        taken = tuple(x + y for x, y in zip(a.taken, b.taken))
        yield (*layout[:k], PlacedStage(a.first, b.last, taken), *layout[k + 2 :])


def _parted(layout: Layout) -> Iterator[Layout]:
    """A stage as two, one of which has one machine's devices or half of each machine's."""
    for k, placed in enumerate(layout):
        one = max(range(len(placed.taken)), key=placed.taken.__getitem__)
        alone = tuple(n if m == one else 0 for m, n in enumerate(placed.taken))
        some = {alone, tuple(n // 2 for n in placed.taken), tuple(int(m == one) for m in range(len(alone)))}
        for taken in some:
            rest = left(placed.taken, taken)
            for cut in {placed.first + 1, (placed.first + placed.last) // 2, placed.last - 1}:
                if placed.first < cut < placed.last and any(taken) and any(rest):
                    for x, y in ((taken, rest), (rest, taken)):
                        parts = (PlacedStage(placed.first, cut, x), PlacedStage(cut, placed.last, y))
                        yield (*layout[:k], *parts, *layout[k + 1 :])


# ---- the method ----------------------------------------------------------------------------------------------------


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

    levels: devices in a machine, and machines. A stage's devices are chosen by one of three policies: fresh first
    fills machines that no stage uses yet, so that the all-reduce of its replicas stays inside; append first fills the
    machines that the stages before left half used; scatter first spreads evenly over all machines, for stages whose
    weights are small against their activations. workers, link: one machine of so many devices.

    A stage on m devices takes 1/m of the seconds of one; a ring, 2 (m - 1) |w| / (m B), its all-reduce; a transfer the
    bytes over as many links as both sides have machines. The optimum over all stages, devices and policies
    where there are up to 20,000 plans; beyond, a beam over the stages, first to last, then local search, and a note
    says so.

    memory_limit_bytes: of a worker, for weights, gradients, optimizer state, and what is kept of the micro-batches in
    flight.
    """
    check_count("micro_batches", micro_batches)
    check_limit(memory_limit_bytes)
    if stages is not None:
        check_stages(len(profile.layers), stages)
    nets = network(profile, stages, workers, levels, link)
    machines = Machines.of(nets)
    total = machines.machines * machines.devices
    chain = Chain(profile, micro_batch_size_of(profile, micro_batch_size))
    check_enough(stages, total)
    model = Model(chain, machines, micro_batches, memory_limit_bytes)
    (latency_s, _), layout, exact = find(model, stages)
    if latency_s == math.inf:
        assert memory_limit_bytes is not None
        least = least_limit(model.held, total, stages)
        raise does_not_fit(memory_limit_bytes, least, "use more workers, fewer or smaller micro-batches")
    spans = model.spans(layout)[::2]
    notes = transfer_notes(nets[-1].bytes_per_s)
    if not exact:
        notes += ("found by a beam and local search: there are too many plans to look at all",)
    return Partition(
        method="dapple",
        layers=chain.layers,
        boundaries=[placed.first for placed in layout[1:]],
        replication=[placed.workers for placed in layout],
        stage_s=[span.forward_s + span.backward_s for span in spans],
        objective=f"one batch of {micro_batches} micro-batches",
        value=latency_s,
        micro_batch_size=chain.micro_batch_size,
        workers=total,
        memory_bytes=model.bytes(layout),
        placement=_workers_of(layout) if machines.machines > 1 else None,
        machines=[placed.taken for placed in layout] if machines.machines > 1 else None,
        system="dapple",
        micro_batches=micro_batches,
        notes=notes,
    )


def _workers_of(layout: Sequence[PlacedStage]) -> list[list[int]]:
    """Per stage its workers: those that are used, numbered machine after machine, and in each stage after stage."""
    on_machine = zip(*(placed.taken for placed in layout))
    found: list[list[int]] = [[] for _ in layout]
    number = 0
    for counts in on_machine:
        for stage, count in enumerate(counts):
            found[stage] += range(number, number + count)
            number += count
    return found
