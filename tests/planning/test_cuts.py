"""Cuts with the least bottleneck, compared with all that there are."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe.model.balance import least_bottleneck
from tests.planning import chains


def some_costs(seed: int, layers: int) -> list[float]:
    """Among them free layers and very dear ones."""
    draw = random.Random(seed)
    return [draw.choice([0.0, 1.0, draw.random(), draw.random(), 20 * draw.random()]) for _ in range(layers)]


@given(st.integers(0, 10**9), st.integers(1, 9), st.integers(1, 5), st.data())
def test_the_best_of_all_cuts(seed: int, layers: int, stages: int, data: st.DataObject) -> None:
    """Of stages of different speeds; and of equally good cuts the one whose last stage begins latest."""
    cost, stages = some_costs(seed, layers), min(stages, layers)
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=stages, max_size=stages))
    total = np.cumsum([0.0, *cost])

    def bottleneck(blocks: list[tuple[int, int]]) -> float:
        return max((total[b] - total[a]) / speed for (a, b), speed in zip(blocks, speeds))

    def of_stage(k: int, first: object, last: object) -> object:
        return (total[last] - total[first]) / speeds[k]

    value, first = least_bottleneck(layers, stages, of_stage)
    best = min(map(bottleneck, chains.cuts(layers, stages)))
    assert value == best == bottleneck(list(pairwise([0, *first, layers])))
    equal = [blocks for blocks in chains.cuts(layers, stages) if bottleneck(blocks) == best]
    assert first[-1:] == max([a for a, _ in blocks[1:]][-1:] for blocks in equal)


def test_where_every_cut_has_a_stage_that_must_not_be_it_is_still_a_cut() -> None:
    value, first = least_bottleneck(
        5, 3, lambda k, first, last: np.full(np.broadcast(first, last).shape, np.inf)
    )
    assert value > 1e300
    assert sorted({0, *first, 5}) == [0, *first, 5]


def test_layers_that_cost_nothing() -> None:
    value, first = least_bottleneck(5, 3, lambda k, first, last: 0.0)
    assert value == 0
    assert len(set(first)) == 2


@pytest.mark.parametrize("stages", [0, 4, 1.0])
def test_wrong_numbers_of_stages(stages: object) -> None:
    with pytest.raises(ValueError, match=r"^stages=.*: 3 layers can be cut into 1 to 3 stages$"):
        least_bottleneck(3, stages, lambda k, first, last: 1.0)  # type: ignore[arg-type]
