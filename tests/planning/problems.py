"""Random schedules and costs."""

from math import lcm

from hypothesis import strategies as st

from avgpipe.schedule import Action, Schedule, build_schedule
from tests.planning.reference import Problem, source_of


@st.composite
def schedules(draw, most_stages=4, most_micro_batches=4):
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
    turns = draw(st.randoms(use_true_random=False))
    rows = [[] for _ in range(workers)]
    done = [0] * plain.stages
    while any(count < len(column) for count, column in zip(done, plain.columns)):
        able = [
            k for k, column in enumerate(plain.columns) if done[k] < len(column) and _able(plain, done, k)
        ]
        k = turns.choice(able)
        action = plain.columns[k][done[k]]
        rows[places[k]].append(Action(action.kind, action.micro_batch, k))
        done[k] += 1
    return Schedule("folded", plain.micro_batches, rows)


def _able(schedule, done, k):
    action = schedule.columns[k][done[k]]
    source = source_of(k, action, schedule.stages)
    if source is None:
        return True
    before = schedule.columns[source[0]][: done[source[0]]]
    return any(other.kind in source[1] and other.micro_batch == action.micro_batch for other in before)


@st.composite
def named_schedules(draw):
    """The published ones; those of several stages per worker with an even number of stages."""
    several = ["zero-bubble-v", "dualpipe-v", "interleaved-1f1b", "interleaved-zero-bubble", "looped-bfs"]
    name = draw(st.sampled_from(["pipedream-2bw", "zero-bubble-h1", *several]))
    stages = draw(st.integers(1, 4))
    if name in several:
        stages = 2 * (1 + stages // 4)
    return build_schedule(name, stages, draw(st.integers(1, 4)))


@st.composite
def replicated_schedules(draw):
    replication = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    name = draw(st.sampled_from(["1f1b", "gpipe", "pipedream"]))
    micro_batches = draw(st.integers(1, 5))
    if name == "pipedream":  # which without a flush needs as many on each replica
        micro_batches = lcm(*replication)
    return build_schedule(name, len(replication), micro_batches, replication=replication)


def any_schedules():
    return schedules() | folded_schedules() | named_schedules() | replicated_schedules()


@st.composite
def problems(draw, schedule):
    """Costs with any of the features, in whole milliseconds; often small, so that events fall on one instant."""
    random = draw(st.randoms(use_true_random=False))
    stages, count = schedule.stages, schedule.micro_batches
    most = draw(st.sampled_from([1, 3, 9]))

    def each(rows, upto=most):
        """A row of equal numbers, or of any."""
        return [
            [random.randint(0, upto) for _ in range(count)]
            if is_uneven and count > 1
            else [random.randint(0, upto)] * count
            for _ in range(rows)
        ]

    is_uneven = draw(st.booleans())
    there = each(stages - 1)
    ms = {"F": each(stages), "I": each(stages), "W": each(stages), "there": there}
    ms["back"] = each(stages - 1) if draw(st.booleans()) else there
    ms["U"] = [random.randint(0, most) for _ in range(stages)]
    ms["latency"] = [random.randint(0, most) * draw(st.booleans()) for _ in range(stages - 1)]
    ms["sum"] = [random.randint(0, most) * draw(st.booleans()) for _ in range(stages)]
    serial = draw(st.booleans())
    return Problem(
        ms,
        serial,
        draw(groups(stages, random)) if serial else (),
        draw(st.sampled_from([(1.0,), (1.0,), (1.0, 1.3), (1.0, 2.0), (1.0, 0.9, 1.7)])),
        draw(st.sampled_from([0.0, 0.0, 0.1, 0.25])),
        draw(st.sampled_from([None, None, (0.2, 3.0), (1.0, 1.5)])),
        draw(st.integers(0, 2**64 - 1)),
        [random.randint(0, 3) for _ in range(stages)],
    )


@st.composite
def groups(draw, stages, random):
    """None, or some of the links in up to two groups."""
    links = [link for k in range(stages - 1) for link in ((k, k + 1), (k + 1, k))]
    if not links or draw(st.booleans()):
        return ()
    random.shuffle(links)
    cut = random.randint(0, len(links))
    return tuple(tuple(group) for group in (links[:cut], links[cut : cut + 2]) if group)


@st.composite
def cases(draw):
    """A schedule, its problem, pipelines and batches."""
    schedule = draw(any_schedules())
    pipelines = draw(st.sampled_from([1, 1, 2, 3]))
    return schedule, draw(problems(schedule)), pipelines, draw(st.integers(1, 5))
