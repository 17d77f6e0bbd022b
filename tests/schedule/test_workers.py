"""Workers of several stages, stages of several workers, and rows without a flush."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe.errors import ScheduleError
from avgpipe.schedule import Action, Schedule, build_schedule
from avgpipe.schedule.checks import draw_grid, dry_run, steps_of


def schedule(*rows, micro_batches=1):
    return Schedule("test", micro_batches, [[Action.parse(token) for token in row.split()] for row in rows])


V = ("0F0 3F0 3B0 0B0 0U 3U", "1F0 2F0 2B0 1B0 1U 2U")


# ---- workers of several stages ----


def test_a_row_mixes_the_actions_of_a_workers_stages():
    folded = schedule(*V)
    folded.validate()
    assert not folded.is_plain
    assert (folded.stages, folded.workers) == (4, 2)
    assert folded.placement == ((0, 3), (1, 2))
    assert folded.replicas == ((0,), (1,), (1,), (0,))
    assert [folded.worker_of(k) for k in range(4)] == [0, 1, 1, 0]
    assert [" ".join(map(str, column)) for column in folded.columns] == ["F0 B0 U"] * 4
    assert folded.peak_in_flight == [1, 1, 1, 1]
    assert folded.worker_peak_in_flight == [2, 2]


def test_a_row_of_open_stages_is_of_the_stage_of_its_number():
    plain = build_schedule("1f1b", 3, 4)
    assert plain.is_plain
    assert plain.workers == 3
    assert plain.placement == ((0,), (1,), (2,))
    assert [plain.worker_of(k) for k in range(3)] == [0, 1, 2]
    assert plain.worker_peak_in_flight == plain.peak_in_flight
    assert plain == Schedule("columns", 4, plain.columns)
    with pytest.raises(ValueError, match=r"stage=3: no worker has this stage, the stages are 0\.\.2"):
        plain.worker_of(3)


def test_the_worker_of_a_stage_takes_part_in_equality():
    assert schedule(*V) == schedule(*V)
    assert hash(schedule(*V)) == hash(schedule(*V))
    assert schedule(*V) != schedule(*["F0 B0 U"] * 4)
    assert schedule(*V) != schedule(V[1], V[0])
    streaming = build_schedule("pipedream", 2, 3)
    assert streaming == build_schedule("pipedream-2bw", 2, 3)
    assert streaming != build_schedule("1f1b", 2, 3)


# ---- stages of several workers ----


def test_replicas_take_micro_batches_in_turn():
    replicated = build_schedule("1f1b", 2, 4, replication=[2, 1])
    assert replicated.to_csv().splitlines() == [
        "0F0,0F2,0B0,0B2,0U",
        "0F1,0F3,0B1,0B3,0U",
        "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3,1U",
    ]
    assert replicated.replicas == ((0, 1), (2,))
    assert [replicated.worker_of(0, m) for m in range(4)] == [0, 1, 0, 1]
    assert replicated.peak_in_flight == [2, 1]


def test_replicas_without_a_flush_go_on_over_the_batches():
    replicated = build_schedule("pipedream", 2, 4, replication=[2, 1])
    assert replicated.to_csv().splitlines() == [
        "0B0,0F0+1,0B2,0U,0F2+1",
        "0B1,0F1+1,0B3,0U,0F3+1",
        "1B0,1F1,1B1,1F2,1B2,1F3,1B3,1U,1F0+1",
    ]
    assert (replicated.lookahead, replicated.flush) == (1, False)
    dataclasses.replace(replicated).validate()


@given(
    st.sampled_from(["1f1b", "gpipe", "pipedream", "advance-forward"]),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 8),
)
def test_replicas_run_every_micro_batch_once(name, replication, micro_batches):
    try:
        replicated = build_schedule(name, len(replication), micro_batches, replication=replication)
    except ValueError:  # a deadlock
        assert name == "advance-forward" or (
            name == "pipedream" and any(micro_batches % r for r in replication)
        )
        return
    assert [len(workers) for workers in replicated.replicas] == replication
    for workers in replicated.replicas:
        own = [[a.micro_batch for a in replicated.rows[w] if a.kind == "F"] for w in workers]
        assert sorted(m for ms in own for m in ms) == list(range(micro_batches))
        assert all(m % len(workers) == r for r, ms in enumerate(own) for m in ms)


# ---- on other workers ----


def test_a_schedule_is_placed_on_other_workers() -> None:
    replicated = build_schedule("1f1b", 2, 4, replication=[2, 1])
    placed = replicated.placed([[0, 2], [1]])
    placed.validate()
    assert placed.replicas == ((0, 2), (1,))
    assert [placed.rows[w] for w in (0, 2, 1)] == list(replicated.rows)
    assert [placed.worker_of(0, m) for m in range(4)] == [0, 2, 0, 2]
    assert placed.columns == replicated.columns
    swapped = build_schedule("interleaved-1f1b", 4, 4).placed([[1], [0], [1], [0]])
    assert swapped.placement == ((1, 3), (0, 2))


@pytest.mark.parametrize(
    "placement", [[[0], [1]], [[2, 0], [1]], [[0, 1], [3]], [[0, 1], [1]], [[0, 1], [2], []], []]
)
def test_a_placement_that_does_not_fit_is_refused(placement) -> None:
    with pytest.raises(ValueError, match=r"must name the workers 0\.\.2 of each of 2 stages"):
        build_schedule("1f1b", 2, 4, replication=[2, 1]).placed(placement)


# ---- faults ----

# rows, message
FAULTS = [
    (("F0 B0 U", "F0 B0"), "stage 1, position 2, U: missing"),
    (("0F0 0B0 0U 1F0 1B0",), "worker 0, position 5, 1U: missing"),
    (("2F0 2B0 2U", "0F0 0B0 0U"), "worker 0, position 3, 1F0: missing, no worker has stage 1"),
    (
        ("0F0 1F0 0B0 0U", "1B0 1U"),
        "worker 0, position 4, 1B0: missing",
    ),
    (
        ("0F0 0B0 0U", "0F0 0B0 0U"),
        "worker 1, position 0, 0F0: on worker 1, though workers 0, 1 have stage 0 in turn: micro-batch 0 is for worker "
        "0",
    ),
    (("0F0 1B0 0B0 0U 1F0 1U",), "worker 0, position 1, 1B0: out of order, comes before its own forward F0"),
    (("0F0 0B0 0U+1",), "stage 0, position 2, U+1: an update cannot be ahead of its batch"),
    (("0F0 0B0 0U 0F0+1",), "stage 0, position 0, F0: repeated"),
    (("0B0+1 0U 0F0",), "stage 0, position 0, B0+1: out of order, comes before its own forward F0"),
    (
        ("1F0 0F0 1B0 0B0 0U 1U",),
        "worker 0, position 0, 1F0: deadlock, worker 0 at 1F0 waits for 0F0 of worker 0",
    ),
    (
        ("3F0 0F0 0B0 0U 3B0 3U", "1F0 2F0 2B0 1B0 1U 2U"),
        "worker 0, position 0, 3F0: deadlock, worker 0 at 3F0 waits for 2F0 of worker 1; "
        "worker 1 at 1F0 waits for 0F0 of worker 0",
    ),
    (
        ("B0 U F0+1", "B0 U F0+2"),
        "stage 0, position 0, B0: deadlock, stage 0 at B0 waits for B0 of stage 1; "
        "stage 1 at F0+2 waits for F0+1 of stage 0",
    ),
]


@pytest.mark.parametrize(("rows", "message"), FAULTS)
def test_validate_and_the_grid_name_what_is_wrong(rows, message):
    candidate = schedule(*rows)
    with pytest.raises(ScheduleError) as raised:
        candidate.validate()
    assert str(raised.value).startswith(f"schedule 'test': {message}")
    assert str(candidate).splitlines()[-1].startswith(message)


def test_a_circle_of_workers_is_named_by_its_first():
    with pytest.raises(ScheduleError) as raised:
        schedule("4F0 4B0 4U", "3F0 0F0 0B0 0U 3B0 3U", "1F0 1B0 1U", "2F0 2B0 2U").validate()
    assert str(raised.value) == (
        "schedule 'test': worker 1, position 0, 3F0: deadlock, worker 0 at 4F0 waits for 3F0 of worker 1; "
        "worker 1 at 3F0 waits for 2F0 of worker 3; worker 2 at 1F0 waits for 0F0 of worker 1; "
        "worker 3 at 2F0 waits for 1F0 of worker 2"
    )


def test_the_grid_marks_the_cell_in_the_workers_row():
    assert "worker 0 | 0F0   [1B0] 0B0" in str(schedule("0F0 1B0 0B0 1F0 0U 1U"))
    assert str(schedule("B0+1 U F0")).splitlines()[1] == "stage 0 | [B0+1] U      F0"


actions = st.builds(
    "{}{}{}".format,
    st.integers(0, 2),
    st.sampled_from(["F0", "F1", "B0", "I1", "W1", "U"]),
    st.sampled_from(["", "", "+1"]),
)


@given(st.lists(st.lists(actions, max_size=8), min_size=1, max_size=3))
def test_whatever_the_rows_validation_and_grid_answer(rows):
    candidate = schedule(*(" ".join(row) for row in rows), micro_batches=3)
    assert str(candidate).startswith(f"test: stages {candidate.stages}")
    with pytest.raises(ScheduleError) as raised:
        candidate.validate()  # F2 is nowhere
    assert str(candidate).endswith(str(raised.value).removeprefix("schedule 'test': "))


# ---- printed ----


def test_the_grid_of_workers_has_stages_in_front():
    assert str(build_schedule("interleaved-1f1b", 4, 2)) == (
        "interleaved-1f1b: stages 4, workers 2, micro-batches 2\n"
        "worker 0 | 0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1 0U  2U\n"
        "worker 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 1U  3U"
    )


def over(schedule, batches):
    """The grid of several batches, their micro-batches numbered through."""
    steps = [steps_of(row, batches, schedule.micro_batches) for row in schedule.rows]
    cells = [
        [
            str(Action(a.kind, None if a.kind == "U" else a.micro_batch + j * schedule.micro_batches))
            for a, j in own
        ]
        for own in steps
    ]
    return draw_grid("stage", cells, dry_run(steps, schedule.stages), None)


def test_several_batches_without_a_flush_overlap():
    assert over(build_schedule("pipedream", 3, 1), 4) == [
        "stage 0 | F0 F1 F2 .  .  B0 U  F3 B1 U  .  B2 U  .  B3 U",
        "stage 1 | .  F0 F1 .  B0 U  F2 B1 U  F3 B2 U  .  B3 U",
        "stage 2 | .  .  F0 B0 U  F1 B1 U  F2 B2 U  F3 B3 U",
    ]
    assert over(build_schedule("pipedream-2bw", 2, 2), 2) == [
        "stage 0 | F0 F1 .  B0 F2 B1 U  F3 B2 .  B3 U",
        "stage 1 | .  F0 B0 F1 B1 U  F2 B2 F3 B3 U",
    ]


def test_several_batches_with_a_flush_follow_one_another():
    assert over(build_schedule("1f1b", 2, 2), 2) == [
        "stage 0 | F0 F1 .  B0 .  B1 U  F2 F3 .  B2 .  B3 U",
        "stage 1 | .  F0 B0 F1 B1 U  .  .  F2 B2 F3 B3 U",
    ]


def test_batches_of_workers_with_several_stages():
    first, _ = over(build_schedule("interleaved-1f1b", 4, 1), 2)
    assert first == "stage 0 | F0 .  F0 .  .  B0 .  B0 U  U  F1 .  F1 .  .  B1 .  B1 U  U"


# ---- CSV ----


def test_csv_has_a_row_per_worker():
    text = "0F0,3F0,3B0,0B0,0U,3U\n1F0,2F0,2B0,1B0,1U,2U\n"
    assert schedule(*V).to_csv() == text
    assert Schedule.from_csv(text) == schedule(*V)


def test_csv_tells_what_is_ahead():
    assert build_schedule("pipedream", 2, 1).to_csv() == "B0,U,F0+2\nB0,U,F0+1\n"
    spreadsheet = "\ufeffB0,U,F0+2,\r\nB0,U,F0+1\r\n"
    assert Schedule.from_csv(spreadsheet) == build_schedule("pipedream", 2, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0,0B0,0U\n1F0,B0,1U\n",
            r"row 2 \(worker 1\), cell 2: 'B0' has no stage in front, as others have",
        ),
        (
            "F0,B0,U\n1F0,B0,1U\n",
            r"row 2 \(stage 1\), cell 1: '1F0' has a stage in front, as no other has",
        ),
        ("0F0,0X0\n", r"row 1 \(worker 0\), cell 2: '0X0' is not an action"),
        ("0F0,999999999F0\n", "no cell is of stage 1, but some are of stage 999999999: number from 0"),
        ("0F0,0B0,0U\n\n1F0\n", r"row 2 \(worker 1\) has no actions: write one row per worker, as 0F0"),
        ("no flush\nF0,B0,U\n", r"row 1 \(stage 0\), cell 1: 'no flush' is not an action"),
    ],
)
def test_csv_errors_name_row_and_cell(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


def test_csv_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="the CSV text is of type NoneType: pass a str"):
        Schedule.from_csv(None)


def test_csv_loads_a_wrong_schedule_of_workers_so_that_it_can_be_printed():
    assert "1B0: missing" in str(Schedule.from_csv("0F0,0B0,0U,1F0\n1B0,1U\n"))
