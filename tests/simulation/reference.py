"""Slow, other ways to the same times. All in whole milliseconds, so that sums are exact."""

from collections import Counter
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
def folded_schedules(draw):
    """Any of the above with its stages on any workers, in any order that can be run: in which all could take turns."""
    plain = draw(schedules())
    workers = draw(st.integers(1, plain.stages))
    places = draw(st.permutations([k % workers for k in range(plain.stages)]))
    order = [[] for _ in range(workers)]
    done = [0] * plain.stages
    while any(count < len(column) for count, column in zip(done, plain.columns)):
        able = [
            k for k, column in enumerate(plain.columns) if done[k] < len(column) and _able(plain, done, k)
        ]
        k = draw(st.sampled_from(able))
        order[places[k]].append(k)
        done[k] += 1
    return Schedule("folded", plain.micro_batches, plain.columns, order=tuple(map(tuple, order)))


def _able(schedule, done, k):
    action = schedule.columns[k][done[k]]
    source = source_of(k, action, schedule.stages)
    if source is None:
        return True
    before = schedule.columns[source[0]][: done[source[0]]]
    return any(other.kind in source[1] and other.micro_batch == action.micro_batch for other in before)


@st.composite
def streaming_schedules(draw):
    return build_schedule("pipedream-2bw", draw(st.integers(1, 4)), draw(st.integers(1, 5)))


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


def row_of(schedule, k, batches):
    """What stage k does with the batches of a pipeline, in turn: (number of the batch, action)."""
    if schedule.flush:
        return [(j, action) for j in range(batches) for action in schedule.columns[k]]
    per_batch, warm_up = schedule.micro_batches, schedule.stages - k
    count = batches * per_batch
    row = []
    for g in range(count + warm_up):
        if g < count:
            row.append((g // per_batch, Action("F", g % per_batch)))
        oldest = g - warm_up + 1
        if 0 <= oldest < count:
            row.append((oldest // per_batch, Action("B", oldest % per_batch)))
            if oldest % per_batch == per_batch - 1:
                row.append((oldest // per_batch, Action("U")))
    return row


def worker_of(schedule, k):
    return k if schedule.order is None else next(w for w, row in enumerate(schedule.order) if k in row)


def travel_ms(schedule, ms, boundary):
    """Between stages of one worker nothing travels."""
    away = worker_of(schedule, boundary) != worker_of(schedule, boundary + 1)
    return ms["transfer"][boundary] if away else 0


def longest_paths(schedule, ms, batches):
    """{(stage, batch, action): (start, end)} of one pipeline: times are raised until all that they must follow they do.

    What must be followed: the action before on the device, and the tensor's arrival, which follows the sender's end
    and, on a serial link, the arrival of the tensor before.
    """
    rows = [row_of(schedule, k, batches) for k in range(schedule.stages)]
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
    columns = schedule.columns
    ran = {(r.stage, r.batch, columns[r.stage][r.position]): r for r in outcome.actions}
    assert len(ran) == len(outcome.actions) == batches * sum(map(len, columns)), "everything runs, once"
    sent = {(s.link, s.batch, s.position): s for s in outcome.transfers}
    assert len(sent) == len(outcome.transfers)
    ready = dict.fromkeys(ran, 0)
    for cell, before in _before(schedule, pipelines, batches):
        ready[cell] = max(ready[cell], ran[before].end)
    for cell in ran:
        ready[cell] = max(ready[cell], _arrival(cell, schedule, ran, sent))
    for cell, r in ran.items():
        assert r.pipeline == r.batch % pipelines
        assert r.end - r.start == ms[cell[2].kind][r.stage] * MS
        assert r.start >= ready[cell], "inputs and the action before in its pipeline are awaited"
    _check_devices(schedule, pipelines, ran, ready)
    _check_links(schedule, ms, ran, sent)


def _before(schedule, pipelines, batches):
    """Each action, and the one before it of its pipeline and stage, as (stage, batch, action)."""
    for k in range(schedule.stages):
        for i in range(pipelines):
            row = row_of(schedule, k, len(range(i, batches, pipelines)))
            cells = [(k, own * pipelines + i, action) for own, action in row]
            for before, cell in pairwise(cells):
                yield cell, before


def _arrival(cell, schedule, ran, sent):
    k, j, action = cell
    source = source_of(k, action, schedule.stages)
    if source is None:
        return 0
    neighbour, kinds = source
    sender = next(r for kind in kinds if (r := ran.get((neighbour, j, Action(kind, action.micro_batch)))))
    link = 2 * neighbour if neighbour < k else 2 * k + 1
    return sent[link, j, sender.position].end


def _check_devices(schedule, pipelines, ran, ready):
    urgency = {cell: _urgency(schedule, pipelines, cell) for cell in ran}
    for w in range(schedule.stages):
        on_worker = [(r.start, r.end, cell) for cell, r in ran.items() if worker_of(schedule, cell[0]) == w]
        row = sorted(on_worker, key=lambda entry: entry[:2])
        for one, two in pairwise(row):
            assert one[1] <= two[0], "one action at a time"
        for start, _, cell in row:
            at = ready[cell]
            others = [o for o in row if o[1] > at and o[0] < start and o[2] != cell]
            busy = sum(min(end, start) - max(begin, at) for begin, end, _ in others)
            assert busy == start - at, "no device is idle while an action is ready"
            for begin, _, other in others:
                if begin > at:  # chosen although the cell was there
                    assert urgency[other] < urgency[cell]


def _urgency(schedule, pipelines, cell):
    """Backwards and updates, the oldest batch, the order; the first only decides between pipelines."""
    k, j, action = cell
    return pipelines > 1 and action.kind == "F", j, _place(schedule, k, action)


def _place(schedule, k, action):
    """Of the action in its worker's row: where the order names the stage for the right time."""
    at = schedule.columns[k].index(action)
    if schedule.order is None:
        return at
    seen = Counter()
    for place, stage in enumerate(schedule.order[worker_of(schedule, k)]):
        if stage == k and seen[k] == at:
            return place
        seen[stage] += 1
    raise AssertionError("the order lacks an action")


def _check_links(schedule, ms, ran, sent):
    columns = schedule.columns
    for link in {s.link for s in sent.values()}:
        sender = link // 2 if link % 2 == 0 else link // 2 + 1
        row = [s for s in sent.values() if s.link == link]
        made = {s: ran[sender, s.batch, columns[sender][s.position]].end for s in row}
        for s in row:
            assert columns[sender][s.position].kind in ("F" if link % 2 == 0 else "BI")
            assert s.end - s.start == travel_ms(schedule, ms, link // 2) * MS
            assert s.start == made[s] or (ms["serial"] and s.start > made[s])
        if not ms["serial"]:
            continue
        row.sort(key=lambda s: (s.start, s.end))
        free = 0
        for s in row:
            assert s.start == max(made[s], free), "the link sends as soon as it can, in order of completion"
            free = s.end
