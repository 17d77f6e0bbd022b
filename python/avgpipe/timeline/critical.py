"""The chain of causes that decided how long a run took.

Walked back from the run's end: what a worker did before is the cause as long as it did something; where it waited
for a message, the cause is the transfer back to the moment when the sender had computed it, and before that moment
whatever the sender did. So every moment of the run has one cause, and making a cause faster can save at most
its seconds here: what happens beside the chain is hidden by it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from avgpipe.timeline.breakdown import Segment, by_stage, segments
from avgpipe.timeline.timeline import COMPUTE_KINDS, Event, Timeline


class Cause(NamedTuple):
    """What a moment of the chain was spent on, at which stage.

    ``what``: "compute" (``detail``: the kind), "transfer" (``stage`` receives; ``detail`` "F": an activation from
    the stage before, "B": a gradient from the one after), "wait" (for something whose sender is not known), "send",
    "host" (``detail``: the event's) or "runtime" (between events).
    """

    what: str
    stage: int
    detail: str = ""


Messages = dict[tuple[int, int, int, int | None, str], Event]


def messages_of(timeline: Timeline) -> Messages:
    """What computed each message: by (stage, pipeline, batch, micro-batch, "F" or "B") of its sender."""
    return {
        (*event[:4], "F" if event.kind == "F" else "B"): event
        for event in timeline.events
        if event.kind in ("F", "B", "I") and not event.detail
    }


def sender_of(wait: Event, messages: Messages) -> Event | None:
    """What computed the message that ended a wait; None where that is not known, or began only after the wait."""
    stage = {"F": wait.stage - 1, "B": wait.stage + 1}.get(wait.detail)
    if stage is None:
        return None
    sender = messages.get((stage, wait.pipeline, wait.batch, wait.micro_batch, wait.detail))
    return sender if sender is not None and sender.start_s < wait.end_s else None


def critical_path(timeline: Timeline) -> dict[Cause, float]:
    """Seconds per cause; together the makespan."""
    causes: dict[Cause, float] = defaultdict(float)
    if not timeline.events:
        return {}
    messages = messages_of(timeline)
    stages = [segments(row) for row in by_stage(timeline)]
    starts = [[segment.start_s for segment in row] for row in stages]
    begin_s = min(event.start_s for event in timeline.events)
    last = max(timeline.events, key=lambda event: event.end_s)
    stage, now_s = last.stage, last.end_s
    while now_s > begin_s:
        at = bisect_left(starts[stage], now_s) - 1
        if at < 0:  # before the worker's first event
            causes[Cause("runtime", stage)] += now_s - begin_s
            break
        stage, now_s = _step(stages[stage][at], stage, now_s, messages, causes)
    return dict(causes)


def _step(
    segment: Segment, stage: int, now_s: float, messages: Messages, causes: dict[Cause, float]
) -> tuple[int, float]:
    """One step back from ``now_s`` within or after ``segment``: where the chain goes on, and when."""
    event, start_s = segment.event, segment.start_s
    if event is None or segment.end_s < now_s:  # a gap, or after the stage's last event
        began_s = start_s if event is None else segment.end_s
        causes[Cause("runtime", stage)] += now_s - began_s
        return stage, began_s
    if event.kind != "recv":
        causes[_cause(event)] += now_s - start_s
        return stage, start_s
    sender = sender_of(event, messages)
    if sender is None or sender.start_s >= now_s:
        causes[Cause("wait", stage, event.detail)] += now_s - start_s
        return stage, start_s
    # Where clocks differ a little, a message comes before it was computed. The chain still gets shorter: at
    # now_s, its sender is computing.
    ready_s = min(sender.end_s, now_s)
    causes[Cause("transfer", stage, event.detail)] += now_s - max(start_s, ready_s)
    return (stage, start_s) if ready_s <= start_s else (sender.stage, ready_s)


def _cause(event: Event) -> Cause:
    if event.kind in COMPUTE_KINDS:
        return Cause("compute", event.stage, event.kind)
    if event.kind == "send":
        return Cause("send", event.stage)
    # Words of others are the host's work, as far as anyone can tell.
    return Cause("host", event.stage, event.detail if event.kind == "host" else event.kind)


def with_waits(timeline: Timeline) -> Timeline:
    """A timeline of several stages that records neither waits nor the host, as simulated ones do, with its waits.

    There a worker waits whenever it does not compute, for what its next computation needs. Others are
    returned as they are.
    """
    if timeline.stages == 1 or any(event.kind in ("recv", "host") for event in timeline.events):
        return timeline
    begin_s = min((event.start_s for event in timeline.events), default=0.0)
    waits = []
    for row in by_stage(timeline):
        waits += _gaps([event for event in row if event.kind in COMPUTE_KINDS], begin_s)
    return replace(timeline, events=(*timeline.events, *waits))


def _gaps(work: Sequence[Event], reached_s: float) -> list[Event]:
    waits = []
    for event in work:
        if event.start_s > reached_s:
            detail = "B" if event.kind == "I" else event.kind
            waits.append(event._replace(kind="recv", start_s=reached_s, end_s=event.start_s, detail=detail))
        reached_s = max(reached_s, event.end_s)
    return waits
