"""Cuts of a chain of layers into stages with the least bottleneck. Pure data; imports no torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
StageCost = Callable[[int, Any, Any], Any]
"""The cost of stage k with layers ``first`` to ``last`` - 1, which may be arrays of numbers."""

EXACT = 1e-12  # relative; beyond the rounding of sums of seconds
ABOUT_AS_GOOD = 0.05  # share by which a stage may cost more if that reduces the bytes sent


def table_of(layers: int, cost: Callable[[Any, Any], Any]) -> Array:
    """Return costs by first layer and the one after the last; math.inf where there is no layer between."""
    first, last = np.ogrid[: layers + 1, : layers + 1]
    return np.where(first < last, cost(first, last), math.inf)


def least_bottleneck(layers: int, stages: int, cost: StageCost) -> tuple[float, list[int]]:
    """Return the cut with the cheapest bottleneck stage: that stage's cost, and the first layers of stages 1 and up.

    Costs are math.inf for impossible stages. Among equally good cuts it is the one that ends early stages
    latest.
    """
    check_stages(layers, stages)
    best = np.array([0.0, *[math.inf] * layers])  # cost of the first n layers as stages 0 to k
    begins: list[Array] = []
    for k in range(stages):
        # An impossible stage is better than none.
        costs = table_of(layers, lambda *block, k=k: np.minimum(cost(k, *block), sys.float_info.max))
        worst = np.maximum(best[:, None], costs)
        begins.append(layers - worst[::-1].argmin(axis=0))
        best = worst.min(axis=0)
    return float(best[layers]), _firsts(begins, layers)


def least_sent(total: Array, sent: Sequence[float], stages: int, limit: float) -> list[int]:
    """Return the first layers of stages 1 and up, of the cut that sends least with no stage above ``limit``.

    Among cuts that send equally little it is the one with the cheapest bottleneck, then the one that ends
    early stages latest.

    Args:
        total: Cost of the first n layers, for n from 0 on.
        sent: Bytes over the boundary behind each layer but the last.
        stages: Number of stages; a cut within the limit must exist.
        limit: Limit, up to rounding.
    """
    layers = len(total) - 1
    behind = np.array([0.0, *sent, 0.0])
    costs = table_of(layers, lambda first, last: total[last] - total[first])
    is_within = costs <= limit * (1 + EXACT)
    sums = np.array([0.0, *[math.inf] * layers])  # sent by the first n layers as stages 0 to k
    worst = sums.copy()
    begins: list[Array] = []
    for _ in range(stages):
        reached = np.where(is_within, (sums + behind)[:, None], math.inf)
        sums = reached.min(axis=0)
        dearest = np.where(reached <= sums, np.maximum(worst[:, None], costs), math.inf)
        begins.append(layers - dearest[::-1].argmin(axis=0))
        worst = dearest.min(axis=0)
    return _firsts(begins, layers)


def _firsts(begins: Sequence[Array], layers: int) -> list[int]:
    """Return the first layers of stages 1 and up; ``begins`` has each stage's, by the layer after its last."""
    bounds = [layers]
    for begin in reversed(begins):
        bounds.insert(0, int(begin[bounds[0]]))
    return bounds[1:-1]


def check_stages(layers: int, stages: int | None) -> None:
    if stages is not None and (type(stages) is not int or not 1 <= stages <= layers):
        raise ValueError(f"stages={stages!r}: {layers} layers can be cut into 1 to {layers} stages")


def balance(costs: Sequence[float], stages: int, sent: Sequence[float] | None = None) -> list[int]:
    """Return the first layers of stages 1..stages-1, such that the largest sum of ``costs`` over a stage is least.

    Among equally good cuts it is the one that ends early stages latest. Needs 1 <= stages <= len(costs) and
    costs >= 0.

    Args:
        costs: Cost of each layer, in any unit.
        stages: Number of stages.
        sent: Bytes over the boundary behind each layer but the last. Among cuts whose largest stage costs up
            to 5 % more than the best one's, the cut that sends least is chosen.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"cannot cut {len(costs)} layers into {stages} stages: every stage needs a layer")
    if any(not c >= 0 for c in costs):
        raise ValueError(f"layer costs must be numbers of at least 0, not {list(costs)}")
    total = np.cumsum([0.0, *costs])
    best, first = least_bottleneck(len(costs), stages, lambda k, first, last: total[last] - total[first])
    return first if sent is None else least_sent(total, sent, stages, best * (1 + ABOUT_AS_GOOD))
