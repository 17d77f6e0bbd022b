"""Where each worker's time went, what decided how long it took, and the one change that promises most."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

from avgpipe.schedule.event import COMPUTE_KINDS, Event, EventKind
from avgpipe.timeline.timeline import DETAILED, StageTime, Timeline, by_row, segments
from avgpipe.units import format_seconds, time_unit

BUSY = 0.9  # of every worker's time spent computing: schedules of real runs seldom reach more
WORTH = 0.03  # of the time: smaller gains drown in the differences between one run and the next
IMBALANCE = 1.1  # the slowest stage over the mean: layers are seldom small enough to even out less
OVERHEAD = 0.1  # of the computing time per action: fewer actions would not repay less in lost overlap
ONE_AT_A_TIME = 0.99  # of the computing had its moment alone: stages in processes of their own overlap more
LATER_PIPELINE = 0.5  # each pipeline after the second fills fewer of the gaps


# ---- the critical path ---------------------------------------------------------------------------------------
# The chain of causes that decided how long a run took. Walked back from the run's end: what a worker did before is the
# cause as long as it did something; where it waited for a message, the cause is the transfer back to the moment when
# the sender had computed it, and before that moment whatever the sender did. So every moment of the run has one cause,
# and making a cause faster can save at most its seconds here: what happens beside the chain is hidden by it.


class Cause(NamedTuple):
    """What a moment of the chain was spent on, at which stage.

    ``what``: an :class:`EventKind` (``detail``: of waits whose sender is not known, and of the host), "transfer"
    (``stage`` receives; ``detail`` "F": an activation from the stage before, "B": a gradient from the one after) or
    "runtime" (between events).
    """

    what: str
    stage: int
    detail: str = ""


def messages_of(timeline: Timeline) -> dict[tuple[Any, ...], Event]:
    """What computed each message: by (stage, pipeline, batch, micro-batch, "F" or "B") of its sender.

    Empty where workers are not one stage each: who computes what for whom is not looked up there.
    """
    if any(event.worker != event.stage for event in timeline.events):
        return {}
    return {
        (*event[:4], "F" if event.kind == EventKind.FORWARD else "B"): event
        for event in timeline.events
        if event.kind in (EventKind.FORWARD, EventKind.BACKWARD, EventKind.BACKWARD_INPUT)
        and not event.detail  # where earlier versions named the stage of a worker with several
    }


def sender_of(event: Event, messages: Mapping[tuple[Any, ...], Event]) -> Event | None:
    """What computed the message that ended a wait; None where that is not known, or began only after the wait."""
    stage = {"F": event.stage - 1, "B": event.stage + 1}.get(event.detail)
    if event.kind != EventKind.RECEIVE or stage is None:
        return None
    sender = messages.get((stage, *event[1:4], event.detail))
    return sender if sender is not None and sender.start_s < event.end_s else None


def critical_path(timeline: Timeline) -> dict[Cause, float]:
    """Seconds per cause; together the makespan."""
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
            # Words of others are the host's work, as far as anyone can tell.
            known = event.kind in tuple(EventKind)
            detail = event.detail if event.kind in DETAILED else "" if known else event.kind
            cause = Cause(event.kind if known else EventKind.HOST, row, detail)
        else:
            # Where clocks differ a little, a message comes before it was computed. The chain still gets shorter: at
            # now_s, its sender is computing.
            ready_s = min(sender.end_s, now_s)
            if ready_s > began_s:
                follow, began_s = sender.worker, ready_s
            cause = Cause("transfer", row, event.detail)
        causes[cause] += now_s - began_s
        row, now_s = follow, began_s
    return causes


def with_waits(timeline: Timeline) -> Timeline:
    """A timeline of several stages that records neither waits nor the host, as simulated ones do, with its waits.

    There a worker waits whenever it does not compute, for what its next computation needs. Others are
    returned as they are.
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
# Each reads the measured numbers and returns how many seconds of the run its change could save, and a sentence; the
# largest wins. Estimates are upper bounds of a kind: what would be saved if the change did away with its cause and
# nothing else took its place.


class Candidate(NamedTuple):
    """A change: the seconds it could save in the run, at most, and a sentence on why and what."""

    gain_s: float
    sentence: str


class Facts:
    """What the rules read; ``timeline`` is not empty, with its waits, and from when all rows were recorded.

    Attributes:
        path: Seconds of the critical path, per cause.
        batches: Those that computed something and so ended in this time.
        transfers: By receiving stage and "F" or "B", how many messages were sent, and the fastest's seconds on its way.
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
    """The fastest had the link for itself. Only what was waited for tells when it came."""
    messages = messages_of(timeline)
    ways: dict[tuple[int, str], list[float]] = defaultdict(list)
    for event in timeline.events:
        if sender := sender_of(event, messages):
            ways[event.stage, event.detail].append(max(0.0, event.end_s - sender.end_s))
    sent = Counter((stage + (1 if kind == "F" else -1), kind) for stage, *_, kind in messages)
    return {edge: (sent[edge], min(times)) for edge, times in ways.items()}


def one_thread(facts: Facts) -> Candidate | None:
    """All stages in one process: its thread runs them in turn, so that for each the others' work is a gap."""
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
    """One stage computes longer than the others; with even stages the critical path would shrink where it is."""
    busy = facts.busy_s
    mean, slowest = fmean(busy), max(range(len(busy)), key=busy.__getitem__)
    if busy[slowest] <= IMBALANCE * mean or len(busy) == 1:  # nobody may have computed
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
    """Workers wait for each other: another pipeline works meanwhile, until a worker or a link has no pause left."""
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
    """The critical path passes over the links."""
    edges = {(c.stage, c.detail): s for c, s in facts.path.items() if c.what == "transfer"}
    if not edges:
        return None
    gain, edge = sum(edges.values()), max(edges, key=edges.__getitem__)
    sender = edge[0] + (-1 if edge[1] == "F" else 1)
    return Candidate(
        gain,
        f"transfers bind, from stage {sender} to stage {edge[0]} at least {format_seconds(facts.transfers[edge][1])} "
        "each: use wire_dtype, larger stages, or a faster link",
    )


def host(facts: Facts) -> Candidate | None:
    """The worker's thread does other things while nothing else decides how long the run takes."""
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
    """The runtime's own time and its sends come with every action: half as many actions, half of it."""
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
    """The sentence of the rule with the largest gain, or that there is nothing to gain."""
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
    """Cut where the stage whose record begins last begins: before, nothing is known of it.

    Each worker keeps a fixed number of events, which last longer where less happens.
    """
    begin = max((row[0].start_s for row in by_row(timeline) if row), default=0.0)
    kept = tuple(e._replace(start_s=max(begin, e.start_s)) for e in timeline.events if e.end_s > begin)
    return replace(timeline, events=kept) if kept else timeline


def _table(facts: Facts) -> list[str]:
    """A line per worker, a column for whatever took time anywhere: its time, and percent of the run."""
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
    """Seconds of a worker by column: its place among others, and its heading."""
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
    """What decided how long it took, largest first."""
    words = {"transfer": "transfers", "recv": "waiting", "send": "sending", "runtime": "runtime"}
    sums: dict[str, float] = defaultdict(float)
    for cause, seconds in facts.path.items():
        other = _host_word(cause.detail) if cause.what == "host" else "computing"
        sums[words.get(cause.what, other)] += seconds
    parts = sorted(sums.items(), key=lambda item: -item[1])
    shown = [f"{word} {100 * s / facts.makespan_s:.1f} %" for word, s in parts if s > 0]
    return f"critical path: {', '.join(shown)}"
