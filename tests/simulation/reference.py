"""Slow, other ways to the same times. All in whole milliseconds, so that sums are exact."""

from itertools import pairwise

from hypothesis import strategies as st

from avgpipe.schedule import Action, Schedule, build_schedule
from avgpipe.simulation import Costs

MS = 10**9  # ticks of the engine


@st.composite
def schedules(draw, most_stages=4, most_micro_batches=5):
    """Advance forward with any advance that can be run; sometimes with backwards split and W late."""
    stages = draw(st.integers(1, most_stages))
    micro_batches = draw(st.integers(1, most_micro_batches))
    rises = draw(st.lists(st.integers(-1, 2), min_size=stages, max_size=stages))
    advance = [0] * stages
    for k in reversed(range(stages)):
        after = advance[k + 1] if k + 1 < stages else 0
        advance[k] = max(0, after + rises[k])
    schedule = build_schedule("advance-forward", stages, micro_batches, advance)
    if not draw(st.booleans()):
        return schedule
    return Schedule(
        "split", micro_batches, tuple(_split(column, draw(st.integers(0, 2))) for column in schedule.columns)
    )


def _split(column, delay):
    """I for B; each W follows when ``delay`` more I have run."""
    actions, waiting = [], []
    for action in column:
        if action.kind == "B":
            actions.append(Action("I", action.micro_batch))
            waiting.append(action.micro_batch)
            if len(waiting) > delay:
                actions.append(Action("W", waiting.pop(0)))
        else:
            actions += [Action("W", m) for m in waiting] if action.kind == "U" else []
            actions.append(action)
    return tuple(actions)


@st.composite
def millisecond_costs(draw, stages):
    """The costs, and the same as a dict of lists of whole milliseconds."""

    def each(least, most, count=stages):
        return draw(st.lists(st.integers(least, most), min_size=count, max_size=count))

    ms = {
        "F": each(0, 5),
        "I": each(0, 4),
        "W": each(0, 4),
        "U": each(0, 3),
        "transfer": each(0, 6, stages - 1),
        "serial": draw(st.booleans()),
    }
    ms["B"] = [i + w for i, w in zip(ms["I"], ms["W"])]

    def seconds(kind):
        return [value / 1000 for value in ms[kind]]

    costs = Costs(
        seconds("F"),
        seconds("B"),
        seconds("transfer"),
        link_serial=ms["serial"],
        update_s=seconds("U"),
        input_backward_s=seconds("I"),
    )
    return costs, ms


def source_of(k, action, stages):
    """Stage and kinds of what an action waits for, or None."""
    if action.kind == "F":
        return (k - 1, "F") if k > 0 else None
    if action.kind in "BI":
        return (k + 1, "BI") if k < stages - 1 else None
    return None


def longest_paths(schedule, ms, batches):
    """{(stage, batch, action): (start, end)} of one pipeline: times are raised until all that they must follow they do.

    What must be followed: the action before on the device, and the tensor's arrival, which follows the sender's end
    and, on a serial link, the arrival of the tensor before.
    """
    rows = [[(j, action) for j in range(batches) for action in column] for column in schedule.columns]
    stages = schedule.stages
    start = {(k, *cell): 0 for k, row in enumerate(rows) for cell in row}
    arrival = {}

    def end(k, j, action):
        return start[k, j, action] + ms[action.kind][k]

    moved = True
    while moved:
        moved = False
        for k, row in enumerate(rows):
            for kinds, boundary in (("F", k), ("BI", k - 1)):
                before = 0
                for j, action in row:
                    if action.kind in kinds and 0 <= boundary < stages - 1:
                        begin = max(end(k, j, action), before if ms["serial"] else 0)
                        arrival[k, j, action] = before = begin + ms["transfer"][boundary]
        for k, row in enumerate(rows):
            free = 0
            for j, action in row:
                earliest = max(free, _arrived(arrival, k, j, action, stages))
                if earliest > start[k, j, action]:
                    start[k, j, action], moved = earliest, True
                free = end(k, j, action)
    return {cell: (start[cell], end(*cell)) for cell in start}


def _arrived(arrival, k, j, action, stages):
    source = source_of(k, action, stages)
    if source is None:
        return 0
    for kind in source[1]:
        cell = (source[0], j, Action(kind, action.micro_batch))
        if cell in arrival:
            return arrival[cell]
    return 0


def check_outcome(schedule, ms, outcome, pipelines, batches):
    """Every rule of the simulation, looked up in what it did; times in ticks."""
    columns, stages = schedule.columns, schedule.stages
    ran = {(r.stage, r.batch, r.position): r for r in outcome.actions}
    assert len(ran) == len(outcome.actions) == batches * sum(map(len, columns)), "everything runs, once"
    sent = {(s.link, s.batch, s.position): s for s in outcome.transfers}
    assert len(sent) == len(outcome.transfers)
    ready = {cell: _ready(cell, columns, ran, sent, pipelines) for cell in ran}
    for cell, r in ran.items():
        assert r.pipeline == r.batch % pipelines
        assert r.end - r.start == ms[columns[r.stage][r.position].kind][r.stage] * MS
        assert r.start >= ready[cell], "inputs and the action before in its pipeline are awaited"
    _check_devices(stages, columns, ran, ready)
    _check_links(ms, columns, ran, sent)


def _ready(cell, columns, ran, sent, pipelines):
    """When the last thing that an action waits for has happened."""
    k, j, position = cell
    action, times = columns[k][position], [0]
    if position > 0:
        times.append(ran[k, j, position - 1].end)
    elif j >= pipelines:
        times.append(ran[k, j - pipelines, len(columns[k]) - 1].end)
    source = source_of(k, action, len(columns))
    if source is not None:
        neighbour, kinds = source
        at = next(
            p
            for p, other in enumerate(columns[neighbour])
            if other.kind in kinds and other.micro_batch == action.micro_batch
        )
        link = 2 * neighbour if neighbour < k else 2 * k + 1
        times.append(sent[link, j, at].end)
    return max(times)


def _check_devices(stages, columns, ran, ready):
    for k in range(stages):
        row = sorted((r for r in ran.values() if r.stage == k), key=lambda r: (r.start, r.end))
        for one, two in pairwise(row):
            assert one.end <= two.start, "one action at a time"
        for r in row:
            at = ready[k, r.batch, r.position]
            others = [o for o in row if o.end > at and o.start < r.start and o is not r]
            busy = sum(min(o.end, r.start) - max(o.start, at) for o in others)
            assert busy == r.start - at, "no device is idle while an action is ready"
            for o in others:
                if o.start > at:  # chosen although r was there
                    assert _urgency(columns, o) < _urgency(columns, r)


def _urgency(columns, r):
    return columns[r.stage][r.position].kind == "F", r.batch


def _check_links(ms, columns, ran, sent):
    for link in {s.link for s in sent.values()}:
        sender = link // 2 if link % 2 == 0 else link // 2 + 1
        row = [s for s in sent.values() if s.link == link]
        for s in row:
            made = ran[sender, s.batch, s.position]
            assert columns[sender][s.position].kind in ("F" if link % 2 == 0 else "BI")
            assert s.end - s.start == ms["transfer"][link // 2] * MS
            assert s.start == made.end or (ms["serial"] and s.start > made.end)
        if not ms["serial"]:
            continue
        row.sort(key=lambda s: (s.start, s.end))
        free = 0
        for s in row:
            made = ran[sender, s.batch, s.position].end
            assert s.start == max(made, free), "the link sends as soon as it can, in order of completion"
            free = s.end
