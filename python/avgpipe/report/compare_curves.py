"""Learning curves of several systems: training loss and validation metric, against time and against samples."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from avgpipe.timeline.plot import write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Eight hues that readers who confuse red and green tell apart, by line style too from the ninth on.
COLORS = ("#2a6fb0", "#d9780f", "#1b8a63", "#a04a94", "#c0453c", "#7c6a4c", "#4bb3c9", "#c9a400")
_STYLES = ("-", "--", ":")
_INK, _GREY = "#333333", "#888888"
_SPAN = 5.0  # largest over smallest metric from which on its axis is logarithmic
_MEMORY, _LEAST_MEMORY = 0.05, 5.0  # what a smoothed loss remembers: a share of the batches, and batches


class Point(NamedTuple):
    seconds: float
    samples: int
    value: float


@dataclass(frozen=True)
class Curve:
    """loss: of training, a point per batch. metric: of validations, the first before training."""

    loss: tuple[Point, ...] = ()
    metric: tuple[Point, ...] = ()

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Curve:
        """From the rows of a run's metrics.jsonl; values that were not finite are left out."""
        loss: list[Point] = []
        metric: list[Point] = []
        samples = 0
        for row in rows:
            points, name = (loss, "loss") if row["kind"] == "train" else (metric, "metric")
            samples = row.get("samples", samples)  # validations come after a batch, which has told
            if row[name] is not None:
                points.append(Point(row["seconds"], samples, row[name]))
        return cls(tuple(loss), tuple(metric))

    def smoothed(self) -> tuple[Point, ...]:
        """The loss as a running mean over the last few percent of all batches; the first point is the first loss."""
        keep = 1 - 1 / max(_LEAST_MEMORY, _MEMORY * len(self.loss))
        total = weight = 0.0
        points = []
        for point in self.loss:
            total, weight = keep * total + (1 - keep) * point.value, keep * weight + (1 - keep)
            points.append(point._replace(value=total / weight))
        return tuple(points)


def plot_curves(
    curves: Mapping[str, Curve],
    heading: str,
    metric_name: str,
    trivial: float | None = None,
    target: float | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """A line for each system in four panels, written to ``path`` if given. Without pyplot: no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, sharex="col", sharey="row")
    losses = {name: curve.smoothed() for name, curve in curves.items()}
    metrics = {name: curve.metric for name, curve in curves.items()}
    lines = [line for line in (trivial, target) if line is not None]
    for axes, by in zip(panels[0], ("seconds", "samples")):
        _draw(axes, losses, by, "")
    for axes, by in zip(panels[1], ("seconds", "samples")):
        _draw(axes, metrics, by, "o")
        _draw_bound(axes, trivial, "trivial answer", "--")
        _draw_bound(axes, target, "target", ":")
        axes.set_xlabel({"seconds": "seconds of training", "samples": "samples"}[by], color=_INK)
    _scale(panels[1][0], [p.value for points in metrics.values() for p in points] + lines)
    panels[0][0].set_ylabel("training loss, smoothed", color=_INK)
    panels[1][0].set_ylabel(f"validation {metric_name}", color=_INK)
    handles, labels = panels[1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)
    figure.suptitle(heading, fontsize=10, color=_INK)
    if path is not None:
        write_figure(figure, path, dpi=130)
    return figure


def _draw(axes: Axes, lines: Mapping[str, Sequence[Point]], by: str, marker: str) -> None:
    for number, (name, points) in enumerate(lines.items()):
        axes.plot(
            [getattr(point, by) for point in points],
            [point.value for point in points],
            color=COLORS[number % len(COLORS)],
            linestyle=_STYLES[number // len(COLORS) % len(_STYLES)],
            linewidth=1.4,
            marker=marker,
            markersize=4,
            label=name,
            zorder=3,
        )
    axes.grid(color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_bound(axes: Axes, value: float | None, label: str, style: str) -> None:
    if value is not None:
        axes.axhline(
            value, color=_GREY, linewidth=1.1, linestyle=style, label=f"{label}: {value:.4g}", zorder=2
        )


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Logarithmic where a perplexity falls from thousands to tens; the axis is shared along the row."""
    if values and min(values) > 0 and max(values) > _SPAN * min(values):
        axes.set_yscale("log")
