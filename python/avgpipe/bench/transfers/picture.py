"""The comparison as a picture: latencies as bars, bandwidth over the size of a message."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from avgpipe.bench.result import SectionResult
from avgpipe.bench.transfers.benchmark import GLOO, HANDED, LATENCY, MEMCPY, READ
from avgpipe.timeline.plot import write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#333333"
_COLORS = {"shm": "#2a6fb0", "gloo": "#7fb0d8", "local": "#3b8c5a", GLOO: "#8d8d8d", MEMCPY: "#c0453c"}
_OTHER = "#7a5aa6"


def plot_transfers(
    results: Sequence[SectionResult], heading: str, path: str | os.PathLike[str] | None = None
) -> Figure:
    """Written to `path` in the format of its suffix. Without pyplot: no display.

    The local link copies nothing, so it has a latency and no bandwidth that could be drawn.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    latency, handed, read = figure.subplots(1, 3)
    _draw_latency(latency, next(result for result in results if result.question == LATENCY))
    for axes, question in ((handed, HANDED), (read, READ)):
        _draw_bandwidth(axes, [result for result in results if result.question == question])
    handed.set_title("message handed over, unread", loc="left", fontsize=9.5, color=_INK)
    read.set_title("handed over and added up", loc="left", fontsize=9.5, color=_INK)
    top = max(handed.get_ylim()[1], read.get_ylim()[1])
    for axes in (handed, read):
        axes.set_ylim(0, top)
    figure.suptitle(heading, fontsize=10, color=_INK)
    if path is not None:
        write_figure(figure, path, dpi=130)
    return figure


def _draw_latency(axes: Axes, result: SectionResult) -> None:
    places = range(len(result.rows))
    times = [row.median_s * 1e6 for row in result.rows]
    colors = [_COLORS.get(row.name.partition(",")[0], _OTHER) for row in result.rows]
    axes.barh(places, times, height=0.7, color=colors)
    for place, row in zip(places, result.rows):
        ends = [row.quartile1_s * 1e6, row.quartile3_s * 1e6]
        axes.plot(ends, [place, place], color=_INK, linewidth=1.0)
        axes.text(max(ends), place, f"  {row.median_s * 1e6:.2f} us", va="center", fontsize=7.5, color=_INK)
    axes.set_yticks(places, [row.name for row in result.rows], fontsize=8, color=_INK)
    axes.invert_yaxis()
    axes.set_xlim(0, max(row.quartile3_s for row in result.rows) * 1e6 * 1.3)
    axes.set_title(f"{result.case}, one way", loc="left", fontsize=9.5, color=_INK)
    _dress(axes, "us; dashes: quartiles")
    axes.tick_params(axis="y", length=0)


def _draw_bandwidth(axes: Axes, results: Sequence[SectionResult]) -> None:
    names = [row.name for row in results[0].rows if row.name != "local"]
    places = range(len(results))
    for name in names:
        rows = [result[name] for result in results]
        speeds = [row.gb_per_s for row in rows]
        color = _COLORS.get(name, _OTHER)
        line = "--" if name == MEMCPY else "-"
        axes.plot(places, speeds, line, marker="o", markersize=4, color=color, label=name)
        for place, row in zip(places, rows):
            spread = [row.gb_per_s * row.median_s / seconds for seconds in (row.quartile3_s, row.quartile1_s)]
            axes.plot([place, place], spread, color=color, linewidth=1.0)
    axes.set_xticks(places, [result.case for result in results])
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    _dress(axes, "size of a message")
    axes.set_ylabel("GB/s; strokes: quartiles", fontsize=8, color=_INK)


def _dress(axes: Axes, label: str) -> None:
    axes.set_xlabel(label, fontsize=8, color=_INK)
    axes.tick_params(labelsize=8, colors=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
