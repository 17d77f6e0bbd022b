"""Divisions with the least bottleneck, compared with all that there are."""

from __future__ import annotations

import math
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe_lab.planning.divisions import Divisions
from tests.planning import chains


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
