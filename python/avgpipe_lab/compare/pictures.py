"""The picture of a comparison: what the workers of each system do in the same stretch of time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median, median_low
from typing import TYPE_CHECKING

from avgpipe.report.pictures import WIDTH_IN
from avgpipe.schedule.row import COMPUTE_KINDS, Event
from avgpipe.timeline.plot import INK, View, draw_rows, legend_entries, picture
from avgpipe.timeline.timeline import Timeline
from avgpipe.units import format_seconds, time_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROW_IN, _FRAME_IN = 0.3, 0.5  # of a worker's row, and of a panel around them
# The common stretch: two batches of the slowest system, but between three and ten of the fastest.
_SLOWEST, _FASTEST_LEAST, _FASTEST_MOST = 2.0, 3.0, 10.0


class _BatchRate:
    """The speed of a run, from the times when its batches begin to compute.

    Attributes:
        per_batch_s: Seconds of a batch in the steady state, of all pipelines together: a median over rounds.
    """

    def __init__(self, timeline: Timeline) -> None:
        computed = sorted((e for e in timeline.events if e.kind in COMPUTE_KINDS), key=lambda e: e.start_s)
        begins: dict[int, float] = {}
        for event in computed:
            begins.setdefault(event.batch, event.start_s)
        self._begins, self._end_s = list(begins.values()), max(event.end_s for event in computed)
        turn = max(1, min(len(begins) - 1, 2 * len({event.pipeline for event in computed})))
        # From each batch to the one a round, ``turn`` batches, later.
        self._steps_s = [b - a for a, b in zip(self._begins, self._begins[turn:])]
        self.per_batch_s = median(self._steps_s or [self._end_s - self._begins[0]]) / turn

    def typical(self, span_s: float) -> float:
        """Return where a stretch of ``span_s`` at the median pace begins, after the first quarter."""
        inside = [
            (step_s, begin_s)
            for begin_s, step_s in list(zip(self._begins, self._steps_s))[len(self._begins) // 4 :]
            if begin_s + span_s <= self._end_s
        ]
        if not inside:
            return max(self._begins[0], self._end_s - span_s)
        middle_s = median_low(step_s for step_s, _ in inside)
        return next(begin_s for step_s, begin_s in inside if step_s == middle_s)


def plot_timelines(
    timelines: Mapping[str, Timeline], heading: str, path: str | os.PathLike[str] | None = None
) -> Figure:
    """Draw a panel of computations for each system that has some, written to ``path`` if given.

    All show the same number of seconds, from a stretch at the system's median pace. In empty places a worker
    waited or did other work.
    """
    shown = {n: t for n, t in timelines.items() if any(e.kind in COMPUTE_KINDS for e in t.events)}
    heights = [_FRAME_IN + _ROW_IN * timeline.stages for timeline in shown.values()]
    with picture(path, WIDTH_IN, 1.3 + (sum(heights) or 1.0)) as figure:
        if shown:
            _draw_panels(figure, shown, heights)
        figure.suptitle(heading, fontsize=10, color=INK)
    return figure


def _draw_panels(figure: Figure, timelines: Mapping[str, Timeline], heights: Sequence[float]) -> None:
    paces = {name: _BatchRate(timeline) for name, timeline in timelines.items()}
    times = [pace.per_batch_s for pace in paces.values()]
    span_s = min(max(_SLOWEST * max(times), _FASTEST_LEAST * min(times)), _FASTEST_MOST * min(times))
    span_s = max(span_s, 1e-9)
    ratios = {"height_ratios": heights}
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, gridspec_kw=ratios)
    events: list[Event] = []
    for axes, (name, timeline) in zip(panels.flat, timelines.items()):
        begin_s = paces[name].typical(span_s)
        rows = replace(timeline, labels=tuple(f"worker {k}" for k in range(timeline.stages)))
        view = View.of(rows, begin_s, begin_s + span_s, COMPUTE_KINDS)
        draw_rows(axes, view, begin_s)
        title = f"{name}: {format_seconds(paces[name].per_batch_s)} per batch"
        axes.set_title(title, loc="left", fontsize=9, color=INK, pad=3)
        events += view.timeline.events
    panels[-1, 0].set_xlabel(f"time ({time_unit(span_s)[0]}), the same scale for all", color=INK)
    entries = legend_entries(events, sorted({event.pipeline for event in events}))
    figure.legend(**entries, loc="outside lower center", ncols=len(entries["labels"]))
