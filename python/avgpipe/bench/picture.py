"""Results as a picture: a panel for each section, a bar for each variant, the machine's limit as a line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from avgpipe.bench.result import SectionResult
from avgpipe.timeline.plot import write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"ours": "#2a6fb0", "baseline": "#b9b9b9", "limit": "#e8e3d9"}
_INK, _LIMIT = "#333333", "#c0453c"
_COLUMN_IN, _BAR_IN, _FRAME_IN = 7.6, 0.27, 0.95  # of a panel


def plot_results(
    results: Sequence[SectionResult], heading: str, path: str | os.PathLike[str] | None = None
) -> Figure:
    """The figure of all sections, written to `path` in the format of its suffix. Without pyplot: no display.

    heading: a line about the machine.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not results:
        raise ValueError("results: there are none to draw; run at least one section")
    columns = 1 if len(results) == 1 else 2
    rows = [results[i : i + columns] for i in range(0, len(results), columns)]
    heights = [_FRAME_IN + _BAR_IN * max(len(result.rows) for result in row) for row in rows]
    figure = Figure(figsize=(_COLUMN_IN * columns, sum(heights) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), columns, squeeze=False, gridspec_kw={"height_ratios": heights})
    for row, line in zip(rows, panels):
        bars = max(len(result.rows) for result in row)
        for result, axes in zip(row, line):
            _draw(axes, result, bars)
    for axes in list(panels.flat)[len(results) :]:
        axes.set_axis_off()
    figure.suptitle(heading, fontsize=10, color=_INK)
    if path is not None:
        write_figure(figure, path, dpi=130)
    return figure


def _draw(axes: Axes, result: SectionResult, bars: int) -> None:
    """In a panel with room for `bars`: bars from the first row down, each with its time and bandwidth behind it."""
    places = range(len(result.rows))
    speeds = [row.gb_per_s for row in result.rows]
    reach = max(row.gb_per_s * row.median_s / row.quartile1_s for row in result.rows)
    axes.barh(places, speeds, height=0.72, color=[_COLORS[row.role] for row in result.rows])
    for place, row in zip(places, result.rows):
        # From the slower quartile to the faster one.
        slow, fast = (row.gb_per_s * row.median_s / seconds for seconds in (row.quartile3_s, row.quartile1_s))
        axes.plot([slow, fast], [place, place], color=_INK, linewidth=1.0, zorder=3)
        axes.text(
            fast,
            place,
            f"  {row.median_s * 1e3:.3g} ms, {row.gb_per_s:.3g} GB/s",
            va="center",
            fontsize=7.5,
            color=_INK,
            fontweight="bold" if row.role == "ours" else "normal",
            # A label may lie on the line of the limit and stays readable.
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.85},
            zorder=3,
        )
    if result.limit is not None:
        axes.axvline(result[result.limit].gb_per_s, color=_LIMIT, linewidth=1.1, zorder=2)
    axes.set_title(result.title, loc="left", fontsize=9.5, color=_INK)
    axes.set_yticks(places, [row.name for row in result.rows], fontsize=8, color=_INK)
    axes.set_ylim(bars - 0.4, -0.6)
    axes.set_xlim(0, reach * 1.36)  # room for the labels behind the bars
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=7.5, colors=_INK)
    axes.set_xlabel(
        "GB/s of what the work must move; dashes: quartiles; line: limit", fontsize=7.5, color=_INK
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
