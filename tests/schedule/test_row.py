import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe.schedule import Action, Kind, Row, RowCursor, build_schedule
from avgpipe.schedule.checks import steps_of
from avgpipe.schedule.one_stage import from_warm_ups
from avgpipe.schedule.row import Loop


@pytest.mark.parametrize("token", ["F0", "B3", "I12", "W3", "U", "F999999999", "2F3", "0U", "F3+1", "12B3+2"])
def test_a_token_parses_to_the_action_that_prints_as_it(token):
    assert str(Action.parse(token)) == token


def test_parse_gives_kind_and_micro_batch():
    assert Action.parse("B3") == Action("B", 3)
    assert Action.parse("U") == Action("U") == Action("U", None)
    assert Action.parse("2F3+1") == Action(Kind.FORWARD, 3, stage=2, ahead=1)


def test_a_kind_is_its_letter():
    action = Action("F", 3)
    assert action.kind is Kind.FORWARD
    assert action.kind == "F"
    assert action == Action(Kind.FORWARD, 3)
    assert {"F": 1}[action.kind] == 1
    assert f"{Kind.UPDATE} {Kind.BACKWARD!s}" == "U B"


@pytest.mark.parametrize(
    "token",
    [
        "",
        "F",
        "3",
        "X3",
        "f3",
        "F-1",
        "F03",
        " F3",
        "F3 ",
        "F3\n",
        "U0",
        "F3B3",
        "F3+",
        "F3+0",
        "F3+01",
        "02F3",
        "-1F3",
        "F\u0663",
        "F" + "9" * 5000,
    ],
)
def test_parse_refuses_anything_else(token):
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(token)


@pytest.mark.parametrize(
    ("kind", "micro_batch"),
    [("U", 0), ("F", None), ("F", -1), ("B", True), ("F", 1.0), ("X", 1), ("FB", 1), ("F", "1")],
)
def test_an_impossible_action_is_refused_with_its_value(kind, micro_batch):
    with pytest.raises(ValueError, match=r"kind=|micro_batch="):
        Action(kind, micro_batch)


@pytest.mark.parametrize("others", [{"stage": -2}, {"stage": True}, {"ahead": -1}, {"ahead": 1.0}])
def test_an_impossible_stage_or_turn_is_refused_with_its_value(others):
    with pytest.raises(ValueError, match=f"{next(iter(others))}="):
        Action("F", 1, **others)


def test_actions_are_frozen_and_hashable():
    with pytest.raises(AttributeError):
        Action("F", 1).kind = "B"
    assert len({Action("F", 1), Action("F", 1), Action("B", 1)}) == 2


# ---- rows ----


def loops_and_actions(draw_seed):
    draw = random.Random(draw_seed)
    loops, actions = [], []
    for _ in range(draw.randint(1, 4)):
        kinds = [draw.choice("FBIW") for _ in range(draw.randint(1, 3))]
        first, repeats, stride = draw.randint(0, 5), draw.randint(0, 4), draw.randint(1, 3)
        one = [
            Action(kind, first + n, draw.randint(0, 1), draw.randint(0, 2)) for n, kind in enumerate(kinds)
        ]
        loops.append(Loop(tuple(one), repeats, stride))
        actions += [
            Action(a.kind, a.micro_batch + turn * stride, a.stage, a.ahead)
            for turn in range(repeats)
            for a in one
        ]
    loops.append(Loop((Action("U", None, 0),)))
    return loops, [*actions, Action("U", None, 0)]


@given(st.integers())
def test_loops_are_the_actions_that_they_repeat(seed):
    loops, actions = loops_and_actions(seed)
    row = Row(loops=loops)
    assert list(row) == actions
    assert len(row) == len(actions)
    assert [row[n] for n in range(-len(actions), len(actions))] == [*actions, *actions]
    assert row[1:3] == tuple(actions[1:3])
    assert row == Row(actions)
    assert hash(row) == hash(Row(actions))
    assert row != Row(actions[:-1])
    assert set(row.stages) == {a.stage for a in actions}
    assert row.ahead == max(a.ahead for a in actions)


def test_a_row_of_millions_of_actions_takes_no_memory():
    row = Row(loops=[Loop((Action("F", 0), Action("B", 0)), 10**12)])
    assert len(row) == 2 * 10**12
    assert row[2 * 10**12 - 1] == Action("B", 10**12 - 1)
    assert row.peak_in_flight() == 1
    with pytest.raises(IndexError, match="the row has 2000000000000 actions"):
        row[2 * 10**12]


@given(st.integers(1, 7), st.integers(1, 6))
def test_the_peak_is_that_of_many_batches(warm_up, micro_batches):
    for flush in (True, False):
        schedule = from_warm_ups("one", micro_batches, [warm_up], flush=flush)
        held = peak = 0
        for action, _ in steps_of(schedule.rows[0], 9, micro_batches):
            held += action.kind.holds
            peak = max(peak, held)
        assert schedule.rows[0].peak_in_flight() == min(
            warm_up, micro_batches if flush else 9 * micro_batches
        )
        assert peak == schedule.rows[0].peak_in_flight()


# ---- a cursor: literal tables ----


def cursor(warm_up, micro_batches, **options):
    return RowCursor(from_warm_ups("stream", micro_batches, [warm_up], flush=False).rows[0], **options)


def spell(steps):
    """F0.1: the forward of batch 0, micro-batch 1."""
    return " ".join(
        f"{action.kind}{batch}" + ("" if action.kind == "U" else f".{action.micro_batch}")
        for action, batch in steps
    )


def test_with_a_flush_a_batch_is_known_at_once():
    one = RowCursor(build_schedule("1f1b", 2, 2).rows[0])
    assert spell(one.begin(4, 2)) == "F4.0 F4.1 B4.0 B4.1 U4"
    assert spell(one.begin(6, 1)) == "F6.0 B6.0 U6"
    assert one.end() == []
    assert one.version(0) == 0


def test_one_micro_batch_per_batch_is_the_figure_of_pipedream():
    """Stage 1 of 4: 3 batches are in flight."""
    stream = cursor(3, 1)
    assert [spell(stream.begin(j, 1)) for j in range(5)] == [
        "F0.0",
        "F1.0",
        "F2.0 B0.0 U0",
        "F3.0 B1.0 U1",
        "F4.0 B2.0 U2",
    ]
    assert spell(stream.end()) == "B3.0 U3 B4.0 U4"


def test_several_micro_batches_go_on_over_batches():
    stream = cursor(2, 3)
    assert spell(stream.begin(0, 3)) == "F0.0 F0.1 B0.0 F0.2 B0.1"
    assert spell(stream.begin(1, 3)) == "F1.0 B0.2 U0 F1.1 B1.0 F1.2 B1.1"
    assert spell(stream.end()) == "B1.2 U1"


def test_a_short_batch_leaves_out_what_it_lacks():
    stream = cursor(3, 3)
    assert spell(stream.begin(7, 2)) == "F7.0 F7.1 B7.0"
    assert spell(stream.begin(4, 1)) == "F4.0 B7.1 U7 B4.0"
    assert spell(stream.begin(9, 3)) == "F9.0 F9.1 U4 F9.2 B9.0"
    assert spell(stream.end()) == "B9.1 B9.2 U9"


def test_the_last_stage_never_has_anything_left():
    stream = cursor(1, 2)
    assert spell(stream.begin(0, 2)) == "F0.0 B0.0 F0.1 B0.1 U0"
    assert stream.end() == []


def test_after_the_end_comes_a_new_warm_up():
    stream = cursor(2, 2)
    assert spell([*stream.begin(0, 2), *stream.end()]) == "F0.0 F0.1 B0.0 B0.1 U0"
    assert stream.end() == []
    assert spell([*stream.begin(1, 2), *stream.end()]) == "F1.0 F1.1 B1.0 B1.1 U1"


# ---- a cursor, against the definition ----


def in_full(warm_up, micro_batches, counts):
    """1F1B over the sequence of the micro-batches of all batches, by the place of each forward and backward in it.

    Those that a batch lacks are left out afterwards.
    """
    sequence = [(j, m) for j in range(len(counts)) for m in range(micro_batches)]
    n = len(sequence)

    def place(kind, g):
        """Of forward g: before it, g forwards and the backwards of all but the warm_up - 1 before it."""
        if kind == "F":
            return g + max(0, g - warm_up + 1), 1
        return g + min(n, warm_up + g), 0

    work = sorted(((kind, g) for kind in "FB" for g in range(n)), key=lambda cell: place(*cell))
    steps = []
    for kind, g in work:
        j, m = sequence[g]
        if m < counts[j]:
            steps.append((Action(kind, m, 0), j))
        if kind == "B" and m == micro_batches - 1:
            steps.append((Action("U", None, 0), j))
    return steps


batches = st.lists(st.integers(1, 5), max_size=6)


def plain(steps):
    return [(Action(action.kind, action.micro_batch, 0), batch) for action, batch in steps]


@given(st.integers(1, 7), st.integers(1, 5), batches)
def test_all_steps_together_are_1f1b_over_the_sequence_of_all_micro_batches(warm_up, micro_batches, counts):
    counts = [min(count, micro_batches) for count in counts]
    stream = cursor(warm_up, micro_batches)
    steps = [step for j, count in enumerate(counts) for step in stream.begin(j, count)]
    assert plain([*steps, *stream.end()]) == in_full(warm_up, micro_batches, counts)


@given(st.integers(1, 7), st.integers(1, 5), batches)
def test_steps_come_exactly_when_no_later_batch_can_change_them(warm_up, micro_batches, counts):
    counts = [micro_batches for _ in counts]
    stream, known = cursor(warm_up, micro_batches), []
    for j, count in enumerate(counts):
        known += plain(stream.begin(j, count))
        ends = in_full(warm_up, micro_batches, counts[: j + 1])
        goes_on = in_full(warm_up, micro_batches, [*counts[: j + 1], *[micro_batches] * 8])
        same = next((n for n, (a, b) in enumerate(zip(ends, goes_on)) if a != b), len(ends))
        assert known == ends[:same]


@given(st.integers(1, 4), st.integers(1, 7), st.integers(1, 5), batches, st.integers(0, 5))
def test_versions_are_what_the_rules_say(stages, warm_up, micro_batches, counts, updates):
    """By running everything: when the first forward of a batch runs, how many updates have there been?"""
    rows = [
        from_warm_ups("s", micro_batches, [warm_up + stages - 1 - k], flush=False).rows[0]
        for k in range(stages)
    ]
    own, first = rows[-1], rows[0]
    stash, sync, buffer = (
        RowCursor(own, rule, first) for rule in ("stash", "vertical-sync", "double-buffer")
    )
    for each in (stash, sync, buffer):
        each.resume(updates)
    expected = {}
    for name, row in (("stash", own), ("vertical-sync", first)):
        done = updates
        for action, batch in in_turn(row, counts, micro_batches):
            if action.kind == "F":
                expected.setdefault((name, batch), done)
            done += action.kind == "U"
    for j, count in enumerate(counts):
        count = min(count, micro_batches)
        assert stash.version(0) == expected["stash", j]
        assert sync.version(0) == expected["vertical-sync", j]
        assert buffer.version(0) == max(updates + j - 1, 0)
        for each in (stash, sync, buffer):
            each.begin(j, count)
    for each in (stash, sync, buffer):
        each.end()
        assert each.version(0) == updates + len(counts) - (each is buffer and updates + len(counts) > 0)


def in_turn(row, counts, micro_batches):
    one = RowCursor(row)
    steps = [step for j, count in enumerate(counts) for step in one.begin(j, min(count, micro_batches))]
    return [*steps, *one.end()]
