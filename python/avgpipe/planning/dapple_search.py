"""Which layers and devices DAPPLE's stages get: all plans where they are few, else a beam and local search."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, pairwise

from avgpipe.planning.balance import balance
from avgpipe.planning.cuts import Block
from avgpipe.planning.latency import Model, Seat
from avgpipe.planning.lean import steady
from avgpipe.planning.placement import POLICIES, Free, left, placements

MOST_PLANS = 20_000
_BEAM, _CUTS, _FRUITLESS = 4, 40, 3
_IMPROVED, _STEPS = 4, 150_000  # starts of local search; stages of plans that each may look at

Seats = tuple[Seat, ...]
Value = tuple[float, float]


def find(model: Model, stages: int | None) -> tuple[Value, Seats, bool]:
    """The first plan by ``Model.order``, with what that says, and whether all plans were looked at."""
    if _plans(model, stages) <= MOST_PLANS:
        return (*min((model.order(seats), seats) for seats in _every(model, stages)), True)
    starts = [*_even(model, stages), _beam(model, stages)[1]]
    if model.limit is not None:
        starts.append(_steady(model, stages, model.limit))
    starts = sorted((seats for seats in starts if seats), key=model.order)
    return (*min(_improved(model, stages, seats) for seats in starts[:_IMPROVED]), False)


def _steady(model: Model, stages: int | None, limit: float) -> Seats:
    """Stages that are about equally quick and fit into the memory; none if nothing does."""
    blocks = steady(model.held, sum(_all_free(model)), stages, limit)
    return _placed(model, blocks or [])


def _even(model: Model, stages: int | None) -> Iterator[Seats]:
    """Stages cut at about equal compute, with devices in proportion to it."""
    layers, workers = model.chain.layers, sum(_all_free(model))
    most = min(layers, workers)
    for count in [stages] if stages else [2**n for n in range(most.bit_length())]:
        bounds = [0, *balance([model.chain.compute_s(n, n + 1) for n in range(layers)], count), layers]
        share = [model.chain.compute_s(a, b) for a, b in pairwise(bounds)]
        reached = [(workers - count) * s / max(sum(share), 1e-300) for s in accumulate(share)]
        own = [1 + int(b) - int(a) for a, b in pairwise([0.0, *reached])]
        yield _placed(model, [Block(a, b, n) for (a, b), n in zip(pairwise(bounds), own)])


def _placed(model: Model, blocks: list[Block]) -> Seats:
    """On fresh machines first."""
    free = _all_free(model)
    seats: Seats = ()
    for block in blocks:
        taken = placements(free, model.machines.devices, block.workers)[0]
        seats, free = (*seats, Seat(block.first, block.last, taken)), left(free, taken)
    return seats


def _plans(model: Model, stages: int | None) -> int:
    """At most so many plans there are."""
    layers, workers = model.chain.layers, model.machines.machines * model.machines.devices
    policies = 1 if 1 in (model.machines.machines, model.machines.devices) else len(POLICIES)
    counts = range(1, min(layers, workers) + 1) if stages is None else [stages]
    return sum(math.comb(layers - 1, s - 1) * math.comb(workers, s) * policies**s for s in counts)


def _all_free(model: Model) -> Free:
    return (model.machines.devices,) * model.machines.machines


def _every(model: Model, stages: int | None) -> Iterator[Seats]:
    def after(seats: Seats, first: int, free: Free) -> Iterator[Seats]:
        if stages is not None and len(seats) == stages:
            if first == model.chain.layers:
                yield seats
            return
        if first == model.chain.layers:
            if stages is None:
                yield seats
            return
        for count in range(1, sum(free) + 1):
            for taken in placements(free, model.machines.devices, count):
                for last in range(first + 1, model.chain.layers + 1):
                    yield from after((*seats, Seat(first, last, taken)), last, left(free, taken))

    yield from after((), 0, _all_free(model))


def _beam(model: Model, stages: int | None) -> tuple[Value, Seats]:
    """Stages are split off the front; what is left makes one last stage, and the few best of each length go on."""
    layers, free = model.chain.layers, _all_free(model)
    kept: list[tuple[Seats, Free]] = [((), free)]
    best: tuple[Value, Seats] = ((math.inf, math.inf), ())
    fruitless = 0
    length = 1
    while kept and fruitless < _FRUITLESS:
        found = []
        for seats, rest in kept:
            first = seats[-1].last if seats else 0
            for taken in _last_placements(model, rest):
                plan = (*seats, Seat(first, layers, taken))
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


def _extended(model: Model, kept: list[tuple[Seats, Free]], later: int) -> list[tuple[Seats, Free]]:
    """The best with one more stage in front; ``later``: stages that must still find a layer and a device behind."""
    layers, size = model.chain.layers, model.machines.devices
    found: list[tuple[Value, Seats, Free]] = []
    for seats, free in kept:
        first = seats[-1].last if seats else 0
        for cut in _cuts(model, first, layers - 1 - later):
            for count in _counts(model, first, cut, sum(free), later + 1):
                for taken in placements(free, size, count):
                    longer, rest = (*seats, Seat(first, cut, taken)), left(free, taken)
                    value = model.order((*longer, Seat(cut, layers, rest)))
                    found.append((value, longer, rest))
    return [(seats, free) for _, seats, free in heapq.nsmallest(_BEAM, found)]


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


def _improved(model: Model, stages: int | None, seats: Seats) -> tuple[Value, Seats]:
    """Goes from a plan to the best of its neighbours until none is better."""
    value = model.order(seats)
    looked = 0
    while looked < _STEPS:
        close = [
            *_near(model, seats),
            *([] if stages else _merged(seats)),
            *([] if stages else _parted(seats)),
        ]
        nearby = [(model.order(near), near) for near in close]
        looked += len(seats) * len(nearby)
        better = min(nearby, default=(value, seats))
        if better[0] >= value:
            break
        value, seats = better
    return value, seats


def _near(model: Model, seats: Seats) -> Iterator[Seats]:
    """A cut moved, a stage with other devices out of what is free."""
    for k in range(len(seats) - 1):
        a, b = seats[k], seats[k + 1]
        for step in (-8, -4, -2, -1, 1, 2, 4, 8):
            cut = a.last + step
            if a.first < cut < b.last:
                moved = (Seat(a.first, cut, a.taken), Seat(cut, b.last, b.taken))
                yield (*seats[:k], *moved, *seats[k + 2 :])
    free = _all_free(model)
    for seat in seats:
        free = left(free, seat.taken)
    size = model.machines.devices
    for k, seat in enumerate(seats):
        room = tuple(a + b for a, b in zip(free, seat.taken))
        for count in {
            seat.workers - size,
            seat.workers - 1,
            seat.workers,
            seat.workers + 1,
            seat.workers + size,
        }:
            if 1 <= count <= sum(room):
                for taken in placements(room, size, count):
                    yield (*seats[:k], Seat(seat.first, seat.last, taken), *seats[k + 1 :])
    yield from _handed_over(seats)


def _handed_over(seats: Seats) -> Iterator[Seats]:
    """A device given by one stage to the one beside it."""
    for k in range(len(seats) - 1):
        for giver, taker in ((k, k + 1), (k + 1, k)):
            if seats[giver].workers > 1:
                place = max(range(len(seats[giver].taken)), key=seats[giver].taken.__getitem__)
                changed = list(seats)
                changed[giver] = _with(seats[giver], place, -1)
                changed[taker] = _with(seats[taker], place, 1)
                yield tuple(changed)


def _with(seat: Seat, place: int, more: int) -> Seat:
    taken = tuple(n + more if m == place else n for m, n in enumerate(seat.taken))
    return Seat(seat.first, seat.last, taken)


def _merged(seats: Seats) -> Iterator[Seats]:
    """Two neighbours as one stage."""
    for k, (a, b) in enumerate(pairwise(seats)):
        taken = tuple(x + y for x, y in zip(a.taken, b.taken))
        yield (*seats[:k], Seat(a.first, b.last, taken), *seats[k + 2 :])


def _parted(seats: Seats) -> Iterator[Seats]:
    """A stage as two, one of which has one machine's devices or half of each machine's."""
    for k, seat in enumerate(seats):
        one = max(range(len(seat.taken)), key=seat.taken.__getitem__)
        alone = tuple(n if m == one else 0 for m, n in enumerate(seat.taken))
        some = {alone, tuple(n // 2 for n in seat.taken), tuple(int(m == one) for m in range(len(alone)))}
        for taken in some:
            rest = left(seat.taken, taken)
            for cut in {seat.first + 1, (seat.first + seat.last) // 2, seat.last - 1}:
                if seat.first < cut < seat.last and any(taken) and any(rest):
                    for x, y in ((taken, rest), (rest, taken)):
                        parts = (Seat(seat.first, cut, x), Seat(cut, seat.last, y))
                        yield (*seats[:k], *parts, *seats[k + 1 :])
