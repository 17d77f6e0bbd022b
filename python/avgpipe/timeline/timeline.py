"""What every stage did when: the result of a measured run and of a simulated one."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from avgpipe.timeline.breakdown import StageTime

COMPUTE_KINDS = frozenset({"F", "B", "I", "W", "U", "average"})


class Event(NamedTuple):
    """Something a stage did for a pipeline; times in seconds on a clock common to all stages.

    ``kind`` is an action's (F, B, I, W, U), "average" (elastic averaging), "recv" (nothing could run until a
    message came; its place is that of the action that the message let run), "send" (handing tensors to a link),
    "host" (other work of the host) or any other word; ``micro_batch`` is None where there is none, as for U.
    ``detail`` says of "recv" what was awaited ("F": an activation, "B": a gradient, or any other word), of
    "host" what ran ("loader", "caller" or any other word), and of an action, where workers have several stages and
    ``stage`` is the worker, which stage's it is ("stage 2"); who computes what for whom is then not looked up.
    """

    stage: int
    pipeline: int
    batch: int
    micro_batch: int | None
    kind: str
    start_s: float
    end_s: float
    detail: str = ""

    def __str__(self) -> str:
        return self.kind if self.micro_batch is None else f"{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Timeline:
    """The events of a run on ``stages`` stages, in any order.

    ``peak_memory_bytes`` has an entry per stage, or is None where memory was not watched. ``labels`` name the rows
    where they are not one stage each: workers with several stages, or replicas. Raises ValueError for events of stages
    that do not exist or that end before they start.
    """

    stages: int
    events: tuple[Event, ...]
    peak_memory_bytes: list[int] | None = None
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if type(self.stages) is not int or self.stages < 1:
            raise ValueError(f"stages={self.stages!r}: must be an int of at least 1")
        object.__setattr__(self, "events", tuple(self.events))
        for index, event in enumerate(self.events):
            if not 0 <= event.stage < self.stages:
                raise ValueError(f"events[{index}]={event!r}: stage must be 0..{self.stages - 1}")
            if not (
                math.isfinite(event.start_s) and math.isfinite(event.end_s) and event.start_s <= event.end_s
            ):
                raise ValueError(
                    f"events[{index}]={event!r}: must end at a finite time, not before it starts"
                )
        object.__setattr__(self, "labels", tuple(self.labels))
        if self.labels and len(self.labels) != self.stages:
            raise ValueError(f"labels={self.labels!r}: give one per stage, {self.stages}")
        if self.peak_memory_bytes is not None:
            object.__setattr__(self, "peak_memory_bytes", list(self.peak_memory_bytes))
            if len(self.peak_memory_bytes) != self.stages:
                raise ValueError(
                    f"peak_memory_bytes={self.peak_memory_bytes!r}: give one per stage, {self.stages}"
                )

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end; 0.0 without events."""
        if not self.events:
            return 0.0
        return max(event.end_s for event in self.events) - min(event.start_s for event in self.events)

    @property
    def busy_s(self) -> list[float]:
        """Per stage, the seconds in which it computed (``COMPUTE_KINDS``); work that overlaps counts once."""
        spans: list[list[tuple[float, float]]] = [[] for _ in range(self.stages)]
        for event in self.events:
            if event.kind in COMPUTE_KINDS:
                spans[event.stage].append((event.start_s, event.end_s))
        return [_covered_s(stage) for stage in spans]

    @property
    def worker_busy_fraction(self) -> list[float]:
        """Per stage, the computing share of the makespan, 0..1; 0.0 without events."""
        makespan = self.makespan_s
        return [min(1.0, busy / makespan) if makespan > 0 else 0.0 for busy in self.busy_s]

    @property
    def bubble_fraction(self) -> float:
        """The share of all stages' time in which they did not compute, 0..1; 0.0 without events."""
        return 1.0 - sum(self.worker_busy_fraction) / self.stages if self.makespan_s > 0 else 0.0

    def window(self, first_batch: int, last_batch: int) -> Timeline:
        """The events of batches ``first_batch`` to ``last_batch``, both included, their times unchanged."""
        inside = tuple(event for event in self.events if first_batch <= event.batch <= last_batch)
        return replace(self, events=inside)

    def label(self, stage: int) -> str:
        return self.labels[stage] if self.labels else f"stage {stage}"

    def breakdown(self) -> list[StageTime]:
        """Per stage, the seconds spent computing, sending, waiting, on the host, and otherwise: the makespan.

        Of events that overlap the first of these has the moment: F, B, I, W, U, average, host, recv, send, others.
        """
        from avgpipe.timeline.breakdown import breakdown

        return breakdown(self)

    def explain(self) -> str:
        """Where each worker's time went, in a table; what decided how long it took; a sentence on what to change.

        The table has seconds and percent per worker, in the words of :meth:`breakdown`; "runtime" is what is
        left between events, "outside" what lies before a worker's first event and after its last. The critical
        path is the chain of causes from the end of the run back to its begin. A timeline of several stages that
        records neither waits nor the host, as simulated ones do, waits wherever it does not compute.
        """
        from avgpipe.timeline.explain import explain

        return explain(self)

    def plot(self, path: str | os.PathLike[str] | None = None, *, batches: int | None = None) -> Figure:
        """A picture with a row per stage, a hue per pipeline; also written to ``path`` (.png, .svg) if given.

        Draws the last ``batches`` batches, by default as many as stay readable. Needs no display.
        """
        from avgpipe.timeline.plot import plot_timeline

        return plot_timeline(self, path, batches=batches)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace (JSON) that Perfetto and chrome://tracing open, times to the nanosecond."""
        from avgpipe.timeline.trace import write_trace

        write_trace(self, path)

    @classmethod
    def from_chrome_trace(cls, path: str | os.PathLike[str]) -> Timeline:
        """The timeline that :meth:`to_chrome_trace` wrote; ValueError names what is damaged."""
        from avgpipe.timeline.trace import read_trace

        return read_trace(path)

    def __str__(self) -> str:
        """A line for the run and one per stage."""
        pipelines = len({event.pipeline for event in self.events})
        batches = len({event.batch for event in self.events})
        lines = [
            f"timeline: {self.stages} stages, {pipelines} pipelines, {batches} batches, "
            f"{len(self.events)} events, {self.makespan_s:.3f} s, bubbles {100 * self.bubble_fraction:.1f} %",
            "stage     busy    busy s    recv s      F ms      B ms  peak MiB",
        ]
        shares, busy = self.worker_busy_fraction, self.busy_s
        for k in range(self.stages):
            own = [event for event in self.events if event.stage == k]
            recv_s = sum(event.end_s - event.start_s for event in own if event.kind == "recv")
            memory = "-" if self.peak_memory_bytes is None else f"{self.peak_memory_bytes[k] / 2**20:.1f}"
            lines.append(
                f"{k:>5}  {100 * shares[k]:>5.1f} %  {busy[k]:>8.3f}  {recv_s:>8.3f}  "
                f"{_mean_ms(own, 'F'):>8}  {_mean_ms(own, 'B'):>8}  {memory:>8}"
            )
        return "\n".join(lines)


def _covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    covered, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        if end > reached:
            covered += end - max(start, reached)
            reached = end
    return covered


def _mean_ms(events: Sequence[Event], kind: str) -> str:
    """The mean duration of the events of a kind, in milliseconds, or a dash."""
    times = [event.end_s - event.start_s for event in events if event.kind == kind]
    return f"{1000 * sum(times) / len(times):.3f}" if times else "-"
