"""Pictures with matplotlib: figures as files, and timelines with a row per worker and a hue per pipeline."""

from __future__ import annotations

import io
import math
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from avgpipe.files import write_atomically
from avgpipe.schedule.row import COMPUTE_KINDS, Event, EventKind
from avgpipe.timeline.timeline import Timeline
from avgpipe.units import time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Light and dark of each pipeline's hue, distinguishable also for red-green color-blind readers.
HUES = (
    ("#b5d4f0", "#2a6fb0"),  # blue
    ("#fcd9a4", "#d9780f"),  # orange
    ("#b0e0cc", "#1b8a63"),  # green
    ("#e8c6e3", "#a04a94"),  # purple
    ("#f5c9c5", "#c0453c"),  # red
    ("#d8d0c1", "#7c6a4c"),  # brown
)
INK, GREYS = "#333333", ("#d6d6d6", "#7d7d7d")
_ENTRY_IN, _LETTER_IN = 0.55, 0.062  # in the legend: an entry's patch and spaces, a letter of its words
_READABLE = 90  # most compute events in the fullest row; more become too narrow
_WIDTH_IN, _BAR, _STRIP = 13.0, 0.66, 0.09  # inches; shares of a row's height
_BAND = 0.45  # share of a bar's height: waiting is thinner than work
_DIGIT_IN, _MARGIN_IN = 0.065, 0.05  # of a label


# ---- figures as files ----------------------------------------------------------------------------------------


@contextmanager
def picture(
    path: str | os.PathLike[str] | None, width_in: float, height_in: float, *, dpi: int = 130
) -> Iterator[Figure]:
    """Make a figure, written to ``path`` afterwards if given. Without pyplot: no global state or display."""
    from matplotlib.figure import Figure

    if path is not None:
        check_format(f"path={os.fspath(path)!r}", path)
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    yield figure
    if path is not None:
        write_figure(figure, path, dpi=dpi)


def check_format(argument: str, path: str | os.PathLike[str]) -> None:
    """Raise a ValueError that begins with ``argument`` unless ``path`` has a picture's suffix (none means .png)."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if _suffix(path) not in known:
        raise ValueError(f"{argument}: no picture format, end it in one of .{', .'.join(sorted(known))}")


def check_picture(path: str | os.PathLike[str]) -> None:
    """Refuse a ``--plot`` that is no picture or cannot be written, before minutes of measuring; ValueError."""
    option, folder = f"--plot {os.fspath(path)}", Path(path).absolute().parent
    check_format(option, path)
    if not folder.is_dir():
        raise ValueError(f"{option}: {folder} is no folder, make it first")
    if Path(path).is_dir() or not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise ValueError(f"{option}: cannot be written, name a file in a folder that you may write to")


def write_figure(figure: Figure, path: str | os.PathLike[str], *, dpi: int) -> None:
    """Write a figure in the format of the suffix, atomically."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=_suffix(path), dpi=dpi)
    write_atomically(path, buffer.getvalue())


def dress(axes: Axes, *, without: Sequence[str] = ("top", "right"), grid: str = "both") -> None:
    """Reduce the frame and grid of axes to the needed lines."""
    axes.grid(axis=grid, color="#ececec", linewidth=0.8)  # type: ignore[arg-type]  # a plain str
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8)
    for side in without:
        axes.spines[side].set_visible(False)


def _suffix(path: str | os.PathLike[str]) -> str:
    return Path(path).suffix[1:].lower() or "png"


# ---- a timeline ----------------------------------------------------------------------------------------------


def plot_timeline(
    timeline: Timeline, path: str | os.PathLike[str] | None = None, *, batches: int | None = None
) -> Figure:
    """Draw the figure; see :meth:`Timeline.plot`."""
    if batches is not None and (type(batches) is not int or batches < 1):
        raise ValueError(
            f"batches={batches!r}: must be an int of at least 1, or None for as many as are readable"
        )
    seen, shown = _last(timeline, batches or _readable(timeline))
    pipelines = sorted({event.pipeline for event in timeline.events})
    total = len({event.batch for event in timeline.events})
    which = f"batches: {total}" if shown == total else f"last {shown} of {total} batches"
    bubbles = f"bubbles: {100 * seen.timeline.bubble_fraction:.1f} %"
    with picture(path, _WIDTH_IN, 1.5 + 0.6 * timeline.stages, dpi=150) as figure:
        axes = figure.add_subplot()
        origin_s = min((event.start_s for event in timeline.events), default=0.0)
        unit = draw_rows(axes, seen, origin_s, labelled=True)
        axes.set_xlabel(f"time since the first event ({unit})", color=INK)
        beside: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "annotation_clip": False}
        for k, share in enumerate(seen.timeline.worker_busy_fraction):
            words = f"busy {100 * share:.0f} %"
            axes.annotate(words, (1.008, k), fontsize=8, color=INK, va="center", **beside)
        entries = legend_entries(seen.timeline.events, pipelines)
        names = entries["labels"]
        lines = math.ceil(sum(_ENTRY_IN + _LETTER_IN * len(name) for name in names) / (_WIDTH_IN - 1.8))
        if names:
            above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.0}
            columns = math.ceil(len(names) / lines)
            axes.legend(**entries, **above, ncols=columns, handlelength=2.2, columnspacing=1.4)
        title = f"stages: {timeline.stages}   pipelines: {len(pipelines)}   {which}   {bubbles}"
        axes.set_title(title, loc="left", pad=12 + 14 * lines, fontsize=10, color=INK)
    return figure


class View(NamedTuple):
    """The drawn stretch of a timeline: its events, and the clock at its ends."""

    timeline: Timeline
    start_s: float
    end_s: float

    @classmethod
    def of(cls, timeline: Timeline, start_s: float, end_s: float, kinds: Collection[str] = ()) -> View:
        """Return the events of the stretch, cut at its ends; only of ``kinds``, if any are given."""
        seen = tuple(
            e._replace(start_s=max(e.start_s, start_s), end_s=min(e.end_s, end_s))
            for e in timeline.events
            if e.end_s > start_s and e.start_s < end_s and (not kinds or e.kind in kinds)
        )
        return cls(replace(timeline, events=seen), start_s, end_s)


def readable_view(timeline: Timeline) -> tuple[float, float]:
    """Return the clock at the ends of the last batches that stay readable."""
    view, _ = _last(timeline, _readable(timeline))
    return view.start_s, view.end_s


def _readable(timeline: Timeline) -> int:
    """Return how many of the last batches have at most ``_READABLE`` computations in the fullest row; at least one."""
    computed = [event for event in timeline.events if event.kind in COMPUTE_KINDS]
    begins: dict[int, float] = {}
    for event in computed:
        begins[event.batch] = min(event.start_s, begins.get(event.batch, event.start_s))
    rows = [sorted(event.end_s for event in computed if event.worker == k) for k in range(timeline.stages)]
    froms = accumulate((begins[batch] for batch in sorted(begins, reverse=True)), min)
    crowds = [max(len(ends) - bisect_right(ends, from_s) for ends in rows) for from_s in froms]
    return max(1, sum(crowd <= _READABLE for crowd in crowds))


def _last(timeline: Timeline, batches: int) -> tuple[View, int]:
    """Return the view from the first computation of the last batches to the end, and the number of these batches."""
    if not timeline.events:
        return View(timeline, 0.0, 1.0), 0
    chosen = sorted({event.batch for event in timeline.events})[-batches:]
    ours = [event for event in timeline.events if event.batch >= chosen[0]]
    start = min(event.start_s for event in [e for e in ours if e.kind in COMPUTE_KINDS] or ours)
    end = max(event.end_s for event in timeline.events)
    return View.of(timeline, start, max(end, start + 1e-9)), len(chosen)


def _hue(pipeline: int) -> tuple[str, str]:
    return HUES[pipeline % len(HUES)]


def draw_rows(axes: Axes, view: View, origin_s: float, *, labelled: bool = False) -> str:
    """Draw a bar for each event, rows from worker 0 down; return the unit of the axis.

    Args:
        axes: Where to draw.
        view: What to draw.
        origin_s: The clock at 0 of the axis.
        labelled: Whether bars carry the numbers of micro-batches where there is room.
    """
    unit, per_s = time_unit(view.end_s - view.start_s)
    rows = range(view.timeline.stages)
    lanes = lanes_of(view.timeline)
    needed_s = _label_s(view) if labelled else {}
    groups: dict[tuple[float, float, int | None, Look], list[tuple[float, float]]] = defaultdict(list)
    for event in view.timeline.events:
        # The pipeline of a wait, or of host work, does not change its hue.
        hue = None if event.kind in (EventKind.RECEIVE, EventKind.HOST) else event.pipeline
        left, width = (event.start_s - origin_s) * per_s, event.seconds * per_s
        bottom, height = _place(event, lanes)
        groups[bottom, height, hue, look_of(event)].append((left, width))
        if event.seconds >= needed_s.get(event.kind, math.inf) and event.micro_batch is not None:
            color = INK if event.kind == EventKind.FORWARD else "white"
            centre: dict[str, Any] = {"ha": "center", "va": "center"}
            at = left + width / 2, bottom + height / 2
            axes.text(*at, str(event.micro_batch), fontsize=7, color=color, zorder=5, **centre)
    for (bottom, height, hue, look), spans in groups.items():
        axes.broken_barh(spans, (bottom, height), **_style(look, GREYS if hue is None else _hue(hue)))
    dress(axes, without=("top", "left", "right"), grid="x")
    axes.set_xlim((view.start_s - origin_s) * per_s, (view.end_s - origin_s) * per_s)
    axes.set_ylim(len(rows) - 0.45, -0.5)
    axes.set_yticks(rows, [view.timeline.label(k) for k in rows])
    axes.tick_params(axis="y", length=0)
    return unit


def lanes_of(timeline: Timeline) -> list[int]:
    """Return the pipelines if some compute at once on a worker for longer than clock resolution explains; else none."""
    pipelines = sorted({event.pipeline for event in timeline.events})
    alone = [
        replace(timeline, events=tuple(e for e in timeline.events if e.pipeline == i)) for i in pipelines
    ]
    grain_s = 1e-6 * len(timeline.events)
    return pipelines if sum(sum(own.busy_s) for own in alone) > sum(timeline.busy_s) + grain_s else []


def _place(event: Event, lanes: Sequence[int]) -> tuple[float, float]:
    """Return bottom and height of an event's bar; rows have height 1 around the worker's number."""
    top = event.worker - _BAR / 2
    if event.kind == EventKind.HOST:  # of the worker's thread, for any pipeline
        return top, _BAR
    if event.kind != EventKind.RECEIVE and event.kind not in COMPUTE_KINDS:
        return event.worker + _BAR / 2 + 0.02, _STRIP
    height = _BAR / max(1, len(lanes))
    bottom = top + (lanes.index(event.pipeline) * height if lanes else 0.0)
    if event.kind == EventKind.RECEIVE:
        return bottom + height * (1 - _BAND) / 2, height * _BAND
    return bottom, height


# The look of an event, by its kind and, for waits and the host, the detail if it has its own look: words and
# style. "light" and "dark" are the pipeline's; waiting is drawn lowest, then the host, so that another
# pipeline's work covers them; edges in the strip keep short events visible.
Look = tuple[str, str]
_Style = dict[str, Any]
_WORK: _Style = {"facecolor": "dark", "edgecolor": "white", "linewidth": 0.4, "zorder": 3}
_WAIT: _Style = {"facecolor": "#f4f4f4", "edgecolor": "#cfcfcf", "linewidth": 0.0, "zorder": 1}
_HOST: _Style = {"facecolor": "#f6efc4", "edgecolor": "#a8974a", "linewidth": 0.4, "zorder": 2}
_BELOW: _Style = {"facecolor": "dark", "edgecolor": "dark", "linewidth": 0.7, "zorder": 3}
_LOOKS: dict[Look, tuple[str, _Style]] = {
    ("F", ""): ("forward", {**_WORK, "facecolor": "light"}),
    ("B", ""): ("backward", _WORK),
    ("I", ""): ("backward, inputs", _WORK),
    ("W", ""): ("backward, weights", {**_WORK, "alpha": 0.6}),
    ("U", ""): ("update", {"facecolor": "white", "edgecolor": "dark", "linewidth": 1.1, "zorder": 4}),
    ("average", ""): ("averaging", {**_WORK, "hatch": "xxxx", "zorder": 4}),
    ("recv", "F"): ("waiting for an activation", {**_WAIT, "hatch": "////"}),
    ("recv", "B"): ("waiting for a gradient", {**_WAIT, "hatch": 4 * chr(92)}),
    ("recv", ""): ("waiting", _WAIT),
    ("host", "loader"): ("data loader", {**_HOST, "hatch": "...."}),
    ("host", "caller"): ("between results", {**_HOST, "facecolor": "#e6d67e"}),
    ("host", ""): ("host", _HOST),
    ("send", ""): ("sending (below)", _BELOW),
}


def look_of(event: Event) -> Look:
    """Return the kind, and the detail if it changes the look."""
    return (event.kind, event.detail) if (event.kind, event.detail) in _LOOKS else (event.kind, "")


def word_of(look: Look) -> str:
    """Return the words for a look; an unknown kind is its own word."""
    return _LOOKS[look][0] if look in _LOOKS else look[0]


def _style(look: Look, hue: tuple[str, str]) -> _Style:
    style = _LOOKS[look][1] if look in _LOOKS else _BELOW
    shades = dict(zip(("light", "dark"), hue))
    return {name: shades.get(value, value) for name, value in style.items()}


def _label_s(view: View) -> dict[str, float]:
    """Return the kinds whose bars carry numbers, with the seconds that a number needs: most bars must have room."""
    seconds: dict[str, list[float]] = defaultdict(list)
    digits = 1
    for event in view.timeline.events:
        if event.kind in COMPUTE_KINDS and event.micro_batch is not None:
            seconds[event.kind].append(event.seconds)
            digits = max(digits, len(str(event.micro_batch)))
    needed_s = (_MARGIN_IN + _DIGIT_IN * digits) * (view.end_s - view.start_s) / (_WIDTH_IN - 1.8)
    return {kind: needed_s for kind, spans in seconds.items() if median(spans) >= needed_s}


def legend_entries(events: Iterable[Event], pipelines: Iterable[int]) -> dict[str, Any]:
    """Return the arguments of a legend: light and dark of each pipeline, then the meaning of shapes, in grey."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    seen = {look_of(event) for event in events}
    looks = [*filter(seen.__contains__, _LOOKS), *sorted(seen - _LOOKS.keys())]
    hues = {f"pipeline {i}": tuple(Patch(facecolor=color) for color in _hue(i)) for i in pipelines}
    return {
        "handles": [*hues.values(), *(Patch(**_style(look, GREYS)) for look in looks)],
        "labels": [*hues, *map(word_of, looks)],
        "handler_map": {tuple: HandlerTuple(ndivide=None, pad=0.0)},
        "frameon": False,
        "fontsize": 8,
    }
