"""Systems side by side on the same work: the figures of each run, and which is best in what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from avgpipe.units import format_bytes

# What became of a system. Only OK ones are ranked.
OK, DOES_NOT_FIT, REFUSED, OUT_OF_MEMORY = "ok", "does not fit", "refused", "out of memory"
KILLED, FAILED, INTERRUPTED, NOT_RUN = "killed", "failed", "interrupted", "not run"


@dataclass(frozen=True)
class Figures:
    """What a run came to. replicas: that share a stage's micro-batches, at most, or pipelines with
    workers of their own. epochs: may end in a part of one. train_s: seconds
    of training. peak_memory_bytes: of the worker that had most. busy_fraction: mean of the workers, 0..1. metric,
    best_metric: of the last validation and of the best one; None where it was not finite.
    """

    stages: int
    pipelines: int
    micro_batches: int
    replicas: int
    schedule: str
    batch_size: int
    seed: int
    epochs: float
    batches: int
    samples: int
    train_s: float
    seconds_to_target: float | None
    peak_memory_bytes: int
    busy_fraction: float
    metric: float | None
    best_metric: float | None

    @classmethod
    def of(cls, summary: Mapping[str, Any], replicas: int = 1) -> Figures:
        """From the content of a run's summary.json. KeyError names what is missing."""
        same = ("stages", "pipelines", "micro_batches", "schedule", "batch_size", "seed", "epochs", "batches")
        busy = summary["worker_busy_fraction"]
        return cls(
            **{name: summary[name] for name in (*same, "samples", "seconds_to_target", "metric")},
            replicas=replicas,
            train_s=summary["train_seconds"],
            peak_memory_bytes=max(summary["peak_memory_bytes"]),
            busy_fraction=sum(busy) / len(busy),
            best_metric=summary["best_metric"],
        )

    @property
    def epoch_s(self) -> float | None:
        return self.train_s / self.epochs if self.epochs > 0 else None

    @property
    def samples_per_s(self) -> float | None:
        return self.samples / self.train_s if self.train_s > 0 and self.samples else None

    @property
    def epochs_to_target(self) -> float | None:
        """A run ends when it reaches its target."""
        return None if self.seconds_to_target is None else self.epochs

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["train_seconds"] = values.pop("train_s")
        derived = {"epoch_seconds": self.epoch_s, "samples_per_second": self.samples_per_s}
        return {**values, **derived, "epochs_to_target": self.epochs_to_target}


@dataclass(frozen=True)
class Outcome:
    """What became of a system; ``reason`` says it in a few words unless ``status`` is OK, and figures are there for OK
    and DOES_NOT_FIT. ``warnings``: of its run.
    """

    system: str
    status: str
    figures: Figures | None = None
    reason: str = ""
    warnings: tuple[str, ...] = ()


class Column(NamedTuple):
    """``highest``: whether high values are good."""

    key: str
    heading: str
    value: Callable[[Figures], float | None]
    spell: Callable[[float], str]
    highest: bool


@dataclass(frozen=True)
class Comparison:
    """``outcomes`` of all systems, in the order in which they were asked for.

    trivial: the metric of the best answer that looks at no input, or None. target: of the metric. what: the workload
    in words. memory_limit_bytes: of a worker.
    """

    what: str
    workers: int
    outcomes: tuple[Outcome, ...]
    metric_name: str = "metric"
    lower_is_better: bool = True
    trivial: float | None = None
    target: float | None = None
    memory_limit_bytes: int | None = None

    def better(self, metric: float, other: float) -> bool:
        return metric < other if self.lower_is_better else metric > other

    @property
    def beaten_trivial(self) -> bool:
        """Whether some system learned more than the trivial answer; true where there is none."""
        best = (figures.best_metric for _, figures in self.ranked)
        return self.trivial is None or any(m is not None and self.better(m, self.trivial) for m in best)

    @property
    def ranked(self) -> list[tuple[str, Figures]]:
        """The systems that ended and fit, with their figures."""
        return [(o.system, o.figures) for o in self.outcomes if o.status == OK and o.figures is not None]

    def columns(self) -> list[Column]:
        """Of figures, in the order of the table; those of the target only if there is one."""
        high = not self.lower_is_better
        target = [
            Column(
                "epochs_to_target", "epochs to target", lambda f: f.epochs_to_target, "{:g}".format, False
            ),
            Column("seconds_to_target", "s to target", lambda f: f.seconds_to_target, spell, False),
        ]
        return [
            Column("epoch_seconds", "s/epoch", lambda f: f.epoch_s, spell, False),
            Column("samples_per_second", "samples/s", lambda f: f.samples_per_s, spell, True),
            *(target if self.target is not None else []),
            Column("peak_memory_bytes", "peak memory", lambda f: f.peak_memory_bytes, format_bytes, False),
            Column("busy_fraction", "busy", lambda f: f.busy_fraction, spell_share, True),
            Column("best_metric", f"best {self.metric_name}", lambda f: f.best_metric, spell, high),
            Column("metric", f"last {self.metric_name}", lambda f: f.metric, spell, high),
        ]

    def best_systems(self, column: Column) -> list[str]:
        """Who has the best value of a column among those ranked; nobody where there are fewer than two values."""
        values = {name: v for name, figures in self.ranked if (v := column.value(figures)) is not None}
        if len(values) < 2:
            return []
        best = max(values.values()) if column.highest else min(values.values())
        return [name for name, value in values.items() if value == best]

    def to_json(self) -> list[dict[str, Any]]:
        """A row per system: status and reason, and where there are figures all of them, those of the table too."""
        return [
            {
                "system": o.system,
                "status": o.status,
                "reason": o.reason,
                "warnings": list(o.warnings),
                **(o.figures.to_json() if o.figures else {}),
            }
            for o in self.outcomes
        ]


def spell(value: float) -> str:
    """Three digits, or all before the point: 0.0123, 1.23, 12.3, 1234."""
    size = abs(value)
    if size >= 10 or value == 0:
        return f"{value:.0f}" if size >= 99.95 or value == 0 else f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def spell_share(share: float) -> str:
    return f"{100 * share:.0f} %"
