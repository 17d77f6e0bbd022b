"""The cut with the cheapest dearest stage, quickly where costs rise with the layers."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe.planning.cuts import least_bottleneck, nearly_least_bottleneck
from tests.planning import chains

NEARLY = 1e-6


def dearest(cost: list[float], blocks: list[tuple[int, int]]) -> float:
    return max(sum(cost[a:b]) for a, b in blocks)


def some_costs(seed: int, layers: int) -> list[float]:
    """Among them free layers and very dear ones."""
    draw = random.Random(seed)
    return [draw.choice([0.0, 1.0, draw.random(), draw.random(), 20 * draw.random()]) for _ in range(layers)]


@settings(deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 9), st.integers(1, 5))
def test_as_good_as_the_best_of_all_cuts(seed: int, layers: int, stages: int) -> None:
    cost, stages = some_costs(seed, layers), min(stages, layers)
    best = min(dearest(cost, blocks) for blocks in chains.cuts(layers, stages))
    value, first = nearly_least_bottleneck(layers, stages, lambda k, a, b: sum(cost[a:b]))
    bounds = [0, *first, layers]
    assert len(first) == stages - 1
    assert sorted(set(bounds)) == bounds  # no stage is empty
    assert value == pytest.approx(dearest(cost, list(pairwise(bounds))))
    assert best * (1 - NEARLY) <= value <= best * (1 + 2 * NEARLY)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**9), st.integers(1, 9), st.integers(1, 4), st.data())
def test_the_value_is_that_of_its_cut_where_stages_differ(
    seed: int, layers: int, stages: int, data: st.DataObject
) -> None:
    """And no better than the best: it need not be that, as a stage is filled whether or not a later one is quicker."""
    cost, stages = some_costs(seed, layers), min(stages, layers)
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=stages, max_size=stages))
    value, first = nearly_least_bottleneck(layers, stages, lambda k, a, b: sum(cost[a:b]) / speeds[k])
    bounds = [0, *first, layers]
    assert sorted(set(bounds)) == bounds
    assert value == pytest.approx(max(sum(cost[a:b]) / s for (a, b), s in zip(pairwise(bounds), speeds)))
    exact, _ = least_bottleneck(layers, stages, lambda k, a, b: sum(cost[a:b]) / speeds[k])
    assert value >= exact * (1 - 1e-9)


def test_few_costs_are_asked_for() -> None:
    """Where the exact search would ask for stages layers^2 / 2 = 1.25 millions of them."""
    draw, asked = random.Random(0), 0
    sums = [0.0]
    for _ in range(500):
        sums.append(sums[-1] + draw.random())

    def cost(k: int, first: int, last: int) -> float:
        nonlocal asked
        asked += 1
        return sums[last] - sums[first]

    value, first = nearly_least_bottleneck(500, 10, cost)
    assert asked <= 30 * (500 + 10)
    assert len(first) == 9
    assert sums[-1] / 10 <= value <= sums[-1] / 10 + 1.0  # a layer takes up to 1


def test_one_stage_has_all_layers() -> None:
    assert nearly_least_bottleneck(3, 1, lambda k, a, b: b - a) == (3, [])


def test_as_many_stages_as_layers() -> None:
    assert nearly_least_bottleneck(4, 4, lambda k, a, b: b - a) == (1, [1, 2, 3])


def test_layers_that_cost_nothing() -> None:
    value, first = nearly_least_bottleneck(5, 3, lambda k, a, b: 0.0)
    assert value == 0
    assert len(set(first)) == 2


@pytest.mark.parametrize("stages", [0, 4, 1.0])
def test_wrong_numbers_of_stages(stages: object) -> None:
    with pytest.raises(ValueError, match=r"^stages=.*: 3 layers can be cut into 1 to 3 stages$"):
        nearly_least_bottleneck(3, stages, lambda k, a, b: 1.0)  # type: ignore[arg-type]
