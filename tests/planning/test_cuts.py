"""Cuts and divisions with the least bottleneck, compared with all that there are."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe.model.balance import least_bottleneck
from avgpipe.planning.cuts import Divisions
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


# ---- stages with replicas ------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_the_best_of_all_divisions(
    seed: int, layers: int, workers: int, replicas: int, counted: bool
) -> None:
    """A table of random costs for each number of workers of a stage and behind it."""
    draw = random.Random(seed)
    tables = {
        (own, behind): np.array(
            [[draw.choice([draw.random(), math.inf]) for _ in range(layers + 1)] for _ in range(layers + 1)]
        )
        for own in range(1, workers + 1)
        for behind in range(workers)
    }
    cut = np.array([draw.random() for _ in range(layers + 1)])
    upper = np.triu(np.ones((layers + 1, layers + 1)), 1) > 0
    divisions = Divisions(
        layers, lambda own, behind: np.where(upper, tables[own, behind], math.inf), replicas=replicas, cut=cut
    )

    def bottleneck(blocks: list[tuple[int, int]], counts: tuple[int, ...]) -> float:
        stages = [
            tables[own, sum(counts[k + 1 :])][block] for k, (block, own) in enumerate(zip(blocks, counts))
        ]
        return max([*stages, *(cut[first] for first, _ in blocks[1:])])

    stages = min(2, layers, workers) if counted else None
    every = [
        (bottleneck(blocks, counts), sum(counts))
        for blocks, counts in chains.plans(layers, workers)
        if max(counts) <= replicas and stages in (None, len(blocks))
    ]
    best, fewest = min(every, default=(math.inf, 0))
    value, blocks = divisions.best(workers, stages)
    assert value == best
    if best == math.inf:
        assert not blocks
        return
    assert sum(block.workers for block in blocks) == fewest
    assert best == bottleneck([(b.first, b.last) for b in blocks], tuple(b.workers for b in blocks))
    assert stages in (None, len(blocks))
