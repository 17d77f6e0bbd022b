"""Searches over the cuts of a chain that every partitioner shares."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

TOO_LONG = -1  # a block that cannot be, nor any longer one
NOT_THIS = 0  # a block that cannot be

EXACT = 1e-12  # relative; beyond the rounding of sums of seconds
_NEARLY = 1e-6


class Block(NamedTuple):
    """Layers ``first`` to ``last`` - 1 on so many workers (or units of workers)."""

    first: int
    last: int
    workers: int


def check_stages(layers: int, stages: int) -> None:
    if type(stages) is not int or not 1 <= stages <= layers:
        raise ValueError(f"stages={stages!r}: {layers} layers can be cut into 1 to {layers} stages")


def least_dearest(
    layers: int, stages: int, cost: Callable[[int, int, int], float]
) -> tuple[float, list[int]]:
    """The cut whose dearest stage is cheapest: that stage's cost, and the first layers of stages 1 and up.

    ``cost(k, first, last)`` is of layers ``first`` to ``last`` - 1 as stage k, math.inf where they must not be. Among
    equally good cuts the one that ends early stages latest. O(stages layers^2) costs are asked for.
    """
    check_stages(layers, stages)
    best = [math.inf] * (layers + 1)  # of the first n layers as stages 0 to k
    for n in range(1, layers - stages + 2):
        best[n] = cost(0, 0, n)
    cuts: list[list[int]] = []
    for k in range(1, stages):
        row, cut = [math.inf] * (layers + 1), [k] * (layers + 1)
        for n in range(k + 1 if k < stages - 1 else layers, layers - stages + k + 2):
            for c in range(k, n):
                if best[c] <= row[n]:
                    worst = max(best[c], cost(k, c, n))
                    if worst <= row[n]:
                        row[n], cut[n] = worst, c
        best = row
        cuts.append(cut)
    first: list[int] = []
    end = layers
    for cut in reversed(cuts):
        end = cut[end]
        first.insert(0, end)
    return best[layers], first


def nearly_least_dearest(
    layers: int, stages: int, cost: Callable[[int, int, int], float]
) -> tuple[float, list[int]]:
    """As :func:`least_dearest`, for costs that rise with the layers, by some 30 (layers + stages) of them.

    Stages are filled in turn up to a bound, which is halved in; it is the least where a stage costs the same whichever
    its number.
    """
    check_stages(layers, stages)

    def within(bound: float) -> tuple[float, list[int]] | None:
        first, worst, begin = list[int](), 0.0, 0
        for k in range(stages):
            last = begin + 1 if k < stages - 1 else layers
            dearest = cost(k, begin, last)
            while last < layers - (stages - 1 - k) and (more := cost(k, begin, last + 1)) <= bound:
                last, dearest = last + 1, more
            if dearest > bound:
                return None
            worst, begin = max(worst, dearest), last
            first.append(begin)
        return worst, first[:-1]

    start = within(math.inf)
    assert start is not None
    return tightest(within, 0.0, start, _NEARLY)


Need = Callable[[int, int, int], int]


def fewest(layers: int, need: Need, most: int, stages: int | None = None) -> list[Block] | None:
    """The blocks of a chain that need fewest workers in all; None if that is more than ``most``.

    ``need(first, last, behind)`` is how many workers layers ``first`` to ``last`` - 1 need where ``behind`` are on the
    layers after them, never fewer for more behind; NOT_THIS or TOO_LONG where no number is enough. So fewest behind is
    best, and one number for each rest of the chain is enough to know. stages: make so many blocks; None: any number.
    O(layers^2) needs are asked for, and as many for each of ``stages``.
    """
    if stages is None:
        total = [most + 1] * layers + [0]
        after = [layers] * (layers + 1)
        for i in range(layers - 1, -1, -1):
            total[i], after[i] = _first_block(i, range(i + 1, layers + 1), total, need, most)
        ends = [after] * layers
        left = [total] * (layers + 1)
    else:
        left, ends = _layered(layers, need, most, stages)
    if left[0][0] > most:
        return None
    blocks: list[Block] = []
    i = 0
    while i < layers:
        j = ends[len(blocks)][i]
        blocks.append(Block(i, j, left[len(blocks)][i] - left[len(blocks) + 1][j]))
        i = j
    return blocks


def _layered(layers: int, need: Need, most: int, stages: int) -> tuple[list[list[int]], list[list[int]]]:
    """By the number of blocks before, then by layer: workers from there on, and where the next block ends."""
    left, ends = [[most + 1] * layers + [0]], []
    for k in range(stages - 1, -1, -1):
        total, after = [most + 1] * (layers + 1), [layers] * (layers + 1)
        last = [layers] if k == stages - 1 else range(k + 1, layers - (stages - 1 - k) + 1)
        for i in [0] if k == 0 else range(k, last[-1]):
            total[i], after[i] = _first_block(i, [j for j in last if j > i], left[-1], need, most)
        left.append(total)
        ends.append(after)
    return left[::-1], ends[::-1]


def _first_block(
    i: int, lasts: range | list[int], behind: list[int], need: Need, most: int
) -> tuple[int, int]:
    """Of the rest of the chain from layer i on: fewest workers, and where its first block ends."""
    best, end = most + 1, i + 1
    for j in lasts:
        if behind[j] + 1 >= best:
            continue
        workers = need(i, j, behind[j])
        if workers == TOO_LONG:
            break
        if workers != NOT_THIS and behind[j] + workers < best:
            best, end = behind[j] + workers, j
    return best, end


def smallest(low: int, high: int, enough: Callable[[int], bool]) -> int | None:
    """The smallest number from ``low`` to ``high`` that is enough, if all above one that is enough are, too."""
    if low > high:
        return None
    if enough(low):
        return low
    if not enough(high):
        return None
    step = 1
    while low + step < high and not enough(low + step):  # callers begin near the answer
        low, step = low + step, 2 * step
    high = min(high, low + step)
    while low + 1 < high:  # low is not enough, high is
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high


Plan = TypeVar("Plan")


def tightest(
    within: Callable[[float], tuple[float, Plan] | None],
    low: float,
    start: tuple[float, Plan],
    exact: float = EXACT,
) -> tuple[float, Plan]:
    """The plan of least value, with it: ``within(bound)`` gives any plan not above the bound, None if there is none.

    low: no plan is below. start: any plan and its value. Halves what is between, down to the share ``exact``.
    """
    best = start
    while low < best[0] * (1 - exact):
        bound = (low + best[0]) / 2
        found = within(bound)
        if found is None:
            low = bound
        else:
            best = found
    return best
