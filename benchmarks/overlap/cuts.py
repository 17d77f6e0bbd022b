"""Where to cut a chain of layers into stages: the cuts nearest to balance, to be tried by each system."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

from torch import nn


def nearest_to_balance(seconds: Sequence[float], stages: int, ranks: int, count: int) -> list[list[int]]:
    """First layers of stages 1.., `count` cuts with the least time on the busiest of `ranks` ranks (stage s is on
    s % ranks), and of those with equal the least on the busiest stage.
    """
    ends = [0.0, *accumulate(seconds)]

    def cost(cut: tuple[int, ...]) -> tuple[float, float]:
        bounds = (0, *cut, len(seconds))
        stage = [ends[b] - ends[a] for a, b in pairwise(bounds)]
        return max(sum(stage[rank::ranks]) for rank in range(ranks)), max(stage)

    return [list(cut) for cut in sorted(combinations(range(1, len(seconds)), stages - 1), key=cost)[:count]]


def stages_of(layers: Sequence[nn.Module], cut: Sequence[int]) -> list[nn.Module]:
    bounds = [0, *cut, len(layers)]
    return [nn.Sequential(*layers[a:b]) for a, b in pairwise(bounds)]
