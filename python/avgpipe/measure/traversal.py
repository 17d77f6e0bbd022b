"""Every setting of the stages on all workers, for a comparison with what measuring all of them would find."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import comb

from avgpipe.measure.forecast import Forecast, OnCluster
from avgpipe.measure.search import fits
from avgpipe.measure.shapes import Shape, Space
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.cuts import Cut, CutSearch
from avgpipe.planning.profile import Profile

_CUTS = 5  # that are all tried; of more, the ones with the least work on the busiest worker


def settings(profile: Profile, cluster: Cluster, space: Space) -> list[Forecast]:
    """A stage on each worker: all numbers of pipelines and micro-batches, no advance, the default and the most, and the
    cuts nearest to balance; what fits into the memory.
    """
    found: list[Forecast] = []
    stages = min(space.workers, space.layers)
    for m in space.parts(1):
        for n in space.pipelines:
            plan = Shape(stages, 1, n, m).plan()
            cuts = _cuts(OnCluster(profile, plan, space.batch_size, cluster))
            for advance in _advances(stages, m):
                problem = OnCluster(profile, replace(plan, advance=advance), space.batch_size, cluster)
                found += [f for f in map(problem.forecast, cuts) if fits(f, cluster)]
    return found


def _cuts(problem: OnCluster) -> list[Cut]:
    stages = problem.plan.stages
    if comb(problem.layers - 1, stages - 1) > 10_000:
        cut = CutSearch(problem, None).first()
        return [] if cut is None else [cut]
    every = combinations(range(1, problem.layers), stages - 1)
    search = CutSearch(problem, None)
    return sorted(every, key=lambda cut: (search.busiest_s(cut), cut))[:_CUTS]


def _advances(stages: int, micro_batches: int) -> list[int | None]:
    """Those that make different schedules."""
    found: list[int | None] = [0]
    if micro_batches > 1 and stages > 1:
        found.append(None)
    if micro_batches > 2:
        found.append(micro_batches - 1)
    return found
