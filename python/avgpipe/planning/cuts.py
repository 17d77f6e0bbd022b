"""Cuts of a chain of layers: exact ones for sums, and a search for what only a simulation knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple, Protocol, TypeVar

from avgpipe.planning.chain import does_not_fit

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


def least_bottleneck(
    layers: int, stages: int, cost: Callable[[int, int, int], float]
) -> tuple[float, list[int]]:
    """The cut whose bottleneck stage is cheapest: that stage's cost, and the first layers of stages 1 and up.

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


def nearly_least_bottleneck(
    layers: int, stages: int, cost: Callable[[int, int, int], float]
) -> tuple[float, list[int]]:
    """Nearly :func:`least_bottleneck`, for costs that rise with the layers, by some 30 (layers + stages) of them.

    Stages are filled in turn up to a bound, which is halved in; it is the least where a stage costs the same whichever
    its number.
    """
    check_stages(layers, stages)

    def within(bound: float) -> tuple[float, list[int]] | None:
        first, worst, begin = list[int](), 0.0, 0
        for k in range(stages):
            last = begin + 1 if k < stages - 1 else layers
            bottleneck = cost(k, begin, last)
            while last < layers - (stages - 1 - k) and (more := cost(k, begin, last + 1)) <= bound:
                last, bottleneck = last + 1, more
            if bottleneck > bound:
                return None
            worst, begin = max(worst, bottleneck), last
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
    """Fewest workers for the rest of the chain from layer i on, and where its first block ends."""
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


# ---- searching -----------------------------------------------------------------------------------------------------


MOST_CUTS = 5_000  # that are all looked at
_MOST_ACTIONS, _LEAST_SIMULATED = 10_000_000, 6
_NEGLIGIBLE = 1e-9
_MOST_COSTS = 200_000  # of stages, to find the cut with the least bottleneck
_STEPS = (1, -1, 2, -2, 4, -4, 8, -8)

Cut = tuple[int, ...]  # first layers of stages 1 and up


class Objective(Protocol):
    """What is made best. A stage is asked for as k, its first layer and the one after its last."""

    @property
    def layers(self) -> int: ...

    @property
    def placement(self) -> Sequence[Sequence[int]]:
        """The stages of each worker."""

    @property
    def process_bytes(self) -> float:
        """Part of the bytes of every stage, but once for a worker."""

    @property
    def actions(self) -> int:
        """Roughly, how many a simulation runs."""

    def seconds(self, cut: Cut) -> float:
        """Simulated seconds of a batch."""

    def work_s(self, k: int, first: int, last: int) -> float:
        """What the stage has to do for a batch."""

    def moved_s(self, k: int, first: int, last: int) -> float:
        """What a batch sends to the stage and from it, in both directions."""

    def stage_bytes(self, k: int, first: int, last: int) -> float:
        """Bytes of a worker that has this stage alone."""


class CutSearch:
    """limits: bytes of each worker, None: unlimited.

    Cuts are simulated in the order of their busiest worker, below which no batch takes less time, until that is above
    the best found: with up to 5,000 cuts the optimum, if the simulations it takes are not too long altogether. Else
    local search begins from cuts that balance work, work with transfers, and memory, and moves single boundaries.
    """

    def __init__(self, objective: Objective, limits: Sequence[float] | None) -> None:
        self._objective, self._limits = objective, limits
        self._layers, self._placement = objective.layers, objective.placement
        self._stages = sum(map(len, self._placement))
        self._worker_of = {k: n for n, stages in enumerate(self._placement) for k in stages}
        self._known: dict[Cut, float] = {}
        self._budget = max(_LEAST_SIMULATED, _MOST_ACTIONS // objective.actions)

    def best(self) -> tuple[Cut, float, bool]:
        """The cut, its seconds per batch, and whether no other can be better.

        ValueError where no cut fits, as far as is known.
        """
        self._check_fits()
        exact = self._few and self._try_all()
        if not exact:
            for start in self._starts():
                if len(self._known) < self._budget or not self._known:
                    self._descend(start, self._seconds)
        best = min(self._known, key=lambda cut: (self._known[cut], cut))
        return best, self._known[best], exact

    def first(self) -> Cut | None:
        """The best of the cuts from which a local search begins; None where no cut fits, as far as is known."""
        return min(self._starts(), key=self._seconds, default=None)

    # ---- memory ----------------------------------------------------------------------------------------------------

    def _worker_bytes(self, cut: Cut) -> list[float]:
        blocks = list(pairwise([0, *cut, self._layers]))
        sizes = [self._objective.stage_bytes(k, *block) for k, block in enumerate(blocks)]
        process = self._objective.process_bytes
        return [sum(sizes[k] for k in stages) - (len(stages) - 1) * process for stages in self._placement]

    def excess(self, cut: Cut) -> tuple[float, float, float]:
        """How much the worker that needs most beyond its limit needs beyond it, its bytes and its limit."""
        limits = self._limits or [math.inf] * len(self._placement)
        return max((size - limit, size, limit) for size, limit in zip(self._worker_bytes(cut), limits))

    def _fits(self, cut: Cut) -> bool:
        return self._limits is None or self.excess(cut)[0] <= 0

    def _check_fits(self) -> None:
        if self._limits is None:
            return
        smallest_cut = self.min_memory()
        excess, size, limit = self.excess(smallest_cut)
        if excess > 0:
            raise does_not_fit(
                limit, size, "use more stages, fewer pipelines, smaller micro-batches or less advance"
            )

    def min_memory(self) -> Cut:
        """The cut that needs least memory, for what there is.

        Of many where workers have several stages, or of many layers, the best of those tried.
        """
        by_stage = self._least_bottleneck(self._share)
        if all(len(stages) == 1 for stages in self._placement):
            return by_stage
        if self._few:
            return min(self._every(), key=self.excess)
        starts = (by_stage, self._least_bottleneck(self._objective.work_s))
        most = lambda cut: self.excess(cut)[0]  # noqa: E731
        return min((self._descend(cut, most) for cut in starts), key=most)

    def _share(self, k: int, first: int, last: int) -> float:
        """Share of the worker's memory, or bytes where nothing is limited."""
        limit = self._limits[self._worker_of[k]] if self._limits is not None else 1.0
        return self._objective.stage_bytes(k, first, last) / limit

    # ---- time ------------------------------------------------------------------------------------------------------

    @property
    def _few(self) -> bool:
        return math.comb(self._layers - 1, self._stages - 1) <= MOST_CUTS

    def _every(self) -> Iterator[Cut]:
        return combinations(range(1, self._layers), self._stages - 1)

    def busiest_s(self, cut: Cut) -> float:
        """No batch takes less: what the busiest worker has to do for it."""
        blocks = list(pairwise([0, *cut, self._layers]))
        work = [self._objective.work_s(k, *block) for k, block in enumerate(blocks)]
        return max(sum(work[k] for k in stages) for stages in self._placement)

    def _seconds(self, cut: Cut) -> float:
        if cut not in self._known:
            self._known[cut] = self._objective.seconds(cut)
        return self._known[cut]

    def _try_all(self) -> bool:
        """Simulate what may be best; False if the budget was not enough for all of it."""
        best_s = math.inf
        for least_s, cut in sorted((self.busiest_s(cut), cut) for cut in self._every() if self._fits(cut)):
            if least_s > best_s * (1 + _NEGLIGIBLE):
                break
            if len(self._known) >= self._budget:
                return False
            best_s = min(best_s, self._seconds(cut))
        return True

    def _starts(self) -> list[Cut]:
        """Cuts to begin from, that fit."""

        def with_transfers(k: int, first: int, last: int) -> float:
            return self._objective.work_s(k, first, last) + self._objective.moved_s(k, first, last)

        found = [self._least_bottleneck(self._objective.work_s, fitting=True)]
        if not self._long:
            found.append(self._least_bottleneck(with_transfers, fitting=True))
        found = [cut for cut in dict.fromkeys(found) if self._fits(cut)]
        if self._limits is not None and not (self._long and found):
            found += [cut for cut in (self.min_memory(),) if self._fits(cut) and cut not in found]
        return found

    @property
    def _long(self) -> bool:
        """Whether the best of all cuts, even by a sum, takes too long to find."""
        return self._stages * self._layers**2 > _MOST_COSTS

    def _least_bottleneck(self, cost: Callable[[int, int, int], float], fitting: bool = False) -> Cut:
        """fitting: leave out stages that do not fit, where that is possible."""
        if self._long:
            return tuple(nearly_least_bottleneck(self._layers, self._stages, cost)[1])
        if fitting and self._limits is not None:
            return tuple(least_bottleneck(self._layers, self._stages, self._allowed(cost))[1])
        return tuple(least_bottleneck(self._layers, self._stages, cost)[1])

    def _allowed(self, cost: Callable[[int, int, int], float]) -> Callable[[int, int, int], float]:
        """The cost, or math.inf where the stage alone does not fit."""
        return lambda k, *block: cost(k, *block) if self._share(k, *block) <= 1 else math.inf

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
                if value < best - abs(best) * _NEGLIGIBLE:
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
                bounds = (0, *cut, self._layers)
                moved = cut[k] + step
                if bounds[k] < moved < bounds[k + 2]:
                    yield (*cut[:k], moved, *cut[k + 1 :])
