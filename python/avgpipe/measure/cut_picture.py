"""A picture of a model's cut: a bar for each layer, and between stages the bytes sent."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from avgpipe.model.cut import Cut
from avgpipe.timeline.plot import HUES, INK, dress, picture
from avgpipe.units import format_bytes, format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEAST_IN, _MOST_IN, _LAYER_IN = 8.0, 20.0, 0.2  # width of the figure, and of a layer with its name
_LETTER_IN = 0.055  # of a letter of a name
_HEADING_IN, _SHORT_IN = 1.15, 0.55  # widths of the heading above a stage
_BOX_IN = 0.6  # width of the box with the bytes sent
_ROW = 0.075  # height of a line of words above the bars, as a share of the axes


def plot_cut(cut: Cut, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draw the layers by their estimated cost, in the hue of their stage; see ``Pipeline.plot``."""
    layers = len(cut.names)
    width = min(_MOST_IN, max(_LEAST_IN, 1.2 + _LAYER_IN * layers))
    every = -(-layers * _LAYER_IN // (width - 1.2))  # one of this many layers has a name
    named = _named(cut, int(every))
    longest = max(len(cut.names[n]) for n in named)
    with picture(path, width, 3.4 + min(2.2, _LETTER_IN * longest)) as figure:
        axes = figure.add_subplot()
        shares = [100 * share for share in cut.shares]
        for k, (a, b) in enumerate(pairwise(cut.bounds)):
            light, dark = HUES[k % len(HUES)]
            style: dict[str, Any] = {
                "color": light,
                "edgecolor": dark,
                "linewidth": 0.6 if every == 1 else 0.0,
            }
            axes.bar(range(a, b), shares[a:b], 0.86, **style)
            axes.axvspan(a - 0.5, b - 0.5, color=light, alpha=0.18, linewidth=0, zorder=0)
            words = _heading(k, sum(shares[a:b]), sum(cut.parameters[a:b]), (b - a) * (width - 1.2) / layers)
            axes.text((a + b - 1) / 2, 1.02, words, **_above(axes, dark))
        rows = _draw_traffic(axes, cut, _BOX_IN * layers / (width - 1.2))
        axes.set_xlim(-0.5, layers - 0.5)
        axes.set_ylim(0, max(shares) / (0.97 - _ROW * rows))
        axes.set_xticks(named, [cut.names[n] for n in named], rotation=90, fontsize=7)
        axes.set_ylabel("estimated cost (% of the model)", color=INK, fontsize=9)
        axes.set_xlabel("layers; boxes: what a micro-batch sends (?: not known yet)", color=INK, fontsize=9)
        dress(axes, grid="y")
        axes.tick_params(axis="x", length=2, labelsize=7)
    return figure


def _heading(stage: int, share: float, parameters: int, width_in: float) -> str:
    """Describe a stage as far as there is room."""
    if width_in < _SHORT_IN:
        return f"{stage}\n{share:.0f} %"
    if width_in < _HEADING_IN:
        return f"{stage}\n{share:.0f} %\n{format_count(parameters)}"
    return f"stage {stage}\n{share:.0f} %\n{format_count(parameters)} parameters"


def _named(cut: Cut, every: int) -> list[int]:
    """Choose the layers to name: the first of each stage, and others far enough from these."""
    named = list(cut.bounds[:-1])
    for n in range(len(cut.names)):
        if all(abs(n - other) >= every for other in named):
            named.append(n)
    return sorted(named)


def _above(axes: Axes, color: str) -> dict[str, Any]:
    transform = axes.get_xaxis_transform()
    return {"transform": transform, "ha": "center", "va": "bottom", "color": color, "fontsize": 8}


def _draw_traffic(axes: Axes, cut: Cut, box: float) -> int:
    """Draw arrows between stages with their bytes, in as few lines as have room; return the number of lines.

    ``box``: width of a number of bytes, in layers.
    """
    last = len(cut.bounds) - 2
    ends = sorted({*cut.traffic, *((k, k + 1) for k in range(last))}, key=lambda e: (e[1] - e[0], e[0]))
    rows: list[list[tuple[int, int]]] = []
    free_from: list[float] = []  # first free place of each line
    for source, to in ends:
        tail, head = cut.bounds[source + 1] - 0.5, cut.bounds[to] - 0.5
        left, right = min(tail, (tail + head - box) / 2), max(head, (tail + head + box) / 2)
        line = next((n for n, end in enumerate(free_from) if left >= end), len(rows))
        if line == len(rows):
            rows.append([])
            free_from.append(0.0)
        rows[line].append((source, to))
        free_from[line] = right
    for height, row in enumerate(rows):
        for source, to in row:
            y = 1 - _ROW * (height + 0.75)
            size = cut.traffic.get((source, to))
            tail, head = cut.bounds[source + 1] - 0.5, cut.bounds[to] - 0.5
            axes.axvline(head, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
            words = "?" if size is None else format_bytes(size)
            where: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "fontsize": 8, "color": INK}
            if to - source > 1:
                arrow = {"arrowstyle": "->", "color": INK, "linewidth": 0.8}
                axes.annotate(
                    "", (head, y), (tail, y), arrowprops=arrow, textcoords=axes.get_xaxis_transform(), **where
                )
            frame = {
                "boxstyle": "round,pad=0.2",
                "facecolor": "white",
                "edgecolor": "#bbbbbb",
                "linewidth": 0.6,
            }
            axes.annotate(
                words, ((tail + head) / 2, y), ha="center", va="center", bbox=frame, zorder=6, **where
            )
    return len(rows)
