"""Plots of a run, learning curves, and of a profile."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from avgpipe.report.course import parse_target
from avgpipe.timeline.plot import GREYS, HUES, INK, dress, picture
from avgpipe.units import time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from avgpipe.planning.profile import Profile

# Hues that red-green color-blind readers can distinguish, by line style too from the ninth on.
COLORS = (*(dark for _, dark in HUES), "#4bb3c9", "#c9a400")
_STYLES = ("-", "--", ":")
WIDTH_IN = 12.5
_SPAN = 5.0  # the axis is logarithmic from this ratio of largest to smallest metric
_MEMORY, _LEAST_MEMORY = 0.05, 5.0  # batches that a smoothed loss averages: a share, and at least these
_MOST_IN = 40.0  # height of a profile's picture
_MOST_NAMED = 120  # rows with a name; of more rows every second, third or so has one


# ---- learning curves -------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    seconds: float
    samples: int
    value: float


@dataclass(frozen=True)
class Curve:
    """Learning curves of a run.

    Attributes:
        loss: Training loss, a point per batch.
        metric: Metric of validations, the first before training.
        valid_loss: Loss of validations.
        to_reference: Mean distance of the replicas from the reference, over its norm, at validations.
        between: Mean distance of the replicas from each other, over the reference's norm, at validations.
    """

    loss: tuple[Point, ...] = ()
    metric: tuple[Point, ...] = ()
    valid_loss: tuple[Point, ...] = ()
    to_reference: tuple[Point, ...] = ()
    between: tuple[Point, ...] = ()

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Curve:
        """Make the curves from the rows of a metrics.jsonl; values that were not finite are left out."""
        found: dict[str, list[Point]] = {field.name: [] for field in fields(cls)}
        samples = 0
        for row in rows:
            samples = row.get("samples", samples)  # rows of older files lack it: use the batch before
            if row["kind"] == "train":
                values = {"loss": row["loss"]}
            else:
                values = {"metric": row["metric"], "valid_loss": row["loss"], **_mean_distances(row)}
            for name, value in values.items():
                if value is not None:
                    found[name].append(Point(row["seconds"], samples, value))
        return cls(**{name: tuple(points) for name, points in found.items()})

    def smoothed(self) -> tuple[Point, ...]:
        """Return the loss as a running mean over some percent of all batches; the first point is the first loss."""
        keep = 1 - 1 / max(_LEAST_MEMORY, _MEMORY * len(self.loss))
        total = weight = 0.0
        points = []
        for point in self.loss:
            total, weight = keep * total + (1 - keep) * point.value, keep * weight + (1 - keep)
            points.append(point._replace(value=total / weight))
        return tuple(points)


def _mean_distances(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the means of a validation's distances over the norm of the reference, as far as it has them."""
    distances = row.get("distances") or {}
    norm: float = distances.get("norm") or 0.0  # None where it was not finite
    pairs = distances.get("between") or ()
    found = {
        "to_reference": distances.get("to_reference") or (),
        "between": [distance for i, of in enumerate(pairs) for distance in of[:i]],
    }
    known = {name: values for name, values in found.items() if norm and values and None not in values}
    return {name: fmean(values) / norm for name, values in known.items()}


def plot_curves(
    curves: Mapping[str, Curve | Sequence[Curve]],
    heading: str,
    metric_name: str,
    trivial: float | None = None,
    target: float | str | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Draw a line for each system, to ``path`` if given: losses, metrics, and distances of replicas if known.

    With a target of the loss, validations are drawn by their loss. Of several seeds only the first has
    markers, and the others have thin lines.
    """
    bound, of_loss = (None, False) if target is None else parse_target(target)
    runs = {name: (of,) if isinstance(of, Curve) else tuple(of) for name, of in curves.items()}
    losses = {name: [curve.smoothed() for curve in of] for name, of in runs.items()}
    metrics = {name: [c.valid_loss if of_loss else c.metric for c in of] for name, of in runs.items()}
    bounds = [(None if of_loss else trivial, "trivial answer", "--"), (bound, "target", ":")]
    values = [point.value for of in metrics.values() for points in of for point in points]
    values += [value for value, _, _ in bounds if value is not None]
    rows = 3 if any(curve.to_reference for of in runs.values() for curve in of) else 2
    with picture(path, WIDTH_IN, 3.75 * rows) as figure:
        panels = figure.subplots(rows, 2, sharex="col", sharey="row")
        for column, (by, unit) in enumerate((("seconds", "seconds of training"), ("samples", "samples"))):
            _draw_lines(panels[0][column], losses, by, "")
            _draw_lines(panels[1][column], metrics, by, "o")
            for value, label, style in bounds:
                if value is not None:
                    look = {"color": GREYS[1], "linewidth": 1.1, "linestyle": style, "zorder": 2}
                    panels[1][column].axhline(value, label=f"{label}: {value:.4g}", **look)
            if not values:
                middle = {"ha": "center", "va": "center", "transform": panels[1][column].transAxes}
                panels[1][column].text(0.5, 0.5, "nothing was validated", color=GREYS[1], **middle)
            if rows == 3:
                _draw_distances(panels[2][column], runs, by)
            panels[-1][column].set_xlabel(unit, color=INK)
        # Logarithmic if a perplexity falls from thousands to tens; a row of panels shares the axis.
        if values and min(values) > 0 and max(values) > _SPAN * min(values):
            panels[1][0].set_yscale("log")
        panels[0][0].set_ylabel("training loss, smoothed", color=INK)
        panels[1][0].set_ylabel(f"validation {'loss' if of_loss else metric_name}", color=INK)
        if rows == 3:
            panels[2][0].set_ylabel("distance over norm of reference", color=INK)
        handles, labels = panels[1][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)
        figure.suptitle(heading, fontsize=10, color=INK)
    return figure


def _draw_distances(axes: Axes, runs: Mapping[str, Sequence[Curve]], by: str) -> None:
    _draw_lines(axes, {name: [curve.to_reference for curve in of] for name, of in runs.items()}, by, "o")
    _draw_lines(axes, {name: [curve.between for curve in of] for name, of in runs.items()}, by, "x")
    axes.plot([], [], "o-", color=INK, markersize=4, linewidth=1.4, label="from the reference")
    axes.plot([], [], "x-", color=INK, markersize=4, linewidth=1.4, label="between replicas")
    axes.legend(handles=axes.get_lines()[-2:], frameon=False, fontsize=8)
    axes.set_ylim(bottom=0)


def _draw_lines(axes: Axes, lines: Mapping[str, Sequence[Sequence[Point]]], by: str, marker: str) -> None:
    first = {"linewidth": 1.4, "marker": marker, "markersize": 4, "zorder": 3}
    other = {"linewidth": 0.8, "alpha": 0.55, "zorder": 2}
    for number, (name, seeds) in enumerate(lines.items()):
        line, color = _STYLES[number // len(COLORS) % len(_STYLES)], COLORS[number % len(COLORS)]
        for seed, points in enumerate(seeds):
            look: dict[str, Any] = {**other} if seed else {**first, "label": name}
            along, values = [getattr(point, by) for point in points], [point.value for point in points]
            axes.plot(along, values, color=color, linestyle=line, **look)
    dress(axes)


# ---- a profile -------------------------------------------------------------------------------------------------------


def plot_layers(
    profile: Profile, path: str | os.PathLike[str] | None = None, *, samples: float | None = None
) -> Figure:
    """Draw a row per layer, its seconds beside its bytes; written to ``path`` in the format of its suffix if given.

    The costs are of a micro-batch of ``samples``; None: the largest that was measured.
    """
    size = profile.micro_batch_sizes[-1] if samples is None else samples
    layers, costs = profile.layers, profile.at(size)
    seconds = {
        "forward": ("#b5d4f0", [c.forward_s for c in costs]),
        "backward, inputs": ("#2a6fb0", [c.input_backward_s for c in costs]),
        "backward, weights": ("#7fa8d1", [c.backward_s - c.input_backward_s for c in costs]),
        "update": ("#d9780f", [layer.update_s for layer in layers]),
        "averaging": ("#fcd9a4", [layer.elastic_s for layer in layers]),
    }
    sizes = {
        "held for the backward": ("#1b8a63", [c.held_bytes for c in costs]),
        "output": ("#b0e0cc", [c.output_bytes for c in costs]),
        "parameters": ("#7c6a4c", [layer.parameter_bytes for layer in layers]),
        "optimizer's state": ("#d8d0c1", [layer.optimizer_bytes for layer in layers]),
    }
    unit, per_s = time_unit(max(map(sum, zip(*(values for _, values in seconds.values())))))
    with picture(path, 13.0, min(_MOST_IN, 1.5 + 0.27 * len(layers))) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        _draw_layers(left, seconds, per_s, f"time of a micro-batch, and of an update ({unit})")
        _draw_layers(right, sizes, 2.0**-20, "bytes of a micro-batch, and of the layer (MiB)")
        places = range(0, len(layers), -(-len(layers) // _MOST_NAMED))
        left.set_yticks(places, [layers[n].name for n in places], fontsize=7.5, color=INK)
        heading = f"{profile.model}, micro-batches of {size:g}; {profile.device}"
        figure.suptitle(heading, fontsize=10, color=INK)
    return figure


def _draw_layers(
    axes: Axes, series: Mapping[str, tuple[str, Sequence[float]]], scale: float, label: str
) -> None:
    """Draw bars from the first layer down, one series after the other; each with its color."""
    reached = [0.0] * max(len(values) for _, values in series.values())
    for name, (color, values) in series.items():
        widths = [scale * value for value in values]
        axes.barh(range(len(widths)), widths, left=reached, height=0.74, color=color, label=name)
        reached = [a + b for a, b in zip(reached, widths)]
    axes.set_ylim(len(reached) - 0.4, -0.6)
    axes.set_xlim(0, max(reached) * 1.02 or 1.0)
    axes.set_xlabel(label, fontsize=8.5, color=INK)
    dress(axes, without=("top", "right", "left"), grid="x")
    axes.tick_params(axis="x", labelsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.legend(fontsize=7.5, frameon=False, ncols=len(series), loc="lower left", bbox_to_anchor=(0, 1))
