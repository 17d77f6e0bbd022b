"""Pictures of a record of ``benchmarks.papers.emulated``: seconds per batch, memory per device, utilisation over time.

    python -m benchmarks.papers.draw benchmarks/results/papers-emulated-DATE.json docs/images

Writes papers-batches.png, papers-memory.png, papers-utilisation.png and, where a model has several batch sizes,
papers-batch-sizes.png.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from avgpipe.files import read_json
from avgpipe.timeline.plot import dress, write_figure
from benchmarks.tables.papers import in_several, nearest, published

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Case = dict[str, Any]
Row = dict[str, Any]
_OURS, _OTHER, _SIMULATED, _INK = "#2a6fb0", "#b9b9b9", "#f2c14e", "#333333"
_LINES = ("#2a6fb0", "#c0453c", "#c98a1b", "#7a5aa6", "#3b8c5a", "#888888")
_LONGEST = 6.0  # medians of the rows; longer bars leave the panel
_SHOWN = ("GPipe", "PipeDream", "zero bubble", "AvgPipe (G), best", "AvgPipe (G), 16 bits, best")  # over time
_GIB = 2.0**30


def batches(record: dict[str, Any], path: Path) -> Figure:
    """A panel for each case, a bar for each system; diamonds: simulated."""
    return _bars(
        record, path, lambda row: 1e3 * row["median_s"], "ms per batch", lambda row: 1e3 * row["simulated_s"]
    )


def memory(record: dict[str, Any], path: Path) -> Figure:
    return _bars(record, path, lambda row: row["memory_bytes"] / _GIB, "GiB of the device that needs most")


def utilisation(record: dict[str, Any], path: Path, systems: Sequence[str] = _SHOWN) -> Figure:
    """How busy all devices are while some batches pass, a line for each system; on all devices."""
    cases = [case for case in published(record) if case["devices"].startswith("all")] or published(record)
    figure, panels = _panels([2.2] * len(cases))
    for case, axes in zip(cases, panels):
        rows = {row["system"]: row for row in nearest(case)}
        for system, color in zip((s for s in systems if s in rows), _LINES):
            used = rows[system]["utilisation"]
            bins = len(used["over_time"])
            at = [used["seconds"] * (n + 0.5) / bins for n in range(bins)]
            busy = 100 * statistics.fmean(rows[system]["busy_fraction"])
            axes.plot(
                at,
                [100 * y for y in _smooth(used["over_time"])],
                color=color,
                label=f"{system}: {busy:.0f} %",
            )
        axes.set_ylim(0, 105)
        axes.set_ylabel("% of devices busy", fontsize=8, color=_INK)
        axes.set_xlabel("seconds", fontsize=8, color=_INK)
        axes.legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        _title(axes, case)
    write_figure(figure, path, dpi=130)
    return figure


def batch_sizes(record: dict[str, Any], path: Path) -> Figure | None:
    """Samples per second by batch size, a line for each system; None where no model has several sizes."""
    on_all = [case for case in record["cases"] if case["devices"].startswith("all")]
    models = [
        m for m in dict.fromkeys(c["model"] for c in on_all) if sum(c["model"] == m for c in on_all) > 1
    ]
    if not models:
        return None
    figure, panels = _panels([3.0] * len(models))
    for model, axes in zip(models, panels):
        cases = sorted((c for c in on_all if c["model"] == model), key=lambda case: int(case["batch_size"]))
        found = [{row["system"]: row for row in nearest(case)} for case in cases]
        for n, system in enumerate(in_several(found)):
            points = [
                (c["batch_size"], r[system]["samples_per_second"])
                for c, r in zip(cases, found)
                if system in r
            ]
            style = "--" if n >= len(_LINES) else "-"
            axes.plot(
                *zip(*points), style, marker="o", markersize=3, color=_LINES[n % len(_LINES)], label=system
            )
        sizes = [int(case["batch_size"]) for case in cases]
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("samples of a batch", fontsize=8, color=_INK)
        axes.set_ylabel("samples/s", fontsize=8, color=_INK)
        axes.legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        dress(axes)
        axes.set_title(f"{model}, all devices", loc="left", fontsize=9.5, color=_INK)
    write_figure(figure, path, dpi=130)
    return figure


def _bars(
    record: dict[str, Any],
    path: Path,
    value: Callable[[Row], float],
    unit: str,
    mark: Callable[[Row], float] | None = None,
) -> Figure:
    """A row of panels for each model, a column for each number of devices."""
    cases = {(case["model"], case["devices"]): case for case in published(record)}
    models, devices = (list(dict.fromkeys(found)) for found in zip(*cases))
    most_rows = {m: max(len(nearest(cases[m, d])) for d in devices if (m, d) in cases) for m in models}
    figure, panels = _panels([0.9 + 0.24 * most_rows[model] for model in models], len(devices))
    for place, axes in zip(product(models, devices), panels):
        if place not in cases:
            axes.remove()
            continue
        case = cases[place]
        rows = nearest(case)
        values, places = [value(row) for row in rows], range(len(rows))
        most = _LONGEST * statistics.median(values) if values else 1.0
        right = 1.15 * max([v for v in values if v <= most], default=1.0)
        axes.barh(places, values, height=0.7, color=[_OURS if _is_ours(row) else _OTHER for row in rows])
        if mark is not None:
            axes.scatter(
                [mark(row) for row in rows], places, s=16, marker="D", color=_SIMULATED, edgecolors=_INK
            )
        for at_row, number, row in zip(places, values, rows):
            inside = number <= right
            text = f" {number:,.3g}" if number < 100 else f" {number:,.0f}"
            arrow = "" if inside else " \N{RIGHTWARDS ARROW}"
            end = number if mark is None else max(number, mark(row) + 0.015 * right)
            at, side = (end, "left") if inside else (0.99 * right, "right")
            axes.text(at, at_row, text + arrow, va="center", ha=side, fontsize=8, color=_INK)
        axes.set_yticks(places, [row["system"] for row in rows], fontsize=8, color=_INK)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, right)
        axes.set_xlabel(unit, fontsize=8, color=_INK)
        _title(axes, case)
    write_figure(figure, path, dpi=130)
    return figure


def _panels(heights_in: Sequence[float], columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(3.0 + 6.0 * columns, sum(heights_in) + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    ratios = {"height_ratios": list(heights_in)}
    return figure, list(figure.subplots(len(heights_in), columns, squeeze=False, gridspec_kw=ratios).flat)


def _title(axes: Axes, case: Case) -> None:
    dress(axes)
    title = f"{case['model']}, {case['devices']}, batches of {case['batch_size']}"
    axes.set_title(title, loc="left", fontsize=9.5, color=_INK)


def _is_ours(row: Row) -> bool:
    return bool(row["system"].startswith("AvgPipe"))


def _smooth(values: Sequence[float], over: int = 5) -> list[float]:
    """Means over so many neighbours."""
    half = over // 2
    return [statistics.fmean(values[max(0, n - half) : n + half + 1]) for n in range(len(values))]


def main() -> None:
    record, folder = read_json(sys.argv[1]), Path(sys.argv[2])
    for draw in (batches, memory, utilisation, batch_sizes):
        draw(record, folder / f"papers-{draw.__name__.replace('_', '-')}.png")


if __name__ == "__main__":
    main()
