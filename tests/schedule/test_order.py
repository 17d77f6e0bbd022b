"""Schedules whose workers have several stages, and those without a flush."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe.errors import ScheduleError
from avgpipe.schedule import Action, Schedule, build_schedule


def schedule(order, *rows, micro_batches=1):
    columns = tuple(tuple(Action.parse(token) for token in row.split()) for row in rows)
    return Schedule("test", micro_batches, columns, order=order)


ONE = "F0 B0 U"
V = ((0, 3, 3, 0, 0, 3), (1, 2, 2, 1, 1, 2))  # of 4 stages with ONE


# ---- what an order is ----


def test_an_order_merges_the_columns_of_a_workers_stages():
    folded = schedule(V, *[ONE] * 4)
    folded.validate()
    assert [[folded.rows().token(cell) for cell in row] for row in folded.rows().cells] == [
        ["0F0", "3F0", "3B0", "0B0", "0U", "3U"],
        ["1F0", "2F0", "2B0", "1B0", "1U", "2U"],
    ]
    assert folded.workers == 2
    assert folded.placement == ((0, 3), (1, 2))
    assert [folded.worker_of(k) for k in range(4)] == [0, 1, 1, 0]
    assert folded.peak_in_flight == [1, 1, 1, 1]
    assert folded.worker_peak_in_flight == [2, 2]


def test_without_an_order_stage_k_is_alone_on_worker_k():
    plain = build_schedule("1f1b", 3, 4)
    assert plain.order is None
    assert plain.workers == 3
    assert plain.placement == ((0,), (1,), (2,))
    assert [plain.worker_of(k) for k in range(3)] == [0, 1, 2]
    assert plain.worker_peak_in_flight == plain.peak_in_flight
    with pytest.raises(ValueError, match=r"stage=3: no worker has it, the stages are 0\.\.2"):
        plain.worker_of(3)


def test_order_and_flush_take_part_in_equality():
    folded = schedule(V, *[ONE] * 4)
    assert folded == schedule([list(row) for row in V], *[ONE] * 4)
    assert hash(folded) == hash(schedule(V, *[ONE] * 4))
    assert folded != schedule(None, *[ONE] * 4)
    assert folded != schedule((V[1], V[0]), *[ONE] * 4)
    streaming = build_schedule("pipedream", 2, 3)
    assert streaming == build_schedule("pipedream-2bw", 2, 3)
    assert streaming != build_schedule("1f1b", 2, 3)


# ---- faults ----

# order, rows, message
FAULTS = [
    (((0, 0, 0), (1, 1)), (ONE, ONE), "worker 1, position 2, 1U: missing in the order"),
    (((0, 0, 0, 0), (1, 1, 1)), (ONE, ONE), "worker 0, position 3, 0: stage 0 has only 3 actions"),
    (((0, 1, 1, 0, 0), (1,)), (ONE, ONE), "worker 1, position 0, 1: stage 1 is on worker 0 already"),
    (((0, 0, 0), (2, 2, 2)), (ONE, ONE, ONE), "worker 0, position 3, 1F0: missing, no worker has stage 1"),
    (((0, 0, 0, 1, 1),), (ONE, "F0 B0"), "worker 0, position 5, 1U: missing"),
    (
        ((0, 1, 0, 1, 0, 1),),
        (ONE, "B0 F0 U"),
        "worker 0, position 1, 1B0: out of order, comes before its own forward F0",
    ),
    (
        ((1, 0, 1, 0, 0, 1),),
        (ONE, ONE),
        "worker 0, position 0, 1F0: deadlock, worker 0 at 1F0 waits for 0F0 of worker 0",
    ),
    (
        ((3, 0, 0, 0, 3, 3), (1, 2, 2, 1, 1, 2)),
        (ONE, ONE, ONE, ONE),
        "worker 0, position 0, 3F0: deadlock, worker 0 at 3F0 waits for 2F0 of worker 1; "
        "worker 1 at 1F0 waits for 0F0 of worker 0",
    ),
]


@pytest.mark.parametrize(("order", "rows", "message"), FAULTS)
def test_validate_and_the_grid_name_what_is_wrong(order, rows, message):
    candidate = schedule(order, *rows)
    with pytest.raises(ScheduleError) as raised:
        candidate.validate()
    assert str(raised.value).startswith(f"schedule 'test': {message}")
    assert str(candidate).splitlines()[-1].startswith(message)


def test_a_circle_of_workers_is_named_by_its_first():
    order = ((4, 4, 4), (3, 0, 0, 0, 3, 3), (1, 1, 1), (2, 2, 2))
    with pytest.raises(ScheduleError) as raised:
        schedule(order, *[ONE] * 5).validate()
    assert str(raised.value) == (
        "schedule 'test': worker 1, position 0, 3F0: deadlock, worker 0 at 4F0 waits for 3F0 of worker 1; "
        "worker 1 at 3F0 waits for 2F0 of worker 3; worker 2 at 1F0 waits for 0F0 of worker 1; "
        "worker 3 at 2F0 waits for 1F0 of worker 2"
    )


def test_the_grid_marks_the_cell_in_the_workers_row():
    candidate = schedule(((0, 1, 0, 1, 0, 1),), ONE, "B0 F0 U")
    assert "worker 0 | 0F0   [1B0] 0B0" in str(candidate)


@given(
    st.lists(
        st.lists(st.sampled_from(["F0", "F1", "B0", "I1", "W1", "U"]), max_size=5), min_size=1, max_size=4
    ),
    st.data(),
)
def test_whatever_the_order_validation_and_grid_answer(rows, data):
    stage = st.integers(0, len(rows) - 1)
    order = data.draw(st.lists(st.lists(stage, min_size=1, max_size=8), min_size=1, max_size=3))
    candidate = schedule(order, *(" ".join(row) for row in rows), micro_batches=3)
    assert str(candidate).startswith(f"test: stages {len(rows)}, workers {len(order)}, micro-batches 3\n")
    with pytest.raises(ScheduleError) as raised:
        candidate.validate()  # F2 is nowhere
    assert str(candidate).endswith(str(raised.value).removeprefix("schedule 'test': "))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((), "order is empty"),
        (((0, 0, 0), ()), r"order\[1\] is empty: give each worker"),
        (((0, 2, 0),), r"order\[0\]\[1\]=2: must be a stage, 0\.\.1"),
        (((0, -1),), r"order\[0\]\[1\]=-1: must be a stage"),
        (((0, True),), r"order\[0\]\[1\]=True: must be a stage"),
    ],
)
def test_an_order_of_something_else_is_refused(order, message):
    with pytest.raises(ValueError, match=message):
        schedule(order, ONE, ONE)


# ---- without a flush ----


def test_without_a_flush_columns_are_those_of_1f1b():
    columns = build_schedule("gpipe", 2, 3).columns
    with pytest.raises(
        ScheduleError, match=r"stage 0, position 2, F2: must be B0: without a flush stage k runs K-k"
    ):
        Schedule("test", 3, columns, flush=False).validate()
    with pytest.raises(ScheduleError, match="stage 0, position 5, B2: missing"):
        Schedule("test", 3, (columns[0][:5], columns[1]), flush=False).validate()
    columns = build_schedule("1f1b", 2, 3).columns
    Schedule("test", 3, columns, flush=False).validate()


def test_a_flush_is_true_or_false_and_false_goes_without_an_order():
    with pytest.raises(TypeError, match="flush=None: must be True or False"):
        Schedule("test", 1, build_schedule("1f1b", 2, 1).columns, flush=None)
    with pytest.raises(ValueError, match="order is given with flush=False"):
        Schedule("test", 1, build_schedule("1f1b", 2, 1).columns, flush=False, order=((0, 0, 0), (1, 1, 1)))


# ---- printed ----


def test_the_grid_of_workers_has_stages_in_front():
    assert str(build_schedule("interleaved-1f1b", 4, 2)) == (
        "interleaved-1f1b: stages 4, workers 2, micro-batches 2\n"
        "worker 0 | 0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1 0U  2U\n"
        "worker 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 1U  3U"
    )


def test_several_batches_without_a_flush_overlap():
    assert build_schedule("pipedream", 3, 1).grid(4) == (
        "pipedream: stages 3, micro-batches 1, no flush, batches 4\n"
        "stage 0 | F0 F1 F2 .  .  B0 U  F3 B1 U  .  B2 U  .  B3 U\n"
        "stage 1 | .  F0 F1 .  B0 U  F2 B1 U  F3 B2 U  .  B3 U\n"
        "stage 2 | .  .  F0 B0 U  F1 B1 U  F2 B2 U  F3 B3 U"
    )
    assert build_schedule("pipedream-2bw", 2, 2).grid(2).splitlines()[1:] == [
        "stage 0 | F0 F1 .  B0 F2 B1 U  F3 B2 .  B3 U",
        "stage 1 | .  F0 B0 F1 B1 U  F2 B2 F3 B3 U",
    ]


def test_several_batches_with_a_flush_follow_one_another():
    assert build_schedule("1f1b", 2, 2).grid(2) == (
        "1f1b: stages 2, micro-batches 2, batches 2\n"
        "stage 0 | F0 F1 .  B0 .  B1 U  F2 F3 .  B2 .  B3 U\n"
        "stage 1 | .  F0 B0 F1 B1 U  .  .  F2 B2 F3 B3 U"
    )


def test_batches_of_workers_with_several_stages():
    lines = build_schedule("interleaved-1f1b", 2, 1).grid(2).splitlines()
    assert lines[1] == "worker 0 | 0F0 1F0 1B0 0B0 0U  1U  0F1 1F1 1B1 0B1 0U  1U"


def test_only_what_can_be_run_is_shown_several_times():
    with pytest.raises(ScheduleError, match="missing"):
        schedule(None, "F0 B0").grid(2)
    with pytest.raises(ValueError, match="batches=0: must be an int of at least 1"):
        build_schedule("1f1b", 2, 2).grid(0)


# ---- CSV ----


def test_csv_has_a_row_per_worker():
    text = "0F0,3F0,3B0,0B0,0U,3U\n1F0,2F0,2B0,1B0,1U,2U\n"
    assert schedule(V, *[ONE] * 4).to_csv() == text
    assert Schedule.from_csv(text) == schedule(V, *[ONE] * 4)


def test_csv_tells_that_there_is_no_flush():
    assert build_schedule("pipedream", 2, 1).to_csv() == "no flush\nF0,B0,U\nF0,B0,U\n"
    spreadsheet = "\ufeffno flush,,\r\nF0,B0,U\r\nF0,B0,U\r\n"
    assert Schedule.from_csv(spreadsheet) == build_schedule("pipedream", 2, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0,0B0,0U\n1F0,B0,1U\n",
            r"row 2 \(worker 1\), cell 2: 'B0' has no stage in front, as other cells have",
        ),
        ("F0,B0,U\n1F0,B0,1U\n", r"row 2 \(stage 1\), cell 1: '1F0' is not an action"),
        ("0F0,0X0\n", r"row 1 \(worker 0\), cell 2: 'X0' is not an action"),
        ("0F0,999999999F0\n", "no cell is of stage 1, but some are of stage 999999999: number from 0"),
        ("0F0,0B0,0U\n\n1F0\n", r"row 2 \(worker 1\) has no actions: write one row per worker, as 0F0"),
        ("no flush\n", "CSV text is empty"),
        ("no flush\nF0,X0\n", r"row 2 \(stage 0\), cell 2: 'X0' is not an action"),
    ],
)
def test_csv_errors_name_row_and_cell(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


def test_csv_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="the CSV text is of type NoneType: pass a str"):
        Schedule.from_csv(None)


def test_csv_loads_a_wrong_order_so_that_it_can_be_printed():
    wrong = Schedule.from_csv("0F0,0B0,0U,1F0\n1B0,1U\n")
    assert "stage 1 is on worker 0 already" in str(wrong)
