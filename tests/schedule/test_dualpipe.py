from hypothesis import given
from hypothesis import strategies as st

from avgpipe.schedule import build_schedule


def lines(schedule):
    """A line of tokens per worker, without the updates at its end."""
    return [" ".join(row.split(",")[:-2]) for row in schedule.to_csv().splitlines()]


# ---- literal tables ----


def test_1_worker_with_2_micro_batches():
    assert lines(build_schedule("dualpipe-v", 2, 2)) == ["0F0 1F0 0F1 1B0 1F1 0B0 1B1 0I1 0W1"]


def test_2_workers_with_4_micro_batches():
    schedule = build_schedule("dualpipe-v", 4, 4)
    assert schedule.placement == ((0, 3), (1, 2))
    assert lines(schedule) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]
    assert schedule.peak_in_flight == [4, 3, 2, 1]
    assert schedule.worker_peak_in_flight == [5, 5]


def test_2_workers_with_6_micro_batches():
    assert lines(build_schedule("dualpipe-v", 4, 6)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 0F4 3B2 3F3 0B1 0F5 3B3 3F4 0B2 "
        "3B4 3F5 0B3 3B5 0I4 0W4 0I5 0W5",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 1F4 2B2 2F4 1B2 1F5 2B3 2F5 1B3 "
        "2B4 1B4 2I5 1I5 2W5 1W5",
    ]


def test_4_workers_with_8_micro_batches():
    assert lines(build_schedule("dualpipe-v", 8, 8)) == [
        "0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 0F7 7B3 7F4 0B0 7B4 7F5 0B1 "
        "7B5 7F6 0B2 7B6 7F7 0B3 7B7 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7",
        "1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6I0 6W0 6F2 6I1 6W1 6F3 1F6 6B2 6F4 1B0 1F7 6B3 6F5 1B1 6B4 6F6 "
        "1B2 6B5 6F7 1B3 6B6 1B4 6I7 1I5 6W7 1I6 1W5 1I7 1W6 1W7",
        "2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5I0 5W0 5F3 2F5 5B1 5F4 2B0 2F6 5B2 5F5 2B1 2F7 5B3 5F6 2B2 5B4 "
        "5F7 2B3 5B5 2B4 5B6 2I5 5I7 2I6 2W5 2I7 5W7 2W6 2W7",
        "3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 3F4 4B0 4F4 3B0 3F5 4B1 4F5 3B1 3F6 4B2 4F6 3B2 3F7 4B3 4F7 3B3 "
        "4B4 3B4 4B5 3B5 4I6 3I6 4I7 3I7 4W6 3W6 4W7 3W7",
    ]


def test_of_fewer_micro_batches_than_stages_those_that_lack_are_left_out():
    assert lines(build_schedule("dualpipe-v", 4, 3)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1 3F2 0B0 3B2 0B1 0I2 0W2",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 2B1 1B1 2B2 1B2",
    ]
    assert lines(build_schedule("dualpipe-v", 4, 1)) == ["0F0 3F0 3I0 3W0 0B0", "1F0 2F0 2B0 1B0"]


# ---- bounds ----


@given(st.integers(1, 7), st.integers(1, 20))
def test_a_worker_holds_one_activation_more_than_there_are_stages(workers, micro_batches):
    stages = 2 * workers
    schedule = build_schedule("dualpipe-v", stages, micro_batches)
    schedule.validate()
    assert schedule.placement == tuple((w, stages - 1 - w) for w in range(workers))
    assert max(schedule.worker_peak_in_flight) <= stages + 1
    if micro_batches >= stages:
        assert schedule.worker_peak_in_flight == [stages + 1] * workers
        assert schedule.peak_in_flight == [stages - k for k in range(stages)]


@given(st.integers(1, 7), st.integers(0, 9))
def test_a_forward_of_one_stage_and_a_backward_of_the_other_come_in_turn(workers, more):
    """Worker w of W has M - 2W + w + 1 times two such pairs in its middle."""
    schedule = build_schedule("dualpipe-v", 2 * workers, 2 * workers + more)
    for w, row in enumerate(schedule.rows):
        down, up = f"{w}", f"{2 * workers - 1 - w}"
        pairs = " ".join([down + "F", up + "B", up + "F", down + "B"])
        kinds = " ".join(f"{action.stage}{action.kind}" for action in row)
        assert " ".join([pairs] * (more + w + 1)) in kinds


@given(st.integers(1, 7), st.integers(0, 9))
def test_backwards_are_split_only_while_the_pipeline_fills_and_empties(workers, more):
    """Of worker w: W-1-w while it fills, and w+1 of its last 2(w+1), and the W-1-w after them."""
    schedule = build_schedule("dualpipe-v", 2 * workers, 2 * workers + more)
    for w, row in enumerate(schedule.rows):
        assert sum(action.kind == "I" for action in row) == 2 * (workers - 1 - w) + w + 1
