"""The settings that a tuned plan is compared with: those of a traversal, and the baselines of the AvgPipe paper."""

from __future__ import annotations

from itertools import combinations
from math import comb

from avgpipe.measure.forecast import Forecast, OnCluster
from avgpipe.measure.search import PlanShape, Space, fits
from avgpipe.planning.cuts import Cut, CutSearch

MAX_NUM, MAX_SIZE = "max-num", "max-size"
_CUTS = 5  # most cuts to try: the ones with the least work on the busiest worker


def extremes(space: Space) -> dict[str, Forecast]:
    """Make the AvgPipe paper's baselines: most micro-batches, and largest; as many pipelines as fit, a balanced cut."""
    stages, parts = space.most_stages, space.parts(1)
    found: dict[str, Forecast] = {}
    for what, m in ((MAX_NUM, max(parts)), (MAX_SIZE, min(parts))) if stages > 1 else ():
        for n in sorted(space.pipelines, reverse=True):
            problem = space.on_cluster(PlanShape(stages, 1, n, max(m, n)).plan())
            cut = CutSearch(problem, problem.limits).first()
            if cut is not None:
                found[what] = problem.forecast(cut)
                break
    return found


def settings(space: Space) -> list[Forecast]:
    """Return the plans of a traversal that fit into the memory, with a stage on each worker.

    It includes all numbers of pipelines and micro-batches; no advance, the default and the most; the cuts
    nearest to balance.
    """
    found: list[Forecast] = []
    stages = space.most_stages
    for m in space.parts(1):
        advances = [0, None, m - 1][: m if stages > 1 else 1]  # advances that make different schedules
        for n in (n for n in space.pipelines if n <= m):
            shape = PlanShape(stages, 1, n, m)
            cuts = _cuts(space.on_cluster(shape.plan()))
            for advance in advances:
                problem = space.on_cluster(shape.plan(advance=advance))
                found += [f for f in map(problem.forecast, cuts) if fits(f, space.cluster)]
    return found


def _cuts(problem: OnCluster) -> list[Cut]:
    stages, search = problem.plan.stages, CutSearch(problem, None)
    if comb(problem.layers - 1, stages - 1) > 10_000:
        cut = search.first()
        return [] if cut is None else [cut]
    every = combinations(range(1, problem.layers), stages - 1)
    return sorted(every, key=lambda cut: (search.busiest_s(cut), cut))[:_CUTS]
