"""The search over plans: all are bounded, the promising ones simulated, and the best few refined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

from avgpipe.measure.forecast import Forecast, OnCluster
from avgpipe.measure.shapes import Shape, Space
from avgpipe.plan import RECOMPUTE, Plan
from avgpipe.planning import choose_advance
from avgpipe.planning.chain import Chain, does_not_fit
from avgpipe.planning.cluster import Cluster, ring_s
from avgpipe.planning.cuts import Cut, CutSearch
from avgpipe.planning.profile import Profile

_ROUGH, _REFINED = 60, 5  # plans that are simulated with a first cut, and with the best
_CLOSE = 1.01  # of two plans whose times are nearer, the one that needs less memory
# In the order of what they take: recomputation, and 1F1B, which holds least, in place of the schedule's own advance.
_WAYS: tuple[tuple[str, int | None], ...] = tuple((r, a) for r in RECOMPUTE for a in (None, 0))
_LONG = 2_000  # micro-batches over all stages: above, only the schedules with a name are tried
_WINDOW = 0.96  # of a bound: over the few batches that a simulation times, a worker may have done less than its share


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


def search(profile: Profile, cluster: Cluster, space: Space) -> Found:
    """ValueError where nothing fits into the memory: by how much, and what would."""
    return _Search(profile, cluster, space).run()


class _Search:
    def __init__(self, profile: Profile, cluster: Cluster, space: Space) -> None:
        self._profile, self._cluster, self._space = profile, cluster, space
        self._chain = cache(lambda samples: Chain(profile, samples))
        self._work = cache(self._work_of)
        self._excluded = 0
        self._fastest = max(device.speed for device in cluster.devices)

    def run(self) -> Found:
        shapes = sorted(self._space.shapes(), key=lambda shape: (self._about_s(shape), shape))
        rough = self._rough(shapes)
        if not rough:
            raise self._nothing_fits(shapes)
        best_of_one = [
            min((f for f in rough if self._is(f, 1, workers)), key=_seconds, default=None)
            for workers in {1, self._space.replicas}
        ]
        chosen = [f for f in rough if f.plan.stages > 1][:_REFINED]
        refined = [self._refined(f) for f in chosen] + [f for f in best_of_one if f is not None]
        return Found(tuple(sorted(refined, key=_seconds)), len(shapes), self._excluded)

    @staticmethod
    def _is(f: Forecast, stages: int, workers: int) -> bool:
        return (f.plan.stages, f.plan.workers) == (stages, workers)

    def _least_s(self, shape: Shape) -> float:
        """No cut of this shape takes less for a batch: a worker's share of the work, and the dearest layer's."""
        samples = self._space.batch_size / shape.micro_batches
        whole_s, added_s, largest = self._work(samples)
        each = -(-shape.micro_batches // shape.width)
        share_s = (each * whole_s - added_s) / shape.stages
        largest_s = max(each * layer_s - less_s for layer_s, less_s in largest)
        gain = self._profile.lane_gain(samples) if shape.pipelines > 1 else 1.0
        return _WINDOW * max(share_s, largest_s) / (gain * self._fastest)

    def _about_s(self, shape: Shape) -> float:
        """What the shape may take: its bound, the way through the pipeline, and the sum of gradients."""
        samples = self._space.batch_size / shape.micro_batches
        bound_s = self._least_s(shape)
        if shape.pipelines == 1:
            bound_s += self._work(samples)[0] * (1 - 1 / shape.stages) / self._fastest
        if shape.width == 1:
            return bound_s
        chain = self._chain(samples)
        size = chain.parameter_bytes(0, chain.layers) / shape.stages
        return bound_s + ring_s(size, shape.width, self._cluster.link([0], [shape.width - 1]).bytes_per_s)

    def _work_of(self, samples: float) -> tuple[float, float, list[tuple[float, float]]]:
        """Seconds of a micro-batch, and by how much the first one's is less: of all layers, and of each."""
        chain = self._chain(samples)
        layers = [(chain.compute_s(n, n + 1), chain.accumulate_s(n, n + 1)) for n in range(chain.layers)]
        return chain.compute_s(0, chain.layers), chain.accumulate_s(0, chain.layers), layers

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
        """The quickest of the ways to fit, with a first cut; None where none fits.

        Ways that need less memory are looked at only where memory is what decides.
        """
        found: list[Forecast] = []
        for recompute, advance in _WAYS:
            problem = self._problem(
                replace(shape.plan(recompute), advance=advance if shape.stages > 1 else None)
            )
            cut = CutSearch(problem, problem.limits).first()
            if cut is not None:
                found.append(problem.forecast(cut))
            if problem.limits is None or (found and cut == CutSearch(problem, None).first()):
                break
        return min(found, key=_seconds, default=None)

    def _problem(self, plan: Plan) -> OnCluster:
        return OnCluster(self._profile, plan, self._space.batch_size, self._cluster)

    # ---- the best few ----------------------------------------------------------------------------------------------

    def _refined(self, rough: Forecast) -> Forecast:
        """With the best cut, and the advance that ``advance="auto"`` would choose for it."""
        problem = self._problem(replace(rough.plan, partition=None))
        cut, _, _ = CutSearch(problem, problem.limits).best()
        plans = [replace(problem.plan, advance=advance) for advance in self._advances(problem, cut)]
        found = [rough, problem.forecast(cut), *(self._problem(plan).forecast(cut) for plan in plans)]
        fitting = [f for f in found if fits(f, self._cluster)]
        best_s = min(f.batch_s for f in fitting)
        near = [f for f in fitting if f.batch_s <= _CLOSE * best_s]
        return min(near, key=lambda f: (sum(f.memory_bytes), f.batch_s))

    def _advances(self, problem: OnCluster, cut: Cut) -> list[int | list[int]]:
        """Worth trying for a cut."""
        stages = problem.plan.stages
        if stages * problem.micro_batches > _LONG:
            return [0]
        costs, limit = problem.costs_in_memory(cut)
        if costs is None:
            return [0]
        chosen = choose_advance(
            *(stages, problem.micro_batches, costs),
            pipelines=problem.plan.pipelines,
            memory_limit_bytes=limit,
        )
        return [0, chosen.advance]

    def _nothing_fits(self, shapes: Sequence[Shape]) -> ValueError:
        """What the shapes that need least would need."""
        least = (inf, inf, inf)
        for shape in shapes:
            few = shape.pipelines == min(self._space.pipelines) or shape.stages == 1
            parts = self._space.parts(shape.width)
            if not few or shape.micro_batches not in (min(parts), max(parts)):
                continue
            for recompute, advance in _WAYS:
                plan = replace(shape.plan(recompute), advance=advance if shape.stages > 1 else None)
                problem = self._problem(plan)
                search = CutSearch(problem, problem.limits)
                least = min(least, search.excess(search.lean()))
        _, size, limit = least
        return does_not_fit(limit, size, "use more workers, a smaller batch or a smaller model")


def fits(f: Forecast, cluster: Cluster) -> bool:
    limits = (device.memory_bytes for device in cluster.devices)
    return all(limit is None or size <= limit for size, limit in zip(f.memory_bytes, limits))


def _seconds(f: Forecast) -> float:
    return f.batch_s
