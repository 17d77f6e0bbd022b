"""What tuning found: plans, what they were predicted to take, and what they took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from avgpipe.measure.forecast import Forecast
from avgpipe.measure.trial import Trial
from avgpipe.plan import Plan

ONE_DEVICE, DATA_PARALLEL, PIPELINE = "one device", "data parallel", "pipeline"
MAX_NUM, MAX_SIZE, TRAVERSAL = "max-num", "max-size", "traversal"
BASELINES = (MAX_NUM, MAX_SIZE, TRAVERSAL)


@dataclass(frozen=True)
class Row:
    """what: ONE_DEVICE, DATA_PARALLEL, PIPELINE, or a baseline. trial: None: not timed; failure: why, where that was
    tried.
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
        """Of the prediction, relative to what was measured."""
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
class Tuning:
    """rows: the best first, by what was measured; those that were only predicted after those. Baselines are not among
    them but in ``baselines``. considered: sizes of plans that there were; excluded: how many of those looked at fitted
    into no memory. seconds: spent on each step.
    """

    rows: tuple[Row, ...]
    baselines: tuple[Row, ...]
    batch_size: int
    workers: int
    considered: int
    excluded: int
    seconds: dict[str, float]

    @property
    def best(self) -> Row:
        return self.rows[0]

    @property
    def plan(self) -> Plan:
        return self.best.plan

    @property
    def runner_up(self) -> Row | None:
        return self.rows[1] if len(self.rows) > 1 else None

    def of(self, what: str) -> Row | None:
        """The best of a kind."""
        return next(self._all(what), None)

    def _all(self, what: str) -> Iterator[Row]:
        return (row for row in (*self.rows, *self.baselines) if row.what == what)

    def samples_per_s(self, row: Row) -> float:
        return self.batch_size / row.batch_s

    def to_json(self) -> dict[str, Any]:
        from avgpipe.measure.advice import advice

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
