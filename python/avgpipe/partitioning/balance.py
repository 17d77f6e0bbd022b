"""Contiguous blocks that minimise the dearest block (torchgpipe's balancing, solved exactly)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """First layers of stages 1..stages-1, such that the largest sum of ``costs`` over a stage is least.

    Among equally good cuts the one that ends early stages latest is taken. Needs 1 <= stages <= len(costs) and
    costs >= 0.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"cannot cut {len(costs)} layers into {stages} stages: every stage needs a layer")
    if any(not c >= 0 for c in costs):
        raise ValueError(f"layer costs must be numbers of at least 0, not {list(costs)}")
    total = [0.0, *accumulate(costs)]
    # best[n]: least dearest block over the first n layers, with as many stages as rounds so far; cut[k][n]: its
    # last cut
    best = list(total)
    cuts: list[list[int]] = []
    for k in range(1, stages):
        row = [float("inf")] * len(total)
        cut = [0] * len(total)
        for n in range(k + 1, len(total)):
            for c in range(k, n):
                worst = max(best[c], total[n] - total[c])
                if worst <= row[n]:
                    row[n], cut[n] = worst, c
        best = row
        cuts.append(cut)
    first: list[int] = []
    end = len(costs)
    for cut in reversed(cuts):
        end = cut[end]
        first.insert(0, end)
    return first
