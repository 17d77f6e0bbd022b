"""A comparison on the emulated cluster for a reader: a table, and a picture with a bar for each row."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from avgpipe.timeline.plot import write_figure
from avgpipe.units import format_bytes
from benchmarks.common.schedules import is_ours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DATA_PARALLEL = "avgpipe data-parallel"
_SINGLE = ("pipedream", "ea-pipe", "model-parallel")  # batches of one micro-batch
_OURS, _OTHER, _INK = "#2a6fb0", "#b9b9b9", "#333333"
_DROP_IN, _SIMULATED = "#8fb7dd", "#f2c14e"
_LINES = ("#c0453c", "#c98a1b", "#7a5aa6", "#3b8c5a", "#888888")
_WIDTH_IN, _BAR_IN, _FRAME_IN = 9.0, 0.3, 1.7  # of a panel
_LEGEND_IN = 0.45  # below the bars
_LONGEST = 2.5  # medians of the rows; longer bars leave the panel


def table(result: dict[str, Any]) -> Group:
    """Bounds, then rows.

    "over it": measured over simulated time; "as ran": over that with the times that actions took. "of limit": the
    limit over the row's time. "ours is": how many times faster our best pipeline is.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    made.add_column("", no_wrap=True)
    for heading in ("ms/batch", "quartiles", "simulated", "over it", "as ran", "of limit", "ours is"):
        made.add_column(heading, justify="right", no_wrap=True)
    for bound in result["bounds"]:
        made.add_row(bound["name"], f"{bound['seconds'] * 1e3:.1f}", style="dim")
    rows = result["rows"]
    ours = [row["median_s"] for row in rows if is_ours(row) and row["name"] != _DATA_PARALLEL]
    for row in rows:
        simulated = row.get("simulated_s")
        made.add_row(
            row["name"],
            f"{row['median_s'] * 1e3:.1f}",
            f"{row['quartile1_s'] * 1e3:.1f}-{row['quartile3_s'] * 1e3:.1f}",
            "" if simulated is None else f"{simulated * 1e3:.1f}",
            _ratio(row.get("over_simulated")),
            _ratio(row.get("over_simulated_as_measured")),
            f"{result['limit_s'] / row['median_s']:.3f}",
            f"{row['median_s'] / min(ours):.2f}x" if ours and not is_ours(row) else "",
            style="bold" if is_ours(row) else "",
        )
    return Group(Text(title(result), style="bold"), made, Text("\n".join(notes(result))))


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def title(result: dict[str, Any]) -> str:
    s = result["settings"]
    rate = s["rate_bits_per_s"]
    line = "loopback" if rate is None else f"{rate / 1e9:g} Gbit/s a line"
    return (
        f"emulated: K = {s['stages']}, M = {s['micro_batches']}, t_f = {s['forward_s'] * 1e3:g} ms, t_b "
        f"= {s['backward_s'] * 1e3:g} ms, activations {format_bytes(s['activation_bytes'])}, {line}"
    )


def notes(result: dict[str, Any]) -> list[str]:
    s, names = result["settings"], [row["name"] for row in result["rows"]]
    sent = "all that a worker sends shares its line" if s["rate_bits_per_s"] else "nothing travels"
    lines = [
        "Stages take their time and compute nothing; runtime, tensors and links are real.",
        f"Per batch of one pipeline in the steady state: medians of {s['rounds']} rounds of at least {s['batches']} "
        "batches.",
        f"Simulated: {sent}; updates and the host take nothing.",
        "As ran: over the same with actions that take what they took, the host's share included.",
    ]
    if result["line_bytes_per_s"] is not None:
        lines.append(f"A plain 16 MiB send of gloo: {result['line_bytes_per_s'] * 8 / 1e9:.3f} Gbit/s.")
    if single := [name for name in _SINGLE if f"avgpipe {name}" in names]:
        lines.append(f"{', '.join(single)}: a batch is one micro-batch; M of them are a row's batch here.")
    if _DATA_PARALLEL in names:
        lines.append(
            "data-parallel: a worker runs M/K micro-batches through all stages; no activation is sent, and gradients "
            "are too small here for their sum to count."
        )
    return lines + [f"left out: {row['name']}: {row['reason']}" for row in result["unavailable"]]


def plot_schedules(
    results: Sequence[dict[str, Any]], heading: str, path: str | os.PathLike[str] | None = None
) -> Figure:
    """A panel for each result, written to `path` in the format of its suffix. Without pyplot: no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [_FRAME_IN + _BAR_IN * len(result["rows"]) for result in results]
    figure = Figure(figsize=(_WIDTH_IN, sum(heights) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(results), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for result, axes in zip(results, panels.flat):
        _draw(figure, axes, result)
    figure.suptitle(heading, fontsize=10, color=_INK)
    if path is not None:
        write_figure(figure, path, dpi=130)
    return figure


def _draw(figure: Figure, axes: Axes, result: dict[str, Any]) -> None:
    places = range(len(result["rows"]))
    times = [row["median_s"] * 1e3 for row in result["rows"]]
    right = _right([*times, *(bound["seconds"] * 1e3 for bound in result["bounds"])], times)
    axes.barh(places, times, height=0.7, color=[_color(row) for row in result["rows"]])
    for place, row in zip(places, result["rows"]):
        _draw_row(axes, place, row, right)
    simulated = [
        (row.get("simulated_s"), place)
        for place, row in zip(places, result["rows"])
        if row.get("simulated_s")
    ]
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
    for bound, color in zip(result["bounds"], _LINES):
        label = f"{bound['name']}: {bound['seconds'] * 1e3:.0f} ms"
        axes.axvline(
            bound["seconds"] * 1e3, color=color, linewidth=1.2, linestyle="--", zorder=2, label=label
        )
    _frame(figure, axes, result, right)


def _color(row: dict[str, Any]) -> str:
    if is_ours(row):
        return _OURS
    return _DROP_IN if row["name"].endswith("(ours)") else _OTHER


def _right(shown: Sequence[float], times: Sequence[float]) -> float:
    """Where the panel ends: behind the longest bar that is not many times as long as the others."""
    longest = _LONGEST * statistics.median(times) if times else float("inf")
    return 1.12 * max([value for value in shown if value <= longest] or shown)


def _draw_row(axes: Axes, place: int, row: dict[str, Any], right: float) -> None:
    """Its quartiles and its time: behind the bar, or at the panel's end where they leave it."""
    median, slow = row["median_s"] * 1e3, row["quartile3_s"] * 1e3
    inside = max(median, slow) <= right
    text = f"{median:.0f} ms" + (" \N{RIGHTWARDS ARROW}" if median > right else "")
    axes.plot([row["quartile1_s"] * 1e3, slow], [place, place], color=_INK, linewidth=1.0, zorder=3)
    axes.text(
        max(median, slow) if inside else 0.99 * right,
        place,
        f"   {text}" if inside else text,
        va="center",
        ha="left" if inside else "right",
        fontsize=8,
        color=_INK,
        fontweight="bold" if is_ours(row) else "normal",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.85},
        zorder=3,
    )


def _frame(figure: Figure, axes: Axes, result: dict[str, Any], right: float) -> None:
    """Title, axes and legend."""
    from matplotlib.transforms import ScaledTranslation

    rows = len(result["rows"])
    axes.set_title(title(result), loc="left", fontsize=9.5, color=_INK)
    axes.set_yticks(range(rows), [row["name"] for row in result["rows"]], fontsize=8.5, color=_INK)
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
