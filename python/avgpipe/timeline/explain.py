"""Where each worker's time went, and the one change that promises most.

Each rule below reads the measured numbers and returns a :class:`Candidate`: how many seconds of the run its change
could save, and a sentence; the largest wins. Estimates are upper bounds of a kind: what would be saved if the
change did away with its cause and nothing else took its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from avgpipe.timeline.breakdown import StageTime, breakdown
from avgpipe.timeline.critical import Cause, critical_path, messages_of, sender_of, with_waits
from avgpipe.timeline.timeline import COMPUTE_KINDS, Timeline
from avgpipe.units import format_seconds, time_unit

BUSY = 0.9  # of every worker's time spent computing: schedules of real runs seldom reach more
WORTH = 0.03  # of the time: smaller gains drown in the differences between one run and the next
IMBALANCE = 1.1  # the slowest stage over the mean: layers are seldom small enough to even out less
OVERHEAD = (
    0.1  # of the computing time per action: less than that fewer actions would not repay in lost overlap
)
ONE_AT_A_TIME = 0.99  # of the computing had its moment alone: stages in processes of their own overlap more
LATER_PIPELINE = 0.5  # each pipeline after the second fills fewer of the gaps


class Candidate(NamedTuple):
    """A change: the seconds it could save in the run, at most, and a sentence on why and what."""

    gain_s: float
    sentence: str


@dataclass(frozen=True)
class Facts:
    """What the rules read; ``timeline`` is not empty, with its waits, and from when all stages were recorded."""

    timeline: Timeline

    @cached_property
    def rows(self) -> list[StageTime]:
        return breakdown(self.timeline)

    @cached_property
    def path(self) -> dict[Cause, float]:
        return critical_path(self.timeline)

    @cached_property
    def makespan_s(self) -> float:
        return self.timeline.makespan_s

    @cached_property
    def pipelines(self) -> int:
        return len({event.pipeline for event in self.timeline.events})

    @cached_property
    def batches(self) -> int:
        """Batches that computed something and so ended in this time."""
        return len({event.batch for event in self.timeline.events if event.kind in COMPUTE_KINDS})

    @cached_property
    def micro_batches(self) -> int:
        steps = [e.micro_batch for e in self.timeline.events if e.micro_batch is not None and e.kind == "F"]
        return 1 + max(steps, default=0)

    def on_path(self, what: str, detail: str | None = None) -> float:
        """Seconds of the critical path, of all stages."""
        return sum(s for c, s in self.path.items() if c.what == what and detail in (None, c.detail))

    @cached_property
    def transfers(self) -> dict[tuple[int, str], tuple[int, float]]:
        """By receiving stage and "F" or "B": how many messages were sent, and the fastest's seconds on its way.

        The fastest had the link for itself. Only what was waited for tells when it came.
        """
        messages = messages_of(self.timeline)
        fastest: dict[tuple[int, str], float] = {}
        for event in self.timeline.events:
            sender = sender_of(event, messages) if event.kind == "recv" else None
            if sender is not None:
                edge, way_s = (event.stage, event.detail), max(0.0, event.end_s - sender.end_s)
                fastest[edge] = min(way_s, fastest.get(edge, way_s))
        counts = dict.fromkeys(fastest, 0)
        for stage, _, _, _, kind in messages:
            edge = (stage + (1 if kind == "F" else -1), kind)
            if edge in counts:
                counts[edge] += 1
        return {edge: (counts[edge], fastest[edge]) for edge in fastest}


# ---- rules ---------------------------------------------------------------------------------------------------------


def one_thread(facts: Facts) -> Candidate | None:
    """All stages in one process: its thread runs them in turn, so that for each the others' work is a gap."""
    busy = [row.busy_s for row in facts.rows]
    everyone = Timeline(1, tuple(event._replace(stage=0) for event in facts.timeline.events)).busy_s[0]
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
    busy = [row.busy_s for row in facts.rows]
    mean, slowest = sum(busy) / len(busy), max(range(len(busy)), key=busy.__getitem__)
    if busy[slowest] < IMBALANCE * mean or len(busy) == 1:
        return None
    gain = sum(s * (1 - mean / busy[c.stage]) for c, s in facts.path.items() if c.what == "compute")
    sides = [busy[:slowest], busy[slowest + 1 :]]
    means = [sum(side) / len(side) if side else float("inf") for side in sides]
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
    gains = {c.detail: facts.on_path("host", c.detail) for c in facts.path if c.what == "host"}
    if not gains:
        return None
    word = max(gains, key=gains.__getitem__)
    row = max(facts.rows, key=lambda row: row.host_s.get(word, 0.0))
    share = f"takes {100 * row.host_s.get(word, 0.0) / facts.makespan_s:.0f} % of worker {row.stage}'s time"
    sentences = {
        "loader": f"the data loader {share}: use workers (num_workers)",
        "caller": f"the code between results {share}: do less there, or less often",
    }
    return Candidate(
        gains[word], sentences.get(word, f"the host ({word or 'no detail'}) {share}: do less there")
    )


def overhead(facts: Facts) -> Candidate | None:
    """The runtime's own time and its sends come with every action: half as many actions, half of it."""
    actions = sum(event.kind in ("F", "B", "I", "W") for event in facts.timeline.events)
    compute = sum(row.busy_s for row in facts.rows)
    spent = sum(row.other_s + row.send_s for row in facts.rows)
    if not actions or spent < OVERHEAD * compute:
        return None
    m = facts.micro_batches
    larger = f"larger micro-batches (micro_batches={m // 2} instead of {m})" if m > 1 else "larger batches"
    return Candidate(
        (facts.on_path("runtime") + facts.on_path("send")) / 2,
        f"the runtime and its sends take {format_seconds(spent / actions)} per action, which computes "
        f"{format_seconds(compute / actions)}: use {larger}",
    )


RULES: tuple[Callable[[Facts], Candidate | None], ...] = (
    one_thread, balance, more_pipelines, links, host, overhead,
)  # fmt: skip


def advice(facts: Facts) -> str:
    """The sentence of the rule with the largest gain, or that there is nothing to gain."""
    shares = [row.busy_s / facts.makespan_s for row in facts.rows]
    computing = f"workers compute {100 * sum(shares) / len(shares):.0f} % of the time"
    if min(shares) > BUSY:
        return f"nothing to gain: {computing}"
    best = max(filter(None, (rule(facts) for rule in RULES)), default=None)
    if best is None or best.gain_s < WORTH * facts.makespan_s:
        return f"no single change would gain {100 * WORTH:.0f} %: {computing}"
    return f"{best.sentence} (up to {100 * best.gain_s / facts.makespan_s:.0f} % less time)"


# ---- text ----------------------------------------------------------------------------------------------------------


def explain(timeline: Timeline) -> str:
    """See :meth:`Timeline.explain`."""
    facts = Facts(_recorded_by_all(with_waits(timeline)))
    if facts.timeline.makespan_s == 0:
        return "nothing was recorded"
    batches = max(1, facts.batches)
    head = (
        f"batches: {facts.batches} in {format_seconds(facts.makespan_s)}, "
        f"{format_seconds(facts.makespan_s / batches)} per batch; "
        f"stages: {timeline.stages}, pipelines: {facts.pipelines}, micro-batches: {facts.micro_batches}"
    )
    return "\n".join(
        [head, *_table(facts.rows, facts.makespan_s), _path_line(facts), f"advice: {advice(facts)}"]
    )


def _recorded_by_all(timeline: Timeline) -> Timeline:
    """Cut where the stage whose record begins last begins: before, nothing is known of it.

    Each worker keeps a fixed number of events, which last longer where less happens.
    """
    starts: dict[int, float] = {}
    for event in timeline.events:
        starts[event.stage] = min(event.start_s, starts.get(event.stage, event.start_s))
    begin = max(starts.values(), default=0.0)
    kept = tuple(e._replace(start_s=max(begin, e.start_s)) for e in timeline.events if e.end_s > begin)
    return replace(timeline, events=kept) if kept else timeline


def _table(rows: Sequence[StageTime], makespan_s: float) -> list[str]:
    """A line per worker, a column for whatever took time anywhere: its time, and percent of the run."""
    unit, per_s = time_unit(makespan_s)
    digits = 3 if makespan_s * per_s < 100 else 2 if makespan_s * per_s < 1000 else 1
    columns = [[f"worker ({unit}, %)", *(str(row.stage) for row in rows)]]
    for name, values in _columns(rows).items():
        times = [f"{value * per_s:.{digits}f}" for value in values]
        if any(float(time) for time in times):
            shares = [f"{100 * value / makespan_s:5.1f}" for value in values]
            columns.append([name, *(f"{time} {share}" for time, share in zip(times, shares))])
    widths = [max(map(len, column)) for column in columns]
    return ["   ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in zip(*columns)]


def _columns(rows: Sequence[StageTime]) -> dict[str, list[float]]:
    columns = {
        kind: [row.compute_s.get(kind, 0.0) for row in rows] for kind in ("F", "B", "I", "W", "U", "average")
    }
    columns["send"] = [row.send_s for row in rows]
    for word in sorted(
        {word for row in rows for word in row.recv_s}, key=lambda word: (word not in ("F", "B"), word)
    ):
        columns[f"wait {word}".strip()] = [row.recv_s.get(word, 0.0) for row in rows]
    for word in sorted({word for row in rows for word in row.host_s}):
        columns[_host_word(word)] = [row.host_s.get(word, 0.0) for row in rows]
    columns["runtime"] = [row.other_s for row in rows]
    columns["outside"] = [row.outside_s for row in rows]
    return columns


def _host_word(detail: str) -> str:
    return detail if detail in ("loader", "caller") else f"host {detail}".strip()


def _path_line(facts: Facts) -> str:
    """What decided how long it took, largest first."""
    words = {"compute": "computing", "transfer": "transfers", "wait": "waiting", "send": "sending"}
    sums: dict[str, float] = {}
    for cause, seconds in facts.path.items():
        word = words.get(cause.what, _host_word(cause.detail) if cause.what == "host" else cause.what)
        sums[word] = sums.get(word, 0.0) + seconds
    parts = sorted(sums.items(), key=lambda item: -item[1])
    shown = [f"{word} {100 * s / facts.makespan_s:.1f} %" for word, s in parts if s > 0]
    return f"critical path: {', '.join(shown)}"
