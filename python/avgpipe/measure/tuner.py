"""``avgpipe.tune``: a profile, the search over plans, and the best few timed for real."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from avgpipe.errors import PipelineError
from avgpipe.measure.forecast import Forecast, OnCluster
from avgpipe.measure.result import MAX_NUM, MAX_SIZE, TRAVERSAL, Row, Tuning, kind_of
from avgpipe.measure.search import search
from avgpipe.measure.shapes import Shape, Space
from avgpipe.measure.traversal import settings
from avgpipe.measure.trial import Trial
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.cuts import CutSearch
from avgpipe.planning.profile import Profile

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
) -> Tuning:
    """The best plans for a profile on a cluster.

    measure: times a plan for real, None for one that it cannot; None in its place: predictions alone. trials: how many
    plans are timed. baselines: whether max-num and max-size are, too. traversal: whether every setting is, which then
    are among the baselines. say: is told what goes on. profile_s: what the profile took, where it was made for this.

    Raises ValueError where nothing fits into the memory.
    """
    clock = _Clock({} if profile_s is None else {"profile_s": profile_s})
    with clock.step("search_s"):
        found = search(profile, cluster, space)
    rows = [Row(kind_of(f.plan), f) for f in found.ranked]
    others = [Row(what, f) for what, f in _extremes(profile, cluster, space).items()]
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
                every = [Row(TRAVERSAL, f) for f in settings(profile, cluster, space)]
                others += sorted(_timed(every, measure, say), key=lambda row: row.batch_s)
    rows.sort(key=lambda row: (row.trial is None, bool(row.failure), row.batch_s))
    return Tuning(
        *(tuple(rows), tuple(others), space.batch_size, cluster.workers),
        *(found.considered, found.excluded, clock.seconds),
    )


def _worth_timing(rows: Sequence[Row], trials: int) -> list[Row]:
    """The best few, and the best of each simpler kind: the advice compares what was measured."""
    return [*rows[:trials], *(row for row in rows[trials:] if row.plan.stages == 1)] if trials else []


def _timed(rows: Iterable[Row], measure: Measure, say: Say) -> list[Row]:
    done = []
    for row in rows:
        say(f"timing {describe(row.forecast)}")
        try:
            done.append(replace(row, trial=measure(row.forecast)))
        except PipelineError as error:
            done.append(replace(row, failure=" ".join(str(error).split())))
    return done


def _extremes(profile: Profile, cluster: Cluster, space: Space) -> dict[str, Forecast]:
    """Of the AvgPipe paper: the most micro-batches, and the largest; as many pipelines as fit, the cut balanced."""
    stages = min(space.workers, space.layers)
    if stages == 1:
        return {}
    parts = space.parts(1)
    found = {}
    for what, m in ((MAX_NUM, max(parts)), (MAX_SIZE, min(parts))):
        for n in sorted(space.pipelines, reverse=True):
            problem = OnCluster(profile, Shape(stages, 1, n, m).plan(), space.batch_size, cluster)
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
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Any:
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin
