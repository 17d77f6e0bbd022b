import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe.errors import ScheduleError
from avgpipe.schedule import Action, Schedule, build_schedule, schedule_names
from avgpipe.schedule.one_stage import from_warm_ups


def schedule(*rows, micro_batches=2):
    return Schedule("test", micro_batches, [[Action.parse(token) for token in row.split()] for row in rows])


GOOD = "F0 F1 B0 B1 U"

# row 0, row 1, stage, position, action, reason
FAULTS = [
    ("F0 F1 B0 B1", GOOD, 0, 4, "U", "missing"),
    (GOOD, "F0 F1 B0 U", 1, 4, "B1", "missing"),
    (GOOD, "F0 B0 U", 1, 3, "F1", "missing"),
    (GOOD, "", 1, 0, "F0", "missing"),
    (GOOD, "F0 I0 F1 B1 U", 1, 5, "W0", "missing"),
    (GOOD, "F0 F1 F0 B0 B1 U", 1, 2, "F0", "repeated"),
    (GOOD, "F0 F1 B0 B1 B0 U", 1, 4, "B0", "repeated"),
    ("F0 F1 B0 B1 U U", GOOD, 0, 5, "U", "repeated"),
    (GOOD, "F0 I0 B0 F1 B1 U", 1, 2, "B0", "repeated, the micro-batch already has the backward I0"),
    (GOOD, "F0 B0 I0 F1 B1 U", 1, 2, "I0", "repeated, the micro-batch already has the backward B0"),
    ("F0 B1 F1 B0 U", GOOD, 0, 1, "B1", "out of order, comes before its own forward F1"),
    (GOOD, "I0 F0 W0 F1 B1 U", 1, 0, "I0", "out of order, comes before its own forward F0"),
    (GOOD, "F0 W0 I0 F1 B1 U", 1, 1, "W0", "out of order, comes before its own input gradient I0"),
    (GOOD, "F0 F1 B0 U B1", 1, 4, "B1", "out of order, comes after the update U"),
    ("U F0 F1 B0 B1", GOOD, 0, 1, "F0", "out of order, comes after the update U"),
    (GOOD, "F0 F1 F2 B0 B1 U", 1, 2, "F2", "unknown micro-batch, the schedule has 2"),
    (GOOD, "F0 F1 B0 B999999999 U", 1, 3, "B999999999", "unknown micro-batch, the schedule has 2"),
    (
        "F0 B0 F1 B1 U",
        GOOD,
        0,
        1,
        "B0",
        "deadlock, stage 0 at B0 waits for B0 of stage 1; stage 1 at F1 waits for F1",
    ),
    ("F0 F1 B1 B0 U", "F0 B0 F1 I1 W1 U", None, None, None, None),
    ("F0 I0 F1 B1 W0 U", GOOD, 0, 1, "I0", "deadlock, stage 0 at I0 waits for B0 of stage 1"),
]


@pytest.mark.parametrize(("first", "second", "stage", "position", "action", "reason"), FAULTS)
def test_validate_names_the_wrong_cell_and_the_grid_marks_it(first, second, stage, position, action, reason):
    candidate = schedule(first, second)
    if reason is None:
        candidate.validate()
        assert "[" not in str(candidate)
        return
    with pytest.raises(ScheduleError) as raised:
        candidate.validate()
    assert str(raised.value).startswith(
        f"schedule 'test': stage {stage}, position {position}, {action}: {reason}"
    )
    assert "\n" not in str(raised.value)
    _, *rows, last = str(candidate).splitlines()
    length = len(candidate.rows[stage])
    assert f"[{action}?]" in rows[stage] if position == length else f"[{action}]" in rows[stage]
    assert str(candidate).count("[") == 1
    cells = rows[stage].split("|")[1].replace("[", "").replace("]", "").split()
    assert [cell for cell in cells if cell not in (".", f"{action}?")] == [
        str(a) for a in candidate.columns[stage]
    ]
    assert last.startswith(f"stage {stage}, position {position}, {action}: {reason}")


def test_a_deadlock_in_the_middle_lists_every_stage_that_waits():
    rows = ["F0 F1 B0 B1 U", "F0 F1 B0 B1 U", "F0 B0 F1 B1 U", "F0 F1 B0 B1 U"]
    with pytest.raises(ScheduleError) as raised:
        schedule(*rows).validate()
    message = str(raised.value)
    assert "stage 2, position 1, B0: deadlock" in message
    for part in (
        "0 at B0 waits for B0 of stage 1",
        "1 at B0 waits for B0 of stage 2",
        "3 at F1 waits for F1 of stage 2",
    ):
        assert part in message


def test_split_backwards_can_be_run_and_hold_activations_until_the_weights_part():
    split = schedule("F0 F1 I0 I1 W0 W1 U", "F0 I0 F1 I1 W1 W0 U")
    split.validate()
    assert split.peak_in_flight == [2, 2]
    assert schedule("F0 F1 B0 B1 U", "F0 B0 F1 B1 U").peak_in_flight == [2, 1]


def test_the_grid_shows_when_stages_wait():
    assert str(build_schedule("1f1b", 2, 3)) == (
        "1f1b: stages 2, micro-batches 3\n"
        "stage 0 | F0 F1 .  B0 F2 B1 .  B2 U\n"
        "stage 1 | .  F0 B0 F1 B1 F2 B2 U"
    )


def test_the_grid_of_a_deadlock_shows_what_ran_and_then_the_rest():
    assert str(schedule("F0 B0 F1 B1 U", "F0 F1 B0 B1 U")).splitlines()[1:3] == [
        "stage 0 | F0   [B0] F1   B1   U",
        "stage 1 | .    F0   F1   B0   B1   U",
    ]


def test_columns_of_the_grid_are_aligned_beyond_ten():
    lines = str(build_schedule("advance-forward", 12, 24)).splitlines()[1:]
    assert len({line.index("|") for line in lines}) == 1
    starts = {
        index
        for line in lines
        for index in range(2, len(line))
        if line[index - 1] == " " and line[index] in "FBU"
    }
    assert {(start - lines[0].index("|")) % 4 for start in starts} == {2}


@given(name=st.sampled_from(schedule_names()), stages=st.integers(1, 4), micro_batches=st.integers(1, 9))
def test_csv_round_trip(name, stages, micro_batches):
    built = build_schedule(name, 2 * stages, micro_batches)
    again = Schedule.from_csv(built.to_csv(), name)
    assert again == built
    assert again.name == name


def test_csv_is_one_row_per_stage():
    assert build_schedule("1f1b", 2, 2).to_csv() == "F0,F1,B0,B1,U\nF0,B0,F1,B1,U\n"


def test_csv_accepts_what_spreadsheets_write():
    text = '\ufeffF0,F1,,,"B0",B1,U\r\n,F0 , B0,F1,B1,U,\r\n,,,\r\n\r\n'
    assert Schedule.from_csv(text) == build_schedule("1f1b", 2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0,B0,U\nF0,X0,U\n", r"row 2 \(stage 1\), cell 2: 'X0' is not an action"),
        ("F0;B0;U\n", r"row 1 \(stage 0\), cell 1: 'F0;B0;U' is not an action"),
        ("F0,B0,U\n\nF0,B0,U\n", r"row 2 \(stage 1\) has no actions"),
        ("", "CSV text is empty"),
        (" \n\n", "CSV text is empty"),
    ],
)
def test_csv_errors_name_row_and_cell(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


def test_csv_loads_a_wrong_schedule_so_that_it_can_be_printed():
    wrong = Schedule.from_csv("F0,B0,F1,U\n")
    assert wrong.micro_batches == 2
    assert "[B1?]" in str(wrong)
    with pytest.raises(ScheduleError, match="schedule 'csv': stage 0, position 4, B1: missing"):
        wrong.validate()


@given(
    st.lists(
        st.lists(
            st.sampled_from(["F0", "F1", "F2", "B0", "B1", "B2", "I0", "W0", "I1", "W1", "U"]), max_size=8
        ),
        min_size=1,
        max_size=4,
    )
)
def test_whatever_the_actions_the_grid_prints_them_all(rows):
    candidate = schedule(*(" ".join(row) for row in rows), micro_batches=2)
    lines = str(candidate).splitlines()[1 : 1 + len(rows)]
    for line, row in zip(lines, rows):
        cells = line.split("|")[1].split()
        assert [c.strip("[]") for c in cells if c != "." and not c.endswith("?]")] == row


def test_a_schedule_is_a_frozen_value_whose_name_is_a_label():
    one, other = build_schedule("1f1b", 2, 3), build_schedule("advance-forward", 2, 3, advance=0)
    assert one == other
    assert hash(one) == hash(other)
    assert one.stages == 2
    assert one.micro_batches == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.name = "other"
    of_lists = Schedule("lists", 1, [[Action("F", 0)]])
    assert of_lists.columns == ((Action("F", 0),),)
    assert of_lists.rows[0][0] == Action("F", 0, stage=0)


def test_a_schedule_of_something_else_is_refused():
    with pytest.raises(ValueError, match="micro_batches=0"):
        Schedule("none", 0, ((Action("U"),),))
    with pytest.raises(ValueError, match="rows is empty"):
        Schedule("none", 1, ())
    with pytest.raises(TypeError, match=r"rows\[0\]\[1\]='B0': must be an Action"):
        Schedule("text", 1, ((Action("F", 0), "B0"),))


def test_millions_of_actions_are_checked_copied_and_compared_without_listing_them():
    schedule = from_warm_ups("large", 10**9, [3, 2, 1])
    schedule.validate()
    assert schedule.peak_in_flight == [3, 2, 1]
    copied = pickle.loads(pickle.dumps(schedule))
    assert copied == schedule
    assert hash(copied) == hash(schedule)
    copied.validate()
    assert from_warm_ups("endless", 10**9, [3, 2, 1], flush=False).lookahead == 1


def test_what_was_built_is_checked_again_once_it_is_changed():
    built = build_schedule("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="missing"):
        dataclasses.replace(built, rows=(built.rows[0], built.rows[1][:-1])).validate()


@pytest.mark.parametrize("flush", [True, False])
def test_warm_ups_that_cannot_be_reached_are_found(flush):
    with pytest.raises(ScheduleError, match="deadlock"):
        from_warm_ups("stuck", 4, [1, 2], flush=flush).validate()
