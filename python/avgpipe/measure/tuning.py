"""The best plans for a profile on a cluster, predicted and timed; what was found, and what to do with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from avgpipe.errors import PipelineError
from avgpipe.measure.forecast import Forecast, OnCluster
from avgpipe.measure.search import PlanShape, Space, search, settings
from avgpipe.measure.trials import Trial
from avgpipe.plan import Plan
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.cuts import CutSearch
from avgpipe.planning.profile import Profile

ONE_DEVICE, DATA_PARALLEL, PIPELINE = "one device", "data parallel", "pipeline"
MAX_NUM, MAX_SIZE, TRAVERSAL = "max-num", "max-size", "traversal"
BASELINES = (MAX_NUM, MAX_SIZE, TRAVERSAL)


@dataclass(frozen=True)
class TunedPlan:
    """what: ONE_DEVICE, DATA_PARALLEL, PIPELINE, or a baseline. trial: None: not timed.

    Failure: why, where that was tried.
    """

    what: str
    forecast: Forecast
    trial: Trial | None = None
    failure: str = ""

    @property
    def plan(self) -> Plan:
        return self.forecast.plan

    @property
    def batch_s(self) -> float:
        """Measured, else predicted."""
        return self.trial.batch_s if self.trial is not None else self.forecast.batch_s

    @property
    def error(self) -> float | None:
        """Error of the prediction, relative to what was measured."""
        return None if self.trial is None else self.forecast.batch_s / self.trial.batch_s - 1

    def to_json(self) -> dict[str, Any]:
        trial = self.trial
        return {
            "what": self.what,
            "plan": asdict(self.plan),
            "predicted_batch_s": self.forecast.batch_s,
            "predicted_memory_bytes": list(self.forecast.memory_bytes),
            "measured_batch_s": trial.batch_s if trial is not None else None,
            "measured_memory_bytes": list(trial.memory_bytes) if trial is not None else None,
            "failure": self.failure,
        }


@dataclass(frozen=True)
class TuningResult:
    """rows: the best first, by what was measured; those that were only predicted after those.

    Baselines are not among them but in ``baselines``. considered: sizes of plans that there were; excluded: how
    many of those looked at fitted into no memory. seconds: spent on each step.
    """

    rows: tuple[TunedPlan, ...]
    baselines: tuple[TunedPlan, ...]
    batch_size: int
    workers: int
    considered: int
    excluded: int
    seconds: dict[str, float]

    @property
    def best(self) -> TunedPlan:
        return self.rows[0]

    @property
    def plan(self) -> Plan:
        return self.best.plan

    @property
    def runner_up(self) -> TunedPlan | None:
        return self.rows[1] if len(self.rows) > 1 else None

    def of(self, what: str) -> TunedPlan | None:
        """The best of a kind."""
        return next(self._all(what), None)

    def _all(self, what: str) -> Iterator[TunedPlan]:
        return (row for row in (*self.rows, *self.baselines) if row.what == what)

    def samples_per_s(self, row: TunedPlan) -> float:
        return self.batch_size / row.batch_s

    def to_json(self) -> dict[str, Any]:
        from avgpipe.measure.tuning import advice

        return {
            "plan": asdict(self.plan),
            "advice": advice(self),
            "batch_size": self.batch_size,
            "workers": self.workers,
            "considered": self.considered,
            "excluded": self.excluded,
            "seconds": self.seconds,
            "rows": [row.to_json() for row in self.rows],
            "baselines": [row.to_json() for row in self.baselines],
        }


def kind_of(plan: Plan) -> str:
    if plan.workers == 1:
        return ONE_DEVICE
    return DATA_PARALLEL if plan.stages == 1 else PIPELINE


CLOSE = 0.05  # plans of one machine differ by as much from run to run


def advice(found: TuningResult) -> str:
    """The simplest of the plans that are hardly slower than the fastest: one device, then data parallelism.

    What was measured is not compared with what was only predicted.
    """
    rows = {row.what: row for row in reversed(found.rows) if bool(row.trial) == bool(found.best.trial)}
    one, parallel, pipeline = (rows.get(what) for what in (ONE_DEVICE, DATA_PARALLEL, PIPELINE))
    fastest = found.best.batch_s
    if one is not None and one.batch_s <= fastest * (1 + CLOSE):
        return f"Advice: one device is enough: {_against(found, one, parallel or pipeline)}."
    if parallel is not None and parallel.batch_s <= fastest * (1 + CLOSE):
        return f"Advice: use data parallelism here: {_against(found, parallel, pipeline)}."
    sentence = f"use the pipeline, {_against(found, found.best, parallel)}"
    if found.of(DATA_PARALLEL) is None and found.workers > 1:
        sentence += "; the whole model does not fit into each worker"
    if found.best.plan.pipelines > 1:
        sentence += (
            f"; its {found.best.plan.pipelines} pipelines make one update of the reference from as many batches, so "
            "compare what it learns, too"
        )
    return f"Advice: {sentence}."


def _against(found: TuningResult, row: TunedPlan, other: TunedPlan | None) -> str:
    """Samples a second of a row, and how another one compares."""
    speed = f"{found.samples_per_s(row):.4g} samples/s{'' if row.trial else ' predicted'}"
    if other is None or other is row:
        return speed
    return f"{speed}, {other.what} {found.samples_per_s(other):.4g}"


Measure = Callable[[Forecast], Trial | None]
Say = Callable[[str], None]


def study(
    profile: Profile,
    cluster: Cluster,
    space: Space,
    measure: Measure | None = None,
    *,
    trials: int = 3,
    baselines: bool = False,
    traversal: bool = False,
    say: Say = lambda line: None,
    profile_s: float | None = None,
) -> TuningResult:
    """The best plans for a profile on a cluster.

    measure: times a plan for real, None for one that it cannot; None in its place: predictions alone. trials: how many
    plans are timed. baselines: whether max-num and max-size are, too. traversal: whether every setting is, which then
    are among the baselines. say: is told what goes on. profile_s: what the profile took, where it was made for this.

    Raises ValueError where nothing fits into the memory.
    """
    clock = _StepTimes({} if profile_s is None else {"profile_s": profile_s})
    with clock.step("search_s"):
        found = search(profile, cluster, space)
    rows = [TunedPlan(kind_of(f.plan), f) for f in found.ranked]
    others = [TunedPlan(what, f) for what, f in _extremes(profile, cluster, space).items()]
    if measure is not None:
        with clock.step("trials_s"):
            chosen = _worth_timing(rows, trials)
            rows = _timed([row for row in rows if row in chosen], measure, say) + [
                row for row in rows if row not in chosen
            ]
        if baselines:
            with clock.step("baselines_s"):
                others = _timed(others, measure, say)
        if traversal:
            with clock.step("traversal_s"):
                every = [TunedPlan(TRAVERSAL, f) for f in settings(profile, cluster, space)]
                others += sorted(_timed(every, measure, say), key=lambda row: row.batch_s)
    rows.sort(key=lambda row: (row.trial is None, bool(row.failure), row.batch_s))
    return TuningResult(
        rows=tuple(rows),
        baselines=tuple(others),
        batch_size=space.batch_size,
        workers=cluster.workers,
        considered=found.considered,
        excluded=found.excluded,
        seconds=clock.seconds,
    )


def _worth_timing(rows: Sequence[TunedPlan], trials: int) -> list[TunedPlan]:
    """The best few, and the best of each simpler kind: the advice compares what was measured."""
    return [*rows[:trials], *(row for row in rows[trials:] if row.plan.stages == 1)] if trials else []


def _timed(rows: Iterable[TunedPlan], measure: Measure, say: Say) -> list[TunedPlan]:
    done = []
    for row in rows:
        say(f"timing {describe(row.forecast)}")
        try:
            done.append(replace(row, trial=measure(row.forecast)))
        except PipelineError as error:
            done.append(replace(row, failure=" ".join(str(error).split())))
    return done


def _extremes(profile: Profile, cluster: Cluster, space: Space) -> dict[str, Forecast]:
    """Make the AvgPipe paper's baselines: most micro-batches, and largest; as many pipelines as fit, a balanced cut."""
    stages = min(space.workers, space.layers)
    if stages == 1:
        return {}
    parts = space.parts(1)
    found = {}
    for what, m in ((MAX_NUM, max(parts)), (MAX_SIZE, min(parts))):
        for n in sorted(space.pipelines, reverse=True):
            problem = OnCluster(profile, PlanShape(stages, 1, n, m).plan(), space.batch_size, cluster)
            cut = CutSearch(problem, problem.limits).first()
            if cut is not None:
                found[what] = problem.forecast(cut)
                break
    return found


def describe(f: Forecast) -> str:
    """A plan in a few words."""
    plan = f.plan
    width = (plan.replication or [1])[0]
    where = f"K = {plan.stages}" + (f" x {width}" if width > 1 else "")
    return f"{where}, N = {plan.pipelines}, M = {plan.micro_batches}"


@dataclass
class _StepTimes:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Any:
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin
