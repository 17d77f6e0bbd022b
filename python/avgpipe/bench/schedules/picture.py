"""The comparison as a picture: a bar for each row, the bounds as lines."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from avgpipe.bench.schedules.result import ScheduleResult, Timed
from avgpipe.bench.schedules.table import title
from avgpipe.timeline.plot import write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS, _OTHER, _INK = "#2a6fb0", "#b9b9b9", "#333333"
_DROP_IN, _SIMULATED = "#8fb7dd", "#f2c14e"
_LINES = ("#c0453c", "#c98a1b", "#7a5aa6", "#3b8c5a", "#888888")
_WIDTH_IN, _BAR_IN, _FRAME_IN = 9.0, 0.3, 1.7  # of a panel
_LEGEND_IN = 0.45  # below the bars
_LONGEST = 2.5  # medians of the rows; longer bars leave the panel


def plot_schedules(
    results: Sequence[ScheduleResult], heading: str, path: str | os.PathLike[str] | None = None
) -> Figure:
    """A panel for each result, written to `path` in the format of its suffix. Without pyplot: no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [_FRAME_IN + _BAR_IN * len(result.rows) for result in results]
    figure = Figure(figsize=(_WIDTH_IN, sum(heights) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(results), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for result, axes in zip(results, panels.flat):
        _draw(figure, axes, result)
    figure.suptitle(heading, fontsize=10, color=_INK)
    if path is not None:
        write_figure(figure, path, dpi=130)
    return figure


def _draw(figure: Figure, axes: Axes, result: ScheduleResult) -> None:
    places = range(len(result.rows))
    times = [row.median_s * 1e3 for row in result.rows]
    right = _right([*times, *(bound.seconds * 1e3 for bound in result.bounds)], times)
    axes.barh(places, times, height=0.7, color=[_color(row) for row in result.rows])
    for place, row in zip(places, result.rows):
        _draw_row(axes, place, row, right)
    simulated = [(row.simulated_s, place) for place, row in zip(places, result.rows) if row.simulated_s]
    if simulated:
        # Clipped by the panel, as their bars are.
        at, marks = [seconds * 1e3 for seconds, _ in simulated], [place for _, place in simulated]
        axes.scatter(
            at,
            marks,
            s=20,
            marker="D",
            color=_SIMULATED,
            edgecolors=_INK,
            linewidths=0.6,
            zorder=4,
            label="simulated",
        )
    for bound, color in zip(result.bounds, _LINES):
        label = f"{bound.name}: {bound.seconds * 1e3:.0f} ms"
        axes.axvline(bound.seconds * 1e3, color=color, linewidth=1.2, linestyle="--", zorder=2, label=label)
    _frame(figure, axes, result, right)


def _color(row: Timed) -> str:
    if row.is_ours:
        return _OURS
    return _DROP_IN if row.is_drop_in else _OTHER


def _right(shown: Sequence[float], times: Sequence[float]) -> float:
    """Where the panel ends: behind the longest bar that is not many times as long as the others."""
    longest = _LONGEST * statistics.median(times) if times else float("inf")
    return 1.12 * max([value for value in shown if value <= longest] or shown)


def _draw_row(axes: Axes, place: int, row: Timed, right: float) -> None:
    """Its quartiles and its time: behind the bar, or at the panel's end where they leave it."""
    median, slow = row.median_s * 1e3, row.quartile3_s * 1e3
    inside = max(median, slow) <= right
    text = f"{median:.0f} ms" + (" \N{RIGHTWARDS ARROW}" if median > right else "")
    axes.plot([row.quartile1_s * 1e3, slow], [place, place], color=_INK, linewidth=1.0, zorder=3)
    axes.text(
        max(median, slow) if inside else 0.99 * right,
        place,
        f"   {text}" if inside else text,
        va="center",
        ha="left" if inside else "right",
        fontsize=8,
        color=_INK,
        fontweight="bold" if row.is_ours else "normal",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.85},
        zorder=3,
    )


def _frame(figure: Figure, axes: Axes, result: ScheduleResult, right: float) -> None:
    """Title, axes and legend."""
    from matplotlib.transforms import ScaledTranslation

    rows = len(result.rows)
    axes.set_title(title(result), loc="left", fontsize=9.5, color=_INK)
    axes.set_yticks(range(rows), [row.name for row in result.rows], fontsize=8.5, color=_INK)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_xlim(0, right)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, colors=_INK)
    axes.set_xlabel(
        "ms per M micro-batches of one pipeline; dashes across bars' ends: quartiles", fontsize=8, color=_INK
    )
    # In inches: a share of the bars' height would move with their number.
    below = axes.transAxes + ScaledTranslation(0, -_LEGEND_IN, figure.dpi_scale_trans)
    axes.legend(
        fontsize=7.5,
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.42, 0),
        bbox_transform=below,
        ncols=3,
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
