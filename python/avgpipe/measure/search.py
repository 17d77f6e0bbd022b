"""The search over plans: all sizes are bounded, the promising ones simulated, and the best few refined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from operator import attrgetter
from typing import NamedTuple

from avgpipe.measure.forecast import Forecast, OnCluster
from avgpipe.plan import Plan
from avgpipe.planning import choose_advance
from avgpipe.planning.chain import Chain, does_not_fit
from avgpipe.planning.cluster import Cluster, ring_s
from avgpipe.planning.cuts import Cut, CutSearch
from avgpipe.planning.profile import Profile
from avgpipe.schedule import RECOMPUTE

PIPELINES = (1, 2, 3)
_FEW_WORKERS = 16  # up to this number every number of stages is tried, also if it leaves workers idle
_IDLE = 0.02  # with more workers, the share of them that may stay idle
_OF_A_REPLICA = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class PlanShape(NamedTuple):
    """The sizes of a plan, which are only checked when the plan is made.

    Attributes:
        width: Replicas of each stage.
        micro_batches: Micro-batches of a batch, which pipelines and replicas share.
    """

    stages: int
    width: int
    pipelines: int
    micro_batches: int

    def plan(self, recompute: str = "never", advance: int | None = None) -> Plan:
        """Make the plan without partition; ``advance`` None: the schedule's own, always so for one stage."""
        return Plan(
            stages=self.stages,
            pipelines=self.pipelines,
            micro_batches=self.micro_batches,
            system="data-parallel" if self.stages == self.pipelines == 1 < self.width else "avgpipe",
            schedule="1f1b" if self.stages == 1 else "advance-forward",
            replication=[self.width] * self.stages if self.width > 1 else None,
            recompute=recompute,
            advance=advance if self.stages > 1 else None,
        )


def check_sizes(batch_size: int, pipelines: Sequence[int], micro_batches: Sequence[int] | None) -> None:
    """Raise ValueError for sizes that no plan can have."""
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r}: must be a whole number of at least 1")
    for name, values in (("pipelines", pipelines), ("micro_batches", micro_batches)):
        if values is not None and (not values or any(type(v) is not int or v < 1 for v in values)):
            raise ValueError(f"{name}={values!r}: must be whole numbers of at least 1")
    over = [m for m in micro_batches or () if m > batch_size]
    if over:
        raise ValueError(f"micro_batches={over}: a batch of {batch_size} samples has too few samples")


@dataclass(frozen=True)
class Space:
    """The plans to try for a profile on a cluster.

    Attributes:
        batch_size: Samples of a batch, which the pipelines share.
        pipelines: Numbers of pipelines to try.
        micro_batches: Numbers of micro-batches to try; None: a sensible few.

    Raises:
        ValueError: See :func:`check_sizes`.
    """

    profile: Profile
    cluster: Cluster
    batch_size: int
    pipelines: Sequence[int] = PIPELINES
    micro_batches: Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_sizes(self.batch_size, self.pipelines, self.micro_batches)

    @property
    def most_stages(self) -> int:
        return min(self.cluster.workers, len(self.profile.layers))

    def on_cluster(self, plan: Plan) -> OnCluster:
        return OnCluster(self.profile, plan, self.batch_size, self.cluster)

    def shapes(self) -> Iterator[PlanShape]:
        """Return the sizes to try; several pipelines on one device only if that can be faster."""
        alone = self.pipelines if max(self.profile.second_lane, default=1.0) > 1 else (1,)
        for width in dict.fromkeys((1, self.width(1))):
            yield from self._of(1, width, alone)
        workers = self.cluster.workers
        widths = {k: self.width(k) for k in range(2, self.most_stages + 1)}
        most = max((k * width for k, width in widths.items()), default=0)
        for stages, width in widths.items():
            if workers <= _FEW_WORKERS or stages * width >= (1 - _IDLE) * most:
                yield from self._of(stages, width, self.pipelines)

    def width(self, stages: int) -> int:
        """Return the most replicas per stage that the workers allow with equal numbers of micro-batches."""
        most = self.cluster.workers // stages
        if self.micro_batches is None:
            return min(most, self.batch_size)
        return max(w for m in self.micro_batches for w in range(1, min(m, most) + 1) if m % w == 0)

    def _of(self, stages: int, width: int, pipelines: Sequence[int]) -> Iterator[PlanShape]:
        return (PlanShape(stages, width, n, m) for n in pipelines for m in self.parts(width, n))

    def parts(self, width: int, pipelines: int = 1) -> list[int]:
        """Return the numbers of micro-batches that ``width`` replicas in each of the pipelines can share equally.

        Without replicas, given numbers need not be equal for all pipelines.
        """
        each = width * pipelines
        if self.micro_batches is not None:
            return [m for m in self.micro_batches if m >= each and (m % each == 0 or width == 1)]
        return [each * m for m in _OF_A_REPLICA if each * m <= self.batch_size]


def profiled_sizes(samples: int) -> tuple[int, ...]:
    """Return the micro-batch sizes to profile: a few powers of two below a whole batch, and the batch."""
    sizes = [samples]
    while len(sizes) < 5 and sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return tuple(sorted(set(sizes)))


_ROUGH, _REFINED = 60, 5  # numbers of plans simulated with a first cut, and with the best cut
_CLOSE = 1.01  # of two plans with closer times, choose the one with less memory
_seconds = attrgetter("batch_s")
_LONG = 2_000  # micro-batches times stages: above, no advances are tried
_WINDOW = 0.96  # of a bound: in the few simulated batches a worker may do less than its share


class Found(NamedTuple):
    """The best plans by their times, with those of one stage.

    Attributes:
        considered: Number of shapes considered.
        excluded: Number of those evaluated that did not fit into the memory.
    """

    ranked: tuple[Forecast, ...]
    considered: int
    excluded: int


def search(space: Space) -> Found:
    """Search the space; ValueError if nothing fits into the memory: by how much, and what would fit."""
    return _PlanSearch(space).run()


class _PlanSearch:
    def __init__(self, space: Space) -> None:
        self._space = space
        self._chain = cache(lambda samples: Chain(space.profile, samples))
        self._work = cache(self._work_of)
        self._excluded = 0
        self._fastest = max(device.speed for device in space.cluster.devices)

    def run(self) -> Found:
        shapes = sorted(self._space.shapes(), key=lambda shape: (self._about_s(shape), shape))
        rough = self._rough(shapes)
        if not rough:
            few = [s for s in shapes if s.stages == 1 or s.pipelines == min(self._space.pipelines)]
            raise nothing_fits(problem for shape in few for problem in self._ways(shape))
        chosen = [self._refined(f) for f in [f for f in rough if f.plan.stages > 1][:_REFINED]]
        for workers in {1, self._space.width(1)}:  # plans of one stage have nothing to refine
            chosen += [f for f in rough if (f.plan.stages, f.plan.workers) == (1, workers)][:1]
        return Found(tuple(sorted(chosen, key=_seconds)), len(shapes), self._excluded)

    def _least_s(self, shape: PlanShape) -> float:
        """Return a lower bound of a batch's time with any cut, from the work per worker and the largest layer."""
        samples = self._space.batch_size / shape.micro_batches
        whole_s, added_s, largest = self._work(samples)
        each = shape.micro_batches // (shape.width * shape.pipelines)  # micro-batches of a pipeline, at least
        share_s = (each * whole_s - added_s) / shape.stages
        largest_s = max(each * layer_s - less_s for layer_s, less_s in largest)
        gain = self._space.profile.lane_gain(samples) if shape.pipelines > 1 else 1.0
        return _WINDOW * shape.pipelines * max(share_s, largest_s) / (gain * self._fastest)

    def _about_s(self, shape: PlanShape) -> float:
        """Estimate a shape's time: its bound, the latency of the pipeline, and the sum of gradients."""
        samples, width = self._space.batch_size / shape.micro_batches, shape.width
        bound_s = self._least_s(shape)
        if shape.pipelines == 1:
            bound_s += self._work(samples)[0] * (1 - 1 / shape.stages) / self._fastest
        if width == 1:
            return bound_s
        chain = self._chain(samples)
        size = chain.parameter_bytes(0, chain.layers) / shape.stages
        rate = self._space.cluster.link([0], [width - 1]).bytes_per_s
        return bound_s + float(ring_s(size, width, rate))

    def _work_of(self, samples: float) -> tuple[float, float, list[tuple[float, float]]]:
        """Return seconds of a micro-batch, and how much less the first one takes: of all layers, and of each."""
        chain = self._chain(samples)
        layers = [(chain.compute_s(n, n + 1), chain.accumulate_s(n, n + 1)) for n in range(chain.layers)]
        return chain.compute_s(0, chain.layers), chain.accumulate_s(0, chain.layers), layers

    def _rough(self, shapes: Sequence[PlanShape]) -> list[Forecast]:
        """Simulate, with a balanced cut, shapes that may be best and all of one stage; return them by time."""
        found: list[Forecast] = []
        tried, best_s = 0, inf
        for shape in shapes:
            if shape.stages > 1 and (self._least_s(shape) >= best_s or tried >= _ROUGH):
                continue
            forecast = fastest_first_cut(self._ways(shape))
            if forecast is None:
                self._excluded += 1
                continue
            found.append(forecast)
            tried += shape.stages > 1
            best_s = min(best_s, forecast.batch_s)
        return sorted(found, key=_seconds)

    def _ways(self, shape: PlanShape) -> Iterator[OnCluster]:
        """Yield variants in the order of their times: with recomputation, and with 1F1B, which holds least."""
        for recompute in RECOMPUTE:
            for advance in (None, 0):
                yield self._space.on_cluster(shape.plan(recompute, advance))

    # ---- the best few ----------------------------------------------------------------------------------------------

    def _refined(self, rough: Forecast) -> Forecast:
        """Return the plan with the best cut, and the advance that ``advance="auto"`` would choose for it."""
        problem = self._space.on_cluster(replace(rough.plan, partition=None))
        cut, _, _ = CutSearch(problem, problem.limits).best()
        plans = [replace(problem.plan, advance=advance) for advance in self._advances(problem, cut)]
        found = [rough, *(on.forecast(cut) for on in (problem, *map(self._space.on_cluster, plans)))]
        fitting = [f for f in found if fits(f, self._space.cluster)]
        best_s = min(f.batch_s for f in fitting)
        near = [f for f in fitting if f.batch_s <= _CLOSE * best_s]
        return min(near, key=lambda f: (sum(f.memory_bytes), f.batch_s))

    def _advances(self, problem: OnCluster, cut: Cut) -> list[int | list[int]]:
        """Return the advances to try for a cut."""
        plan, parts = problem.plan, problem.micro_batches
        if plan.stages * parts > _LONG:
            return [0]
        costs, limit = problem.costs_in_memory(cut)
        if costs is None:
            return [0]
        chosen = choose_advance(plan.stages, parts, costs, pipelines=plan.pipelines, memory_limit_bytes=limit)
        return [0, chosen.advance]


def fastest_first_cut(ways: Iterable[OnCluster]) -> Forecast | None:
    """Return the fastest variant of a plan that fits, with a first cut; None if none fits.

    Later variants need less memory, and are considered only if memory is the limit.
    """
    found: list[Forecast] = []
    for problem in ways:
        cut = CutSearch(problem, problem.limits).first()
        if cut is not None:
            found.append(problem.forecast(cut))
        if problem.limits is None or (found and cut == CutSearch(problem, None).first()):
            break
    return min(found, key=_seconds, default=None)


def nothing_fits(problems: Iterable[OnCluster]) -> ValueError:
    """Return the error with the memory that the smallest of these plans needs."""
    searches = (CutSearch(problem, problem.limits) for problem in problems)
    _, size, limit = min(search.excess(search.min_memory()) for search in searches)
    return does_not_fit(limit, size, "use more workers, a smaller batch or a smaller model")


def fits(f: Forecast, cluster: Cluster) -> bool:
    limits = (device.memory_bytes for device in cluster.devices)
    return all(limit is None or size <= limit for size, limit in zip(f.memory_bytes, limits))
