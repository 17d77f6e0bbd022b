"""Results of several systems on the same work: figures of each run, a sentence of advice, and their text."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import gt, lt
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from avgpipe.report.course import parse_target
from avgpipe.report.pictures import COLORS, WIDTH_IN, Curve, plot_curves
from avgpipe.timeline.plot import INK, dress, picture
from avgpipe.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Status of a system. Only OK ones are ranked.
OK, DOES_NOT_FIT, REFUSED, OUT_OF_MEMORY = "ok", "does not fit", "refused", "out of memory"
KILLED, FAILED, INTERRUPTED, NOT_RUN = "killed", "failed", "interrupted", "not run"
_DERIVED = ("epoch_seconds", "samples_per_second")
# Figures that may differ between seeds.
_OF_RUNS = (
    *("epochs", "batches", "samples", "train_seconds", "samples_to_target", "seconds_to_target"),
    *("peak_memory_bytes", "busy_fraction", "metric", "best_metric", *_DERIVED),
)


@dataclass(frozen=True)
class Figures:
    """Results of a run; fields that a run's summary also has have the same names.

    Attributes:
        replicas: The most replicas that share a stage's micro-batches, or pipelines with their own workers.
        epochs: Epochs trained; a fraction if the last one is incomplete.
        train_seconds: Seconds of training alone.
        peak_memory_bytes: Peak memory of the worker that had most.
        busy_fraction: Busy share, the mean of the workers, 0..1.
        metric: Metric of the last validation; None if it was not finite.
        best_metric: Metric of the best validation.
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
    train_seconds: float
    samples_to_target: int | None
    seconds_to_target: float | None
    peak_memory_bytes: int
    busy_fraction: float
    metric: float | None
    best_metric: float | None

    @classmethod
    def of(cls, summary: Mapping[str, Any], replicas: int = 1) -> Figures:
        """Read the content of a run's summary.json. KeyError names what is missing."""
        busy, peak = fmean(summary["worker_busy_fraction"]), max(summary["peak_memory_bytes"])
        found = {**summary, "replicas": replicas, "busy_fraction": busy, "peak_memory_bytes": peak}
        return cls(**{field.name: found[field.name] for field in fields(cls)})

    @property
    def epoch_seconds(self) -> float | None:
        return self.train_seconds / self.epochs if self.epochs > 0 else None

    @property
    def samples_per_second(self) -> float | None:
        return self.samples / self.train_seconds if self.train_seconds > 0 and self.samples else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {name: getattr(self, name) for name in _DERIVED}


@dataclass(frozen=True)
class SystemResult:
    """The outcome of a system.

    Attributes:
        figures: Set for OK and DOES_NOT_FIT; with several seeds, those of the first run that has figures.
        reason: A few words, unless ``status`` is OK.
        warnings: Warnings of its runs, and the status of seeds whose runs did not finish.
        others: Figures of the other seeds' runs.
        rows: Results of each run that began, batch by batch and validation by validation, as in metrics.jsonl.
    """

    system: str
    status: str
    figures: Figures | None = None
    reason: str = ""
    warnings: tuple[str, ...] = ()
    others: tuple[Figures, ...] = ()
    rows: tuple[Sequence[Mapping[str, Any]], ...] = ()

    @classmethod
    def joined(cls, runs: Mapping[int, SystemResult]) -> SystemResult:
        """Join the results of a system's runs by seed into one; OK if one of them is OK."""
        first, *_ = runs.values()
        if len(runs) == 1:
            return first
        status = OK if any(run.status == OK for run in runs.values()) else first.status
        like = {seed: run for seed, run in runs.items() if run.status == status}
        warnings = [warning for run in like.values() for warning in run.warnings]
        for seed, run in runs.items():
            if seed not in like:
                what = ": ".join(filter(None, (run.status, run.reason))).rstrip(".")
                warnings.append(f"seed {seed}: {what}")
        first, *others = like.values()
        figures = tuple(run.figures for run in others if run.figures is not None)
        rows = tuple(of for run in runs.values() for of in run.rows)
        return replace(first, warnings=tuple(dict.fromkeys(warnings)), others=figures, rows=rows)

    @property
    def label(self) -> str:
        """Return the name for a picture, with the status of a system that did not finish."""
        return self.system if self.status == OK else f"{self.system} ({self.status})"

    @property
    def runs(self) -> tuple[Figures, ...]:
        """Return the figures of all seeds."""
        return () if self.figures is None else (self.figures, *self.others)

    def value(self, key: str) -> float | None:
        """Return a figure, with several seeds the median; None if the median run has none.

        A run that did not reach the target counts as slower than all others.
        """
        values = self._values(key)
        middle = median(values) if values else math.inf
        return middle if math.isfinite(middle) else None

    def spread(self, key: str) -> tuple[float | None, float | None] | None:
        """Return least and greatest of a figure over several seeds, None for a run without it; None for one seed."""
        values = self._values(key)
        if len(values) < 2:
            return None
        least, most = (value if math.isfinite(value) else None for value in (min(values), max(values)))
        return least, most

    def _values(self, key: str) -> list[float]:
        found = [getattr(run, key) for run in self.runs]
        return [math.inf if value is None else value for value in found]

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {name: getattr(self, name) for name in ("system", "status", "reason")}
        row["warnings"] = list(self.warnings)
        if self.figures is None:
            return row
        row |= self.figures.to_json()
        if self.others:
            row |= {name: self.value(name) for name in _OF_RUNS}
            row["spread"] = {name: self.spread(name) for name in _OF_RUNS}
            row["runs"] = [run.to_json() for run in self.runs]
        return row


class Column(NamedTuple):
    """A column of the table.

    Attributes:
        key: Name of the figure.
        heading: Heading of the column.
        format: Formats a value.
        highest: Whether high values are good.
        spreads: Whether the least and the greatest value of several seeds are shown, too.
    """

    key: str
    heading: str
    format: Callable[[float], str]
    highest: bool = False
    spreads: bool = False


@dataclass(frozen=True)
class Comparison:
    """The outcomes of all systems, in the order in which they were given.

    Attributes:
        what: Description of the workload.
        trivial: Metric of the best answer that ignores the inputs, or None.
        target: Target of the metric, or of the loss, see ``avgpipe.report.course.parse_target``.
        memory_limit_bytes: Memory limit of a worker.
    """

    what: str
    workers: int
    outcomes: tuple[SystemResult, ...]
    metric_name: str = "metric"
    lower_is_better: bool = True
    trivial: float | None = None
    target: float | str | None = None
    memory_limit_bytes: int | None = None

    @property
    def beaten_trivial(self) -> bool:
        """Return whether some system learned more than the trivial answer; true if there is none."""
        better = lt if self.lower_is_better else gt
        return self.trivial is None or any(
            better(m, self.trivial) for m in self.known("best_metric").values()
        )

    @property
    def ranked(self) -> list[tuple[str, Figures]]:
        """Return the systems that finished and fit, with their figures."""
        return [(o.system, o.figures) for o in self.outcomes if o.status == OK and o.figures is not None]

    def known(self, key: str) -> dict[str, float]:
        """Return one figure of the ranked systems that have it; with several seeds the median."""
        ranked = [o for o in self.outcomes if o.status == OK]
        return {o.system: value for o in ranked if (value := o.value(key)) is not None}

    @property
    def seeds(self) -> int:
        """Return the most runs that a system has."""
        return max((len(o.runs) for o in self.outcomes), default=1)

    def columns(self) -> list[Column]:
        """Return the figures in the order of the table; those of the target only if there is one."""
        high = not self.lower_is_better
        columns = [
            Column("epoch_seconds", "s/epoch", format_figure),
            Column("samples_per_second", "samples/s", format_figure, True),
            Column("samples_to_target", "samples to target", "{:.0f}".format, False, True),
            Column("seconds_to_target", "s to target", format_figure, False, True),
            Column("peak_memory_bytes", "peak memory", format_bytes),
            Column("busy_fraction", "busy", lambda share: f"{100 * share:.0f} %", True),
            Column("best_metric", f"best {self.metric_name}", format_figure, high, True),
            Column("metric", f"last {self.metric_name}", format_figure, high),
        ]
        return columns if self.target is not None else columns[:2] + columns[4:]

    def best_systems(self, column: Column) -> list[str]:
        """Return the ranked systems with the best value of a column; none if there are fewer than two values."""
        values = self.known(column.key)
        best = (max if column.highest else min)(values.values(), default=None)
        return [name for name, value in values.items() if value == best and len(values) > 1]

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the effort to reach the target, else speed and best metric, as bars; written to ``path`` if given.

        A line across the end of a bar spans the least and greatest of several seeds. An unknown value has no bar.
        """
        effort = ("samples_to_target", "seconds_to_target")
        keys = effort if self.target is not None else ("samples_per_second", "best_metric")
        columns = {column.key: column.heading for column in self.columns()}
        with picture(path, WIDTH_IN, 1.2 + 0.4 * len(self.outcomes)) as figure:
            for axes, key in zip(figure.subplots(1, len(keys), sharey=True), keys):
                for place, outcome in enumerate(self.outcomes):
                    _draw_bar(axes, place, outcome, key)
                axes.set_yticks(
                    range(len(self.outcomes)), [o.system for o in self.outcomes], fontsize=9, color=INK
                )
                axes.set_ylim(len(self.outcomes) - 0.4, -0.6)
                axes.margins(x=0.14)
                axes.set_xlim(left=0)
                axes.set_xlabel(columns[key], color=INK)
                dress(axes, without=("top", "right", "left"), grid="x")
            heading = ". ".join(filter(None, (f"{self.what}, {self.workers} workers", self.goal)))
            figure.suptitle(heading, fontsize=10, color=INK)
        return figure

    @property
    def goal(self) -> str:
        """Return a sentence on the target; "" without one."""
        if self.target is None:
            return ""
        value, of_loss = parse_target(self.target)
        return f"Target: {'loss' if of_loss else self.metric_name} {format_figure(value)}"

    def plot_curves(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw loss, metric and distances of replicas over time and samples, as far as results have ``rows``."""
        runs = {o.label: [curve for of in o.rows if (curve := Curve.of(of)).loss] for o in self.outcomes}
        curves = {label: of for label, of in runs.items() if of}
        heading = f"{self.what}, {self.workers} workers"
        return plot_curves(curves, heading, self.metric_name, self.trivial, self.target, path)

    def __str__(self) -> str:
        """The table, notes and advice."""
        from avgpipe_lab.compare.text import plain  # text imports this module

        return plain(self)

    def to_json(self) -> list[dict[str, Any]]:
        """Return a row per system: status, reason, and if there are figures all of them, with those of the table."""
        return [o.to_json() for o in self.outcomes]


def _draw_bar(axes: Axes, place: int, outcome: SystemResult, key: str) -> None:
    """Draw a figure with its least and greatest value; systems without rank have none."""
    value = outcome.value(key) if outcome.status == OK else None
    if value is None:
        axes.text(0, place, "  -", va="center", color=INK, fontsize=9)
        return
    axes.barh(place, value, height=0.62, color=COLORS[place % len(COLORS)], zorder=2)
    ends = [value if end is None else end for end in outcome.spread(key) or ()]
    if ends and ends[0] != ends[1]:
        axes.plot(ends, [place, place], "|-", color=INK, linewidth=1.3, zorder=3)
    beside = max([value, *ends]), place
    style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8, "color": INK}
    axes.annotate(f"{value:.4g}", beside, (4, 0), **style)


def format_figure(value: float) -> str:
    """Format with three digits, or with all before the point: 0.0123, 1.23, 12.3, 1234."""
    size = abs(value)
    if value == 0 or size >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3g}"
