"""The comparison as a picture: a bar for each row, the bounds as lines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from avgpipe.bench.schedules.result import ScheduleResult
from avgpipe.bench.schedules.table import title
from avgpipe.report.figure import write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS, _OTHER, _INK = "#2a6fb0", "#b9b9b9", "#333333"
_LINES = ("#c0453c", "#c98a1b", "#7a5aa6", "#3b8c5a", "#888888")
_WIDTH_IN, _BAR_IN, _FRAME_IN = 9.0, 0.3, 1.5  # of a panel


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
        _draw(axes, result)
    figure.suptitle(heading, fontsize=10, color=_INK)
    if path is not None:
        write_figure(figure, path, dpi=130)
    return figure


def _draw(axes: Axes, result: ScheduleResult) -> None:
    places = range(len(result.rows))
    times = [row.median_s * 1e3 for row in result.rows]
    axes.barh(places, times, height=0.7, color=[_OURS if row.is_ours else _OTHER for row in result.rows])
    for place, row in zip(places, result.rows):
        slow = row.quartile3_s * 1e3
        axes.plot([row.quartile1_s * 1e3, slow], [place, place], color=_INK, linewidth=1.0, zorder=3)
        axes.text(
            max(slow, row.median_s * 1e3),
            place,
            f"  {row.median_s * 1e3:.0f} ms",
            va="center",
            fontsize=8,
            color=_INK,
            fontweight="bold" if row.is_ours else "normal",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.85},
            zorder=3,
        )
    for bound, color in zip(result.bounds, _LINES):
        label = f"{bound.name}: {bound.seconds * 1e3:.0f} ms"
        axes.axvline(bound.seconds * 1e3, color=color, linewidth=1.2, linestyle="--", zorder=2, label=label)
    axes.set_title(title(result), loc="left", fontsize=9.5, color=_INK)
    axes.set_yticks(places, [row.name for row in result.rows], fontsize=8.5, color=_INK)
    axes.set_ylim(len(result.rows) - 0.4, -0.6)
    axes.set_xlim(0, max([*times, *(bound.seconds * 1e3 for bound in result.bounds)]) * 1.12)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, colors=_INK)
    axes.set_xlabel(
        "ms per batch of one pipeline; dashes across bars' ends: quartiles", fontsize=8, color=_INK
    )
    axes.legend(fontsize=7.5, frameon=False, loc="upper center", bbox_to_anchor=(0.42, -0.16), ncols=3)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
