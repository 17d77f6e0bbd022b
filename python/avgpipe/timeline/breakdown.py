"""Where the time of each stage's worker went, every moment counted once."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from avgpipe.timeline.timeline import Event, Timeline

# Of what overlaps, the first in this order has the moment: a device that computes is not idle, whatever its
# host does meanwhile; and while nothing can run, transfers in the background are what is waited for.
_PRIORITY = ("F", "B", "I", "W", "U", "average", "host", "recv", "send")
_RANK = {kind: rank for rank, kind in enumerate(_PRIORITY)}
_COMPUTE = _PRIORITY[:6]


@dataclass(frozen=True)
class StageTime:
    """Seconds that the worker of ``stage`` spent; all of them together are the makespan.

    ``compute_s`` by kind (those that occurred); ``recv_s`` by what was awaited and ``host_s`` by what ran, "" where
    the events do not say; ``other_s``: between its events, the runtime's own time, and events of other kinds;
    ``outside_s``: before its first event and after its last.
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
        """Seconds of computing of all kinds."""
        return math.fsum(self.compute_s.values())

    @property
    def total_s(self) -> float:
        """The sum of everything: the makespan."""
        parts = (*self.compute_s.values(), *self.recv_s.values(), *self.host_s.values())
        return math.fsum((*parts, self.send_s, self.other_s, self.outside_s))


class Segment(NamedTuple):
    """A stretch of a stage's time and the event that has it; None in a gap."""

    event: Event | None
    start_s: float
    end_s: float


def breakdown(timeline: Timeline) -> list[StageTime]:
    """See :meth:`Timeline.breakdown`."""
    rows, makespan_s = [], timeline.makespan_s
    for stage, own in enumerate(by_stage(timeline)):
        parts: dict[tuple[str, str], list[float]] = {}
        for event, start_s, end_s in segments(own):
            kind = event.kind if event is not None and event.kind in _RANK else "other"
            detail = event.detail if event is not None and kind in ("recv", "host") else ""
            parts.setdefault((kind, detail), []).append(end_s - start_s)
        sums = {key: math.fsum(parts[key]) for key in parts}
        covered_s = math.fsum(sums.values())
        rows.append(
            StageTime(
                stage,
                compute_s={kind: sums[kind, ""] for kind in _COMPUTE if (kind, "") in sums},
                send_s=sums.get(("send", ""), 0.0),
                recv_s={detail: s for (kind, detail), s in sorted(sums.items()) if kind == "recv"},
                host_s={detail: s for (kind, detail), s in sorted(sums.items()) if kind == "host"},
                other_s=sums.get(("other", ""), 0.0),
                outside_s=max(0.0, makespan_s - covered_s),
            )
        )
    return rows


def by_stage(timeline: Timeline) -> list[list[Event]]:
    """The events of each stage, in order of their starts."""
    rows: list[list[Event]] = [[] for _ in range(timeline.stages)]
    for event in timeline.events:
        rows[event.stage].append(event)
    for row in rows:
        row.sort(key=lambda event: event.start_s)
    return rows


def segments(events: Sequence[Event]) -> list[Segment]:
    """Cuts the time from the first start to the last end of one stage's ``events``, which are sorted by start."""
    found: list[Segment] = []
    running: list[tuple[int, int]] = []  # heap of (rank, index); what ended leaves when it comes to the top
    begun = 0
    for start_s, end_s in pairwise(_moments(events)):
        while begun < len(events) and events[begun].start_s <= start_s:
            heapq.heappush(running, (_RANK.get(events[begun].kind, len(_RANK)), begun))
            begun += 1
        while running and events[running[0][1]].end_s <= start_s:
            heapq.heappop(running)
        event = events[running[0][1]] if running else None
        if found and found[-1].event is event:
            start_s = found.pop().start_s
        found.append(Segment(event, start_s, end_s))
    return found


def _moments(events: Iterable[Event]) -> list[float]:
    return sorted({moment for event in events for moment in (event.start_s, event.end_s)})
