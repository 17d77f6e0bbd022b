"""The activities of every worker over time: the result of a measured run and of a simulated one."""

from __future__ import annotations

import io
import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from avgpipe.schedule.row import ACTIONS, COMPUTE_KINDS, Event, EventKind

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_RANK: dict[str, int] = {kind: rank for rank, kind in enumerate(EventKind)}
DETAILED = (EventKind.RECEIVE, EventKind.HOST)  # kinds whose details are distinguished


@dataclass(frozen=True)
class Timeline:
    """The events of a run, in any order. Rows are workers, or stages if every worker has one.

    Raises ValueError for events of workers that do not exist or that end before they start.

    Attributes:
        stages: Number of rows.
        peak_memory_bytes: Peak memory per row; None if memory was not recorded.
        labels: Names of the rows if they are not one stage each: workers with several stages, or replicas.
    """

    stages: int
    events: tuple[Event, ...]
    peak_memory_bytes: Sequence[int] | None = None
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if type(self.stages) is not int or self.stages < 1:
            raise ValueError(f"stages={self.stages!r}: must be an int of at least 1")
        for name in ("events", "labels", "peak_memory_bytes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for index, event in enumerate(self.events):
            if not 0 <= event.worker < self.stages:
                row = "stage" if event.worker == event.stage else "worker"
                raise ValueError(f"events[{index}]={event!r}: {row} must be 0..{self.stages - 1}")
            if not (-math.inf < event.start_s <= event.end_s < math.inf):
                raise ValueError(
                    f"events[{index}]={event!r}: must end at a finite time, not before it starts"
                )
        lists = {"labels": self.labels or None, "peak_memory_bytes": self.peak_memory_bytes}
        for name, values in lists.items():
            if values is not None and len(values) != self.stages:
                raise ValueError(f"{name}={values!r}: give one per stage, {self.stages}")

    @property
    def makespan_s(self) -> float:
        """Return the seconds from the first start to the last end; 0.0 without events."""
        if not self.events:
            return 0.0
        return max(event.end_s for event in self.events) - min(event.start_s for event in self.events)

    @property
    def busy_s(self) -> list[float]:
        """Return the seconds of computing (``COMPUTE_KINDS``) per row; work that overlaps counts once."""
        busy = [0.0] * self.stages
        for row, start_s, end_s in computing(self):
            busy[row] += end_s - start_s
        return busy

    @property
    def worker_busy_fraction(self) -> list[float]:
        """Return the computing share of the makespan per row, 0..1; 0.0 without events."""
        makespan = self.makespan_s
        return [min(1.0, busy / makespan) if makespan > 0 else 0.0 for busy in self.busy_s]

    @property
    def bubble_fraction(self) -> float:
        """Return the share of all rows' time without computing, 0..1; 0.0 without events."""
        return 1.0 - sum(self.worker_busy_fraction) / self.stages if self.makespan_s > 0 else 0.0

    def window(self, first_batch: int, last_batch: int) -> Timeline:
        """Return the events of batches ``first_batch`` to ``last_batch``, both included, with unchanged times."""
        return replace(self, events=tuple(e for e in self.events if first_batch <= e.batch <= last_batch))

    def label(self, row: int) -> str:
        return self.labels[row] if self.labels else f"stage {row}"

    def breakdown(self) -> list[StageTime]:
        """Return per row the seconds spent computing, sending, waiting, on the host, and otherwise.

        They add up to the makespan. Every moment counts once: see :class:`EventKind` for overlaps.
        """
        return [_time_of(row, own) for row, own in enumerate(segments(self))]

    # Explanations, pictures and traces are separate modules, which import this one.

    def explain(self) -> str:
        """Explain the time of each worker in a table, the critical path, and the best change in a sentence.

        The table has seconds and percent per worker, in the words of :meth:`breakdown`; "runtime" is the rest
        between events, "outside" the time before a worker's first event and after its last. The critical path
        is the chain of causes from the end of the run back to its start. In a timeline of several stages that
        records neither waits nor the host, as simulated ones do, workers wait whenever they do not compute.
        """
        from avgpipe.timeline.explain import explain

        return explain(self)

    def plot(self, path: str | os.PathLike[str] | None = None, *, batches: int | None = None) -> Figure:
        """Draw a row per worker and a hue per pipeline; also written to ``path`` (.png, .svg) if given.

        Draws the last ``batches`` batches, by default as many as stay readable. Needs no display.
        """
        from avgpipe.timeline.plot import plot_timeline

        return plot_timeline(self, path, batches=batches)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace (JSON) that Perfetto and chrome://tracing open, times to the nanosecond."""
        from avgpipe.timeline.trace import write_trace

        write_trace(self, path)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that shows each action and the time of each worker; it needs no network.

        LibraryNotFound without ``pip install 'avgpipe[report]'``.
        """
        from avgpipe.timeline.html import write_html

        write_html(self, path)

    @classmethod
    def from_chrome_trace(cls, path: str | os.PathLike[str]) -> Timeline:
        """Read a timeline that :meth:`to_chrome_trace` wrote; ValueError names damaged entries."""
        from avgpipe.timeline.trace import read_trace

        return read_trace(path)

    def _repr_png_(self) -> bytes:
        """Show the picture in a notebook."""
        buffer = io.BytesIO()
        self.plot().savefig(buffer, format="png", dpi=90)
        return buffer.getvalue()

    def __repr__(self) -> str:
        rows = "workers" if self.labels else "stages"
        return f"Timeline({rows}={self.stages}, events={len(self.events)}, makespan_s={self.makespan_s:.6g})"

    def __str__(self) -> str:
        """Format a line for the run, and one with the busy share of each row."""
        pipelines, batches = (len({event[field] for event in self.events}) for field in (1, 2))
        return (
            f"timeline: {self.stages} stages, {pipelines} pipelines, {batches} batches, "
            f"{len(self.events)} events, {self.makespan_s:.3f} s, bubbles {100 * self.bubble_fraction:.1f} %\n"
            f"busy: {', '.join(f'{100 * share:.1f} %' for share in self.worker_busy_fraction)}"
        )


# ---- breakdown -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageTime:
    """Seconds that one worker spent; together they are the makespan.

    Attributes:
        stage: The row.
        compute_s: Seconds of computing by kind, for kinds that occurred.
        recv_s: Seconds of waiting by what was awaited, "" if the events do not say.
        host_s: Seconds of host work by what ran.
        other_s: Seconds between its events (the runtime's own time), and in events of other kinds.
        outside_s: Seconds before its first event and after its last.
    """

    stage: int
    compute_s: dict[str, float]
    send_s: float
    recv_s: dict[str, float]
    host_s: dict[str, float]
    other_s: float
    outside_s: float

    @property
    def busy_s(self) -> float:
        """Return the seconds of computing of all kinds."""
        return math.fsum(self.compute_s.values())


class Segment(NamedTuple):
    """A stretch of a row's time and its event; None in a gap."""

    event: Event | None
    start_s: float
    end_s: float


def by_row(timeline: Timeline) -> list[list[Event]]:
    """Return the events of each row, in order of their starts."""
    rows: list[list[Event]] = [[] for _ in range(timeline.stages)]
    for event in sorted(timeline.events, key=lambda event: event.start_s):
        rows[event.worker].append(event)
    return rows


def computing(timeline: Timeline) -> Iterator[tuple[int, float, float]]:
    """Yield the rows, starts and ends of stretches of computing that do not overlap."""
    reached = [-math.inf] * timeline.stages
    computed = (event for event in timeline.events if event.kind in COMPUTE_KINDS)
    for event in sorted(computed, key=lambda event: event[5:7]):
        start_s = max(event.start_s, reached[event.worker])
        if event.end_s > start_s:
            reached[event.worker] = event.end_s
            yield event.worker, start_s, event.end_s


def segments(timeline: Timeline) -> list[list[Segment]]:
    """Divide the time of each row into segments, from the run's first start to its last end."""
    ends = [moment for event in timeline.events for moment in (event.start_s, event.end_s)]
    return [_segments(events, {min(ends), max(ends)}) if ends else [] for events in by_row(timeline)]


def _segments(events: Sequence[Event], ends: set[float]) -> list[Segment]:
    found: list[Segment] = []
    running: list[Event] = []
    begun = 0
    moments = ends.union(*((event.start_s, event.end_s) for event in events))
    for start_s, end_s in pairwise(sorted(moments)):
        while begun < len(events) and events[begun].start_s <= start_s:
            running.append(events[begun])
            begun += 1
        running = [event for event in running if event.end_s > start_s]
        event = min(running, key=lambda event: _RANK.get(event.kind, len(_RANK)), default=None)
        if found and found[-1].event is event:
            start_s = found.pop().start_s
        found.append(Segment(event, start_s, end_s))
    return found


def _time_of(row: int, cut: Sequence[Segment]) -> StageTime:
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for segment in cut:
        event, start_s, end_s = segment
        kind = event.kind if event is not None and event.kind in _RANK else "other"
        if event is None and (segment is cut[0] or segment is cut[-1]):
            kind = "outside"
        detail = event.detail if event is not None and kind in DETAILED else ""
        spent[kind][detail] += end_s - start_s
    return StageTime(
        row,
        compute_s={str(kind): spent[kind][""] for kind in EventKind if kind in COMPUTE_KINDS & spent.keys()},
        send_s=spent[EventKind.SEND][""],
        recv_s=dict(spent[EventKind.RECEIVE]),
        host_s=dict(spent[EventKind.HOST]),
        other_s=spent["other"][""],
        outside_s=spent["outside"][""],
    )


def occupations(events: Iterable[Event], beside: Collection[str]) -> list[Event]:
    """Return each action extended by the events of the kinds ``beside`` that followed: its worker's busy time."""
    found: list[Event] = []
    last: dict[int, int] = {}  # index of each worker's last action
    for event in sorted(events, key=lambda e: e.start_s):
        if event.kind in ACTIONS:
            last[event.worker] = len(found)
            found.append(event)
        elif event.kind in beside and event.worker in last:
            action = found[last[event.worker]]
            found[last[event.worker]] = action._replace(end_s=action.end_s + event.seconds)
    return found
