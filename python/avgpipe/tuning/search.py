"""The search over plans: all are bounded, the promising ones simulated, and the best few refined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

from avgpipe.partitioning.chain import Chain
from avgpipe.partitioning.memory import does_not_fit
from avgpipe.partitioning.search import Cut, CutSearch
from avgpipe.plan import Plan
from avgpipe.profiling.profile import Profile
from avgpipe.simulation import choose_advance
from avgpipe.tuning.cluster import Cluster
from avgpipe.tuning.forecast import Forecast, OnCluster
from avgpipe.tuning.shapes import Shape, Space

_RECOMPUTE = ("never", "except-last", "always")  # the next where memory asks for it
_ROUGH, _REFINED = 60, 5  # plans that are simulated with a first cut, and with the best
_CLOSE = 1.01  # of two plans whose times are nearer, the one that needs less memory
_LONG = 2_000  # micro-batches over all stages: above, only the schedules with a name are tried


@dataclass(frozen=True)
class Found:
    """ranked: the best plans, by their times; those with one stage included. considered: shapes that there were.
    excluded: how many of those looked at fitted into no memory.
    """

    ranked: tuple[Forecast, ...]
    considered: int
    excluded: int

    @property
    def best(self) -> Forecast:
        return self.ranked[0]

    def first(self, stages: int, workers: int) -> Forecast | None:
        """The best with so many stages and workers."""
        return next((f for f in self.ranked if (f.plan.stages, f.plan.workers) == (stages, workers)), None)


def search(profile: Profile, cluster: Cluster, space: Space) -> Found:
    """ValueError where nothing fits into the memory: by how much, and what would."""
    return _Search(profile, cluster, space).run()


class _Search:
    def __init__(self, profile: Profile, cluster: Cluster, space: Space) -> None:
        self._profile, self._cluster, self._space = profile, cluster, space
        self._chain = cache(lambda samples: Chain(profile, samples))
        self._excluded = 0
        self._fastest = max(device.speed for device in cluster.devices)

    def run(self) -> Found:
        shapes = sorted(self._space.shapes(), key=lambda shape: (self._least_s(shape), shape))
        rough = self._rough(shapes)
        if not rough:
            raise self._nothing_fits(shapes)
        best_of_one = [
            min((f for f in rough if self._is(f, 1, workers)), key=_seconds, default=None)
            for workers in {1, self._cluster.workers}
        ]
        chosen = [f for f in rough if f.plan.stages > 1][:_REFINED]
        refined = [self._refined(f) for f in chosen] + [f for f in best_of_one if f is not None]
        return Found(tuple(sorted(refined, key=_seconds)), len(shapes), self._excluded)

    @staticmethod
    def _is(f: Forecast, stages: int, workers: int) -> bool:
        return (f.plan.stages, f.plan.workers) == (stages, workers)

    def _least_s(self, shape: Shape) -> float:
        """No cut of this shape takes less for a batch."""
        chain = self._chain(self._space.batch_size / shape.micro_batches)
        all_s = chain.compute_s(0, chain.layers) / self._fastest
        share_s = max(all_s / shape.stages, chain.largest_s / self._fastest)
        each = -(-shape.micro_batches // shape.width)
        if shape.pipelines == 1:  # the way through all stages, while others follow
            return all_s + (each - 1) * share_s
        return each * share_s

    def _rough(self, shapes: Sequence[Shape]) -> list[Forecast]:
        """Simulated with a balanced cut, in the order of their times: those that may be best, and of one stage all."""
        found: list[Forecast] = []
        tried, best_s = 0, inf
        for shape in shapes:
            if shape.stages > 1 and (self._least_s(shape) >= best_s or tried >= _ROUGH):
                continue
            forecast = self._first(shape)
            if forecast is None:
                self._excluded += 1
                continue
            found.append(forecast)
            tried += shape.stages > 1
            best_s = min(best_s, forecast.batch_s)
        return sorted(found, key=_seconds)

    def _first(self, shape: Shape) -> Forecast | None:
        """With the first cut that fits; None where none does."""
        for recompute in _RECOMPUTE:
            problem = self._problem(shape, recompute)
            cut = CutSearch(problem, problem.limits).first()
            if cut is not None:
                return problem.forecast(cut)
        return None

    def _problem(self, shape: Shape, recompute: str) -> OnCluster:
        return OnCluster(self._profile, shape.plan(recompute), self._space.batch_size, self._cluster)

    # ---- the best few ----------------------------------------------------------------------------------------------

    def _refined(self, rough: Forecast) -> Forecast:
        """With the best cut, and the advance that ``advance="auto"`` would choose for it."""
        problem = self._problem(shape_of(rough.plan), rough.plan.recompute)
        cut, _, _ = CutSearch(problem, problem.limits).best()
        found = [problem.forecast(cut)]
        for advance in self._advances(problem, cut):
            other = OnCluster(
                self._profile, replace(problem.plan, advance=advance), rough.batch_size, self._cluster
            )
            found.append(other.forecast(cut))
        best_s = min(f.batch_s for f in found if fits(f, self._cluster))
        near = [f for f in found if fits(f, self._cluster) and f.batch_s <= _CLOSE * best_s]
        return min(near, key=lambda f: (sum(f.memory_bytes), f.batch_s))

    def _advances(self, problem: OnCluster, cut: Cut) -> list[int | list[int]]:
        stages = problem.plan.stages
        if stages * problem.micro_batches > _LONG:
            return [0]
        chosen = choose_advance(
            stages,
            problem.micro_batches,
            problem.costs_with_memory(cut),
            pipelines=problem.plan.pipelines,
            memory_limit_bytes=None if problem.limits is None else min(problem.limits),
        )
        return [chosen.advance]

    def _nothing_fits(self, shapes: Sequence[Shape]) -> ValueError:
        """What the shapes that need least would need."""
        least = (inf, inf, inf)
        for shape in shapes:
            most_parts = max(self._space.parts(shape.width))
            if shape.pipelines == min(self._space.pipelines) and shape.micro_batches == most_parts:
                problem = self._problem(shape, _RECOMPUTE[-1])
                search = CutSearch(problem, problem.limits)
                least = min(least, search.excess(search.lean()))
        _, size, limit = least
        return does_not_fit(limit, size, "use more workers, a smaller batch or a smaller model")


def shape_of(plan: Plan) -> Shape:
    return Shape(plan.stages, (plan.replication or [1])[0], plan.pipelines, plan.micro_batches)


def fits(f: Forecast, cluster: Cluster) -> bool:
    limits = (device.memory_bytes for device in cluster.devices)
    return all(limit is None or size <= limit for size, limit in zip(f.memory_bytes, limits))


def _seconds(f: Forecast) -> float:
    return f.batch_s
