"""The time of each worker by activity, the critical path, and the one change with the largest gain."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

from avgpipe.schedule.row import COMPUTE_KINDS, Event, EventKind
from avgpipe.timeline.timeline import DETAILED, StageTime, Timeline, by_row, segments
from avgpipe.units import format_seconds, time_unit

BUSY = 0.9  # computing share of every worker's time that schedules of real runs seldom exceed
WORTH = 0.03  # least gain, as a share of the time: smaller ones are within the noise between runs
IMBALANCE = 1.1  # slowest stage over the mean: layers are seldom small enough to even out less
OVERHEAD = 0.1  # share of the computing time per action: below it, fewer actions lose more overlap
ONE_AT_A_TIME = 0.99  # share of computing without overlap: stages in separate processes overlap more
LATER_PIPELINE = 0.5  # each pipeline after the second fills fewer of the gaps


# ---- the critical path ---------------------------------------------------------------------------------------
# The chain of causes that decided how long a run took, walked back from the run's end. While a worker did
# something, that is the cause; if it waited for a message, the cause is the transfer, back to the moment when
# the sender had computed it, and before that moment the work of the sender. So every moment of the run has
# one cause, and making a cause faster can save at most its seconds here: the chain hides what happens beside
# it.


class Cause(NamedTuple):
    """The activity of a moment of the chain, and its stage.

    ``what``: an :class:`EventKind` (``detail``: of waits for unknown senders, and of the host), "transfer"
    (``stage`` receives; ``detail`` "F": an activation from the stage before, "B": a gradient from the one
    after) or "runtime" (between events).
    """

    what: str
    stage: int
    detail: str = ""


def messages_of(timeline: Timeline) -> dict[tuple[Any, ...], Event]:
    """Return the computation of each message, by (stage, pipeline, batch, micro-batch, "F" or "B") of its sender.

    Empty if workers are not one stage each, where senders are not looked up.
    """
    if any(event.worker != event.stage for event in timeline.events):
        return {}
    return {
        (*event[:4], "F" if event.kind == EventKind.FORWARD else "B"): event
        for event in timeline.events
        if event.kind in (EventKind.FORWARD, EventKind.BACKWARD, EventKind.BACKWARD_INPUT)
        and not event.detail  # earlier versions put the stage here, for a worker with several
    }


def sender_of(event: Event, messages: Mapping[tuple[Any, ...], Event]) -> Event | None:
    """Return the computation of the awaited message; None if it is unknown, or began only after the wait."""
    stage = {"F": event.stage - 1, "B": event.stage + 1}.get(event.detail)
    if event.kind != EventKind.RECEIVE or stage is None:
        return None
    sender = messages.get((stage, *event[1:4], event.detail))
    return sender if sender is not None and sender.start_s < event.end_s else None


def critical_path(timeline: Timeline) -> dict[Cause, float]:
    """Return the seconds per cause; together they are the makespan."""
    causes: dict[Cause, float] = defaultdict(float)
    if not timeline.events:
        return causes
    messages = messages_of(timeline)
    rows = segments(timeline)
    last = max(timeline.events, key=lambda event: event.end_s)
    row, now_s = last.worker, last.end_s
    while at := bisect_left(rows[row], now_s, key=lambda segment: segment.start_s):
        event, began_s, _ = rows[row][at - 1]
        follow = row
        if event is None:
            cause = Cause("runtime", row)
        elif (sender := sender_of(event, messages)) is None or sender.start_s >= now_s:
            # Unknown details count as work of the host.
            known = event.kind in tuple(EventKind)
            detail = event.detail if event.kind in DETAILED else "" if known else event.kind
            cause = Cause(event.kind if known else EventKind.HOST, row, detail)
        else:
            # If clocks differ a little, a message arrives before it was computed. The chain still gets
            # shorter: at now_s, its sender is computing.
            ready_s = min(sender.end_s, now_s)
            if ready_s > began_s:
                follow, began_s = sender.worker, ready_s
            cause = Cause("transfer", row, event.detail)
        causes[cause] += now_s - began_s
        row, now_s = follow, began_s
    return causes


def with_waits(timeline: Timeline) -> Timeline:
    """Add waits to a timeline of several stages that records neither waits nor the host, as simulated ones do.

    In it a worker waits whenever it does not compute, for the input of its next computation. Other timelines
    are returned unchanged.
    """
    if timeline.stages == 1 or any(event.kind in DETAILED for event in timeline.events):
        return timeline
    begin_s = min((event.start_s for event in timeline.events), default=0.0)
    waits = []
    for row in by_row(timeline):
        reached_s = begin_s
        for event in (event for event in row if event.kind in COMPUTE_KINDS):
            if event.start_s > reached_s:
                awaited = "B" if event.kind == EventKind.BACKWARD_INPUT else str(event.kind)
                wait = event._replace(kind=EventKind.RECEIVE, detail=awaited)
                waits.append(wait._replace(start_s=reached_s, end_s=event.start_s))
            reached_s = max(reached_s, event.end_s)
    return replace(timeline, events=(*timeline.events, *waits))


# ---- rules ---------------------------------------------------------------------------------------------------
# Each rule reads the measured numbers and returns how many seconds of the run its change could save, and a
# sentence; the largest wins. Estimates are upper bounds: the saving if the change removed its cause and no
# other cause took its place.


class Candidate(NamedTuple):
    """A change: the most seconds it could save in the run, and a sentence with the reason and the change."""

    gain_s: float
    sentence: str


class Facts:
    """The input of the rules; ``timeline`` is not empty, has waits, and begins when all rows were recorded.

    Attributes:
        path: Seconds of the critical path, per cause.
        batches: Batches with computations, which ended in this time.
        transfers: By receiving stage and "F" or "B": number of messages, and seconds of the fastest transfer.
    """

    def __init__(self, timeline: Timeline) -> None:
        events = timeline.events
        self.timeline, self.makespan_s = timeline, timeline.makespan_s
        self.rows, self.path = timeline.breakdown(), critical_path(timeline)
        self.busy_s = [row.busy_s for row in self.rows]
        self.pipelines = len({event.pipeline for event in events})
        self.batches = len({event.batch for event in events if event.kind in COMPUTE_KINDS})
        forwards = [event.micro_batch or 0 for event in events if event.kind == EventKind.FORWARD]
        self.micro_batches = 1 + max(forwards, default=0)
        self.transfers = _transfers(timeline)


def _transfers(timeline: Timeline) -> dict[tuple[int, str], tuple[int, float]]:
    """Return the transfers; the fastest had the link alone. The arrival is known only for awaited messages."""
    messages = messages_of(timeline)
    ways: dict[tuple[int, str], list[float]] = defaultdict(list)
    for event in timeline.events:
        if sender := sender_of(event, messages):
            ways[event.stage, event.detail].append(max(0.0, event.end_s - sender.end_s))
    sent = Counter((stage + (1 if kind == "F" else -1), kind) for stage, *_, kind in messages)
    return {edge: (sent[edge], min(times)) for edge, times in ways.items()}


def one_thread(facts: Facts) -> Candidate | None:
    """All stages are in one process: its thread runs them in turn, and each is idle while the others run."""
    busy = facts.busy_s
    everyone = Timeline(1, tuple(event._replace(worker=0) for event in facts.timeline.events)).busy_s[0]
    gaps = sum(row.other_s for row in facts.rows)
    waits = sum(sum(row.recv_s.values()) for row in facts.rows)
    if len(busy) == 1 or everyone < ONE_AT_A_TIME * sum(busy) or gaps <= waits:
        return None
    return Candidate(
        facts.makespan_s - max(busy),
        f"one thread runs all {len(busy)} stages in turn: start a worker for each (avgpipe run --stages {len(busy)})",
    )


def balance(facts: Facts) -> Candidate | None:
    """One stage computes longer than the others; even stages would shorten the critical path at that stage."""
    busy = facts.busy_s
    mean, slowest = fmean(busy), max(range(len(busy)), key=busy.__getitem__)
    if busy[slowest] <= IMBALANCE * mean or len(busy) == 1:  # the mean may be 0
        return None
    gain = sum(s * (1 - mean / busy[c.stage]) for c, s in facts.path.items() if c.what in COMPUTE_KINDS)
    means = [fmean(side) if side else inf for side in (busy[:slowest], busy[slowest + 1 :])]
    neighbour = slowest - 1 if means[0] <= means[1] else slowest + 1
    return Candidate(
        gain,
        f"stage {slowest} computes {busy[slowest] / mean:.2f} times as long as the mean: "
        f"move layers from stage {slowest} to stage {neighbour}",
    )


def more_pipelines(facts: Facts) -> Candidate | None:
    """Workers wait for each other: another pipeline fills the waits, until a worker or a link has no pause left."""
    waits = [row.outside_s + sum(row.recv_s.get(word, 0.0) for word in ("F", "B", "")) for row in facts.rows]
    if len(waits) == 1 or min(waits) <= 0:
        return None
    links = max((count * fastest for count, fastest in facts.transfers.values()), default=0.0)
    gain = min(min(waits), facts.makespan_s - links)
    return Candidate(
        gain if facts.pipelines == 1 else LATER_PIPELINE * gain,
        f"every worker waits for its neighbours at least {100 * min(waits) / facts.makespan_s:.0f} % of the time: "
        f"run {facts.pipelines + 1} pipelines",
    )


def links(facts: Facts) -> Candidate | None:
    """The critical path passes through the links."""
    edges = {(c.stage, c.detail): s for c, s in facts.path.items() if c.what == "transfer"}
    if not edges:
        return None
    gain, edge = sum(edges.values()), max(edges, key=edges.__getitem__)
    sender = edge[0] + (-1 if edge[1] == "F" else 1)
    return Candidate(
        gain,
        f"transfers are the bottleneck, from stage {sender} to stage {edge[0]} at least "
        f"{format_seconds(facts.transfers[edge][1])} each: use wire_dtype, larger stages, or a faster link",
    )


def host(facts: Facts) -> Candidate | None:
    """The worker's thread does other work, which is on the critical path."""
    gains: dict[str, float] = defaultdict(float)
    for cause, seconds in facts.path.items():
        if cause.what == EventKind.HOST:
            gains[cause.detail] += seconds
    if not gains:
        return None
    word = max(gains, key=gains.__getitem__)
    row = max(facts.rows, key=lambda row: row.host_s.get(word, 0.0))
    share = f"takes {100 * row.host_s.get(word, 0.0) / facts.makespan_s:.0f} % of worker {row.stage}'s time"
    sentences = {
        "loader": f"the data loader {share}: use workers (num_workers)",
        "caller": f"the code between results {share}: do less there, or less often",
    }
    other = f"the host ({word or 'no detail'}) {share}: do less there"
    return Candidate(gains[word], sentences.get(word, other))


def overhead(facts: Facts) -> Candidate | None:
    """The runtime's own time and its sends occur with every action: half as many actions halve it."""
    actions = sum(event.kind in ("F", "B", "I", "W") for event in facts.timeline.events)
    compute = sum(facts.busy_s)
    spent = sum(row.other_s + row.send_s for row in facts.rows)
    if not actions or spent < OVERHEAD * compute:
        return None
    m = facts.micro_batches
    larger = f"larger micro-batches (micro_batches={m // 2} instead of {m})" if m > 1 else "larger batches"
    return Candidate(
        sum(s for c, s in facts.path.items() if c.what in ("runtime", "send")) / 2,
        f"the runtime and its sends take {format_seconds(spent / actions)} per action, which computes "
        f"{format_seconds(compute / actions)}: use {larger}",
    )


RULES: tuple[Callable[[Facts], Candidate | None], ...] = (
    one_thread, balance, more_pipelines, links, host, overhead,
)  # fmt: skip


def advice(facts: Facts) -> str:
    """Return the sentence of the rule with the largest gain, or one that says that there is nothing to gain."""
    computing = f"workers compute {100 * fmean(facts.busy_s) / facts.makespan_s:.0f} % of the time"
    if min(facts.busy_s) > BUSY * facts.makespan_s:
        return f"nothing to gain: {computing}"
    best = max(filter(None, (rule(facts) for rule in RULES)), default=None)
    if best is None or best.gain_s < WORTH * facts.makespan_s:
        return f"no single change would gain {100 * WORTH:.0f} %: {computing}"
    return f"{best.sentence} (up to {100 * best.gain_s / facts.makespan_s:.0f} % less time)"


# ---- text ----------------------------------------------------------------------------------------------------


def explain(timeline: Timeline) -> str:
    """See :meth:`Timeline.explain`."""
    facts = Facts(_recorded_by_all(with_waits(timeline)))
    if facts.timeline.makespan_s == 0:
        return "nothing was recorded"
    head = (
        f"batches: {facts.batches} in {format_seconds(facts.makespan_s)}, "
        f"{format_seconds(facts.makespan_s / max(1, facts.batches))} per batch; "
        f"stages: {timeline.stages}, pipelines: {facts.pipelines}, micro-batches: {facts.micro_batches}"
    )
    return "\n".join([head, *_table(facts), _path_line(facts), f"advice: {advice(facts)}"])


def _recorded_by_all(timeline: Timeline) -> Timeline:
    """Cut to the time when all stages were recorded: from the start of the record that begins last.

    Each worker keeps a fixed number of events, which cover more time if fewer happen.
    """
    begin = max((row[0].start_s for row in by_row(timeline) if row), default=0.0)
    kept = tuple(e._replace(start_s=max(begin, e.start_s)) for e in timeline.events if e.end_s > begin)
    return replace(timeline, events=kept) if kept else timeline


def _table(facts: Facts) -> list[str]:
    """Format a line per worker with a column for each activity that took time: its time, and percent of the run."""
    unit, per_s = time_unit(facts.makespan_s)
    whole = facts.makespan_s * per_s
    digits = 3 if whole < 100 else 2 if whole < 1000 else 1
    columns = [[f"worker ({unit}, %)", *(str(row.stage) for row in facts.rows)]]
    spent = [_spent(row) for row in facts.rows]
    for column in sorted(set().union(*spent)):
        values = [of_row.get(column, 0.0) * per_s for of_row in spent]
        if any(round(value, digits) for value in values):
            cells = (f"{value:.{digits}f} {100 * value / whole:5.1f}" for value in values)
            columns.append([column[1], *cells])
    widths = [max(map(len, column)) for column in columns]
    return ["   ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in zip(*columns)]


def _spent(row: StageTime) -> dict[tuple[int, str], float]:
    """Return the seconds of a worker by column: its position and heading."""
    return {
        **{(tuple(EventKind).index(EventKind(kind)), kind): s for kind, s in row.compute_s.items()},
        (6, "send"): row.send_s,
        **{(7 if w in ("F", "B") else 8, f"wait {w}".strip()): s for w, s in row.recv_s.items()},
        **{(9, _host_word(word)): s for word, s in row.host_s.items()},
        (10, "runtime"): row.other_s,
        (11, "outside"): row.outside_s,
    }


def _host_word(detail: str) -> str:
    return detail if detail in ("loader", "caller") else f"host {detail}".strip()


def _path_line(facts: Facts) -> str:
    """Format the critical path, largest cause first."""
    words = {"transfer": "transfers", "recv": "waiting", "send": "sending", "runtime": "runtime"}
    sums: dict[str, float] = defaultdict(float)
    for cause, seconds in facts.path.items():
        other = _host_word(cause.detail) if cause.what == "host" else "computing"
        sums[words.get(cause.what, other)] += seconds
    parts = sorted(sums.items(), key=lambda item: -item[1])
    shown = [f"{word} {100 * s / facts.makespan_s:.1f} %" for word, s in parts if s > 0]
    return f"critical path: {', '.join(shown)}"
