"""The search over cuts, with objectives that are tables of random numbers."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe.planning.cuts import Cut, CutSearch
from tests.planning import chains

PLACEMENTS = st.sampled_from(
    [
        [(0,)],
        [(0,), (1,)],
        [(0,), (1,), (2,)],
        [(0,), (1,), (2,), (3,)],
        [(0, 1)],
        [(0, 2), (1, 3)],
        [(0, 3), (1, 2)],
        [(0, 2), (1,)],
    ]
)


class Table:
    """Work, bytes and transfers that are sums over layers, other ones for each stage; seconds as no sum knows them."""

    process_bytes = 2.0

    def __init__(self, seed: int, layers: int, placement: Sequence[Sequence[int]], actions: int = 1) -> None:
        draw = random.Random(seed)
        stages = sum(map(len, placement))
        self.layers, self.placement, self.actions = layers, placement, actions
        self.work = [[draw.choice([0, 1, draw.random()]) for _ in range(layers)] for _ in range(stages)]
        self.bytes = [[draw.choice([0, 1, 5 * draw.random()]) for _ in range(layers)] for _ in range(stages)]
        self.moved = np.array([draw.random() for _ in range(layers + 1)])
        self._seed, self.asked = seed, list[Cut]()

    def busiest_s(self, cut: Cut) -> float:
        work = [self.work_s(k, *block) for k, block in enumerate(self.blocks(cut))]
        return max(sum(work[k] for k in stages) for stages in self.placement)

    def seconds(self, cut: Cut) -> float:
        self.asked.append(cut)
        more = random.Random(f"{self._seed} {cut}").choice([0.0, 0.1, 1.0])
        return self.busiest_s(cut) * (1 + more) + more

    def work_s(self, k: int, first: object, last: object) -> object:
        total = np.cumsum([0.0, *self.work[k]])
        return total[last] - total[first]

    def moved_s(self, k: int, first: object, last: object) -> object:
        return self.moved[first] + self.moved[last]

    def stage_bytes(self, k: int, first: object, last: object) -> object:
        total = np.cumsum([0.0, *self.bytes[k]])
        return self.process_bytes + total[last] - total[first]

    # ---- what the search has to find ----

    def blocks(self, cut: Cut) -> list[tuple[int, int]]:
        return list(itertools.pairwise([0, *cut, self.layers]))

    def worker_bytes(self, cut: Cut) -> list[float]:
        own = [sum(self.bytes[k][a:b]) for k, (a, b) in enumerate(self.blocks(cut))]
        return [self.process_bytes + sum(own[k] for k in stages) for stages in self.placement]

    def every(self) -> list[Cut]:
        stages = sum(map(len, self.placement))
        return [tuple(a for a, _ in blocks[1:]) for blocks in chains.cuts(self.layers, stages)]


def made(seed: int, layers: int, placement: Sequence[Sequence[int]], actions: int = 1) -> Table:
    return Table(seed, max(layers, sum(map(len, placement))), placement, actions)


@given(st.integers(0, 10**9), st.integers(1, 8), PLACEMENTS)
def test_the_best_of_all_cuts(seed: int, layers: int, placement: list[tuple[int, ...]]) -> None:
    table = made(seed, layers, placement)
    best = min(map(table.seconds, table.every()))
    cut, seconds, exact = CutSearch(table, None).best()
    assert exact
    assert seconds == table.seconds(cut) == pytest.approx(best, rel=1e-9)


@settings(max_examples=200)
@given(st.integers(0, 10**9), st.integers(1, 8), PLACEMENTS, st.data())
def test_the_best_of_those_that_fit(
    seed: int, layers: int, placement: list[tuple[int, ...]], data: st.DataObject
) -> None:
    """With limits of each worker that is about what some cut needs, never just that; one may have none."""
    table = made(seed, layers, placement)
    needed = table.worker_bytes(data.draw(st.sampled_from(table.every())))
    shares = data.draw(
        st.lists(st.sampled_from([0.503, 0.99, 1.01, 1.503, math.inf]), min_size=4, max_size=4)
    )
    limits = [share * size for share, size in zip(shares, needed)]
    fitting = [
        cut
        for cut in table.every()
        if all(size <= limit for size, limit in zip(table.worker_bytes(cut), limits))
    ]
    search = CutSearch(table, limits)
    if not fitting:
        assert search.first() is None
        with pytest.raises(ValueError, match="nothing fits"):
            search.best()
        return
    assert search.first() in fitting
    cut, seconds, exact = search.best()
    assert exact
    assert cut in fitting
    assert seconds == pytest.approx(min(map(table.seconds, fitting)), rel=1e-9)


@given(st.integers(0, 10**9), st.integers(1, 8), PLACEMENTS)
def test_the_leanest_cut(seed: int, layers: int, placement: list[tuple[int, ...]]) -> None:
    """Its largest worker is the smallest; with that as the limit of all it is found, with less nothing is."""
    table = made(seed, layers, placement)
    least = min(max(table.worker_bytes(cut)) for cut in table.every())
    for limit in (0.9 * least, 1.5 * least):
        search = CutSearch(table, [limit] * len(placement))
        lean = search.min_memory()
        assert max(table.worker_bytes(lean)) == pytest.approx(least)
        assert search.excess(lean) == pytest.approx((least - limit, least, limit))
    with pytest.raises(ValueError, match="nothing fits") as raised:
        CutSearch(table, [0.9 * least] * len(placement)).best()
    enough = chains.least_said(str(raised.value), 0.9 * least, least)
    allowed, _, _ = CutSearch(table, [enough] * len(placement)).best()
    assert max(table.worker_bytes(allowed)) <= enough
    best, _, _ = CutSearch(table, [least * (1 + 1e-9)] * len(placement)).best()
    assert max(table.worker_bytes(best)) == pytest.approx(least)


@settings(max_examples=50)
@given(st.integers(0, 10**9), st.integers(1, 8), PLACEMENTS)
def test_the_first_cut_balances_work(seed: int, layers: int, placement: list[tuple[int, ...]]) -> None:
    """Or work with transfers, whichever is quicker."""
    table = made(seed, layers, placement)

    def balanced(moved: float) -> float:
        def dearest(cut: Cut) -> float:
            return max(
                table.work_s(k, *block) + moved * table.moved_s(k, *block)
                for k, block in enumerate(table.blocks(cut))
            )

        least = min(map(dearest, table.every()))
        return max(table.seconds(cut) for cut in table.every() if dearest(cut) <= least * (1 + 1e-9))

    first = CutSearch(table, None).first()
    assert first is not None
    assert table.seconds(first) <= min(balanced(0.0), balanced(1.0))


def test_quick_searches_skip_cuts_whose_busiest_worker_is_above_the_best() -> None:
    table = made(1, 8, [(0,), (1,), (2,)])
    _, seconds, exact = CutSearch(table, None).best()
    asked = set(table.asked)
    assert exact
    assert len(asked) < len(table.every())
    assert all(table.busiest_s(cut) >= seconds for cut in table.every() if cut not in asked)


@pytest.mark.parametrize("limited", [False, True])
def test_long_simulations_are_few(limited: bool) -> None:
    for seed in range(20):
        table = made(seed, 9, [(0,), (1,), (2,), (3,)], actions=10**9)
        limits, fitting = some_that_fit(table, limited)
        cut, seconds, exact = CutSearch(table, limits).best()
        asked = set(table.asked)
        assert len(asked) <= 6
        assert cut in asked <= set(fitting)
        assert seconds == min(map(table.seconds, asked))
        assert not exact or seconds == min(map(table.seconds, fitting))


@pytest.mark.parametrize("limited", [False, True])
def test_local_search_comes_near_the_best(limited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most end at it, though times are random from cut to cut."""
    monkeypatch.setattr("avgpipe.planning.cuts.MOST_CUTS", 0)
    ratios = []
    for seed in range(40):
        table = made(seed, 9, [(0,), (1,), (2,), (3,)])
        limits, fitting = some_that_fit(table, limited)
        cut, seconds, exact = CutSearch(table, limits).best()
        assert not exact
        assert cut in fitting
        ratios.append(seconds / min(map(table.seconds, fitting)))
    assert min(ratios) >= 1 - 1e-9
    assert sorted(ratios)[20] == pytest.approx(1)


def some_that_fit(table: Table, limited: bool) -> tuple[list[float] | None, list[Cut]]:
    """Limits that leave some room, and the cuts that fit."""
    if not limited:
        return None, table.every()
    limit = 1.3 * min(max(table.worker_bytes(cut)) for cut in table.every())
    fitting = [cut for cut in table.every() if max(table.worker_bytes(cut)) <= limit]
    return [limit] * len(table.placement), fitting


def test_many_layers_and_stages() -> None:
    """More than the exact search for a balanced cut has time for: still cuts that fit, and that are balanced."""
    table = made(3, 120, [(k,) for k in range(20)], actions=10**6)
    for row in (*table.work, *table.bytes):
        row[:] = [1.0] * 120
    cut, _, exact = CutSearch(table, [8.0 + table.process_bytes] * 20).best()
    assert not exact
    assert max(b - a for a, b in table.blocks(cut)) <= 8
    assert table.busiest_s(cut) <= 8
    with pytest.raises(
        ValueError, match="nothing fits; the smallest plan needs 8 bytes on one worker, 1 more"
    ):
        CutSearch(table, [5.0 + table.process_bytes] * 20).best()
