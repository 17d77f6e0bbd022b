"""Profiles, forecasts and trials for tests of the tuner."""

from __future__ import annotations

from avgpipe.measure.forecast import Forecast
from avgpipe.measure.tune import Trial, TunedPlan, TuningResult
from avgpipe.plan import Plan
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.profile import LinkProfile, Profile
from tests.planning import chains

MIB = 2**20


def heavy(layers: int = 4) -> Profile:
    """Weights that are dear to sum and activations that are cheap to send: a pipeline is best."""
    rows = [chains.layer(parameters=1000.0, held=10.0, output=1.0, optimizer=2000.0)] * layers
    return chains.profile(*rows)


def cluster(workers: int, memory: float | None = None) -> Cluster:
    return Cluster.like(heavy(), workers, memory, LinkProfile(0.0, 10.0))


def row(
    what: str,
    predicted_s: float,
    measured_s: float | None = None,
    plan: Plan | None = None,
    failure: str = "",
) -> TunedPlan:
    """As many bytes predicted as 100 MiB for each worker, and measured 110."""
    plan = plan or Plan()
    sizes = (100.0 * MIB,) * plan.workers
    trial = None if measured_s is None else Trial(measured_s, (110 * MIB,) * plan.workers)
    return TunedPlan(what, Forecast(plan, predicted_s, sizes), trial, failure)


def tuning(*rows: TunedPlan, excluded: int = 0) -> TuningResult:
    return TuningResult(rows, 8, 2, 12, excluded, {"search_s": 0.5})
