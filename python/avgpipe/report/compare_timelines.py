"""What the workers of several systems do in the same stretch of time: a small timeline each, on one scale."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, median_low
from typing import TYPE_CHECKING, Any

from avgpipe.report.compare_curves import COLORS
from avgpipe.timeline.plot import write_figure
from avgpipe.timeline.timeline import COMPUTE_KINDS, Event, Timeline
from avgpipe.units import format_seconds, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _GREY, _PALE = "#333333", "#7d7d7d", 0.62  # share of white in a forward's color
_ROW_IN, _FRAME_IN, _WIDTH_IN = 0.3, 0.5, 12.5  # of a worker's row, and of a panel around them
_BAR = 0.74  # share of a row's height
# The common stretch: two batches of the slowest system, but no fewer than three and no more than ten of the fastest.
_SLOWEST, _FASTEST_LEAST, _FASTEST_MOST = 2.0, 3.0, 10.0


@dataclass(frozen=True)
class _Pace:
    """begins: of each batch's first computation, ascending. per_batch_s: in the steady state, of all pipelines
    together.
    """

    begins: list[float]
    end_s: float
    window: int  # batches that a pace is measured over: whole turns of all pipelines
    per_batch_s: float

    @classmethod
    def of(cls, timeline: Timeline) -> _Pace:
        begins: dict[int, float] = {}
        computed = [event for event in timeline.events if event.kind in COMPUTE_KINDS]
        for event in computed:
            begins[event.batch] = min(event.start_s, begins.get(event.batch, event.start_s))
        ordered, end = sorted(begins.values()), max(event.end_s for event in computed)
        window = max(1, min(len(ordered) - 1, 2 * len({event.pipeline for event in computed})))
        if len(ordered) == 1:
            return cls(ordered, end, window, end - ordered[0])
        steps = [b - a for a, b in zip(ordered, ordered[window:])]
        return cls(ordered, end, window, median(steps) / window)

    def typical(self, span_s: float) -> float:
        """Where a stretch of ``span_s`` begins that runs at the median pace, after the first quarter."""
        first, last = len(self.begins) // 4, len(self.begins) - self.window
        inside = [i for i in range(first, last) if self.begins[i] + span_s <= self.end_s]
        if not inside:
            return max(self.begins[0], self.end_s - span_s)
        steps = {i: self.begins[i + self.window] - self.begins[i] for i in inside}
        middle = median_low(steps.values())
        return self.begins[next(i for i in inside if steps[i] == middle)]


def plot_timelines(
    timelines: Mapping[str, Timeline], heading: str, path: str | os.PathLike[str] | None = None
) -> Figure:
    """A panel for each system that computed something, written to ``path`` if given. Without pyplot: no display.

    All show equally many seconds, from a stretch that ran at the system's median pace.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = {n: t for n, t in timelines.items() if any(e.kind in COMPUTE_KINDS for e in t.events)}
    paces = {name: _Pace.of(timeline) for name, timeline in shown.items()}
    heights = [_FRAME_IN + _ROW_IN * timeline.stages for timeline in shown.values()] or [1.0]
    figure = Figure(figsize=(_WIDTH_IN, 1.3 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(heading, fontsize=10, color=_INK)
    if shown:
        span_s = _span_s(paces)
        panels = figure.subplots(
            len(shown), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for axes, (name, timeline) in zip(panels.flat, shown.items()):
            _draw(axes, timeline, paces[name].typical(span_s), span_s)
            title = f"{name}: {format_seconds(paces[name].per_batch_s)} per batch"
            axes.set_title(title, loc="left", fontsize=9, color=_INK, pad=3)
        panels[-1, 0].set_xlabel(f"time ({time_unit(span_s)[0]}), the same scale for all", color=_INK)
        _legend(figure, max(e.pipeline for t in shown.values() for e in t.events))
    if path is not None:
        write_figure(figure, path, dpi=130)
    return figure


def _span_s(paces: Mapping[str, _Pace]) -> float:
    times = [pace.per_batch_s for pace in paces.values()]
    fastest = min(times)
    span = min(max(_SLOWEST * max(times), _FASTEST_LEAST * fastest), _FASTEST_MOST * fastest)
    return max(span, 1e-9)


def _draw(axes: Axes, timeline: Timeline, begin_s: float, span_s: float) -> None:
    """What each worker computed in the stretch; where nothing is drawn it waited, or did other things."""
    per_s = time_unit(span_s)[1]
    groups: dict[tuple[int, int, str], list[tuple[float, float]]] = defaultdict(list)
    for event in timeline.events:
        if event.kind in COMPUTE_KINDS and event.end_s > begin_s and event.start_s < begin_s + span_s:
            start, end = max(event.start_s, begin_s), min(event.end_s, begin_s + span_s)
            groups[event.stage, event.pipeline, _look(event)].append(
                ((start - begin_s) * per_s, (end - start) * per_s)
            )
    for (stage, pipeline, look), spans in groups.items():
        axes.broken_barh(spans, (stage - _BAR / 2, _BAR), **_style(look, _color(pipeline)))
    axes.set_xlim(0, span_s * per_s)
    axes.set_ylim(timeline.stages - 0.5, -0.5)
    axes.set_yticks(range(timeline.stages), [f"worker {k}" for k in range(timeline.stages)], fontsize=8)
    axes.tick_params(axis="y", length=0, colors=_INK)
    axes.tick_params(axis="x", labelsize=8, colors=_INK)
    axes.grid(axis="x", color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)


def _look(event: Event) -> str:
    return {"F": "forward", "U": "update", "average": "update"}.get(event.kind, "backward")


def _style(look: str, color: str) -> dict[str, Any]:
    from matplotlib.colors import to_rgb

    if look == "update":
        return {"facecolor": _INK, "edgecolor": _INK, "linewidth": 0.6, "zorder": 4}
    if look == "backward":
        return {"facecolor": color, "edgecolor": "white", "linewidth": 0.4, "zorder": 3}
    pale = tuple(c + (1 - c) * _PALE for c in to_rgb(color))
    return {"facecolor": pale, "edgecolor": "white", "linewidth": 0.4, "zorder": 3}


def _color(pipeline: int) -> str:
    return COLORS[pipeline % len(COLORS)]


def _legend(figure: Figure, last_pipeline: int) -> None:
    """What the shades mean, in grey where hues are of several pipelines."""
    from matplotlib.patches import Patch

    shade = _GREY if last_pipeline > 0 else _color(0)
    handles = [Patch(**_style(look, shade), label=look) for look in ("forward", "backward")]
    handles.append(Patch(**_style("update", shade), label="update, averaging"))
    if last_pipeline > 0:
        each = range(last_pipeline + 1)
        handles += [Patch(**_style("backward", _color(i)), label=f"pipeline {i}") for i in each]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
