import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe.schedule import build_schedule


def lines(schedule):
    """A line of tokens per worker, without the updates at its end."""
    return [" ".join(row.split(",")[: -len(schedule.placement[0])]) for row in schedule.to_csv().splitlines()]


# ---- literal tables ----


def test_2_workers_of_2_stages_with_4_micro_batches():
    schedule = build_schedule("interleaved-1f1b", 4, 4)
    assert lines(schedule) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]
    assert schedule.placement == ((0, 2), (1, 3))
    assert schedule.workers == 2
    assert schedule.peak_in_flight == [4, 3, 2, 1]
    assert schedule.worker_peak_in_flight == [5, 3]


def test_4_workers_of_2_stages_with_8_micro_batches_is_the_figure_of_the_paper():
    schedule = build_schedule("interleaved-1f1b", 8, 8)
    first, *_, last = lines(schedule)
    assert first == (
        "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1 0B2 0B3 "
        "4B4 4B5 4B6 4B7 0B4 0B5 0B6 0B7"
    )
    assert last == (
        "3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3 "
        "7F4 7B4 7F5 7B5 7F6 7B6 7F7 7B7 3B4 3B5 3B6 3B7"
    )
    assert schedule.worker_peak_in_flight == [11, 9, 7, 5]


def test_3_stages_per_worker_and_a_smaller_last_group():
    schedule = build_schedule("interleaved-1f1b", 6, 3, stages_per_worker=3)
    assert schedule.placement == ((0, 2, 4), (1, 3, 5))
    assert lines(schedule) == [
        "0F0 0F1 2F0 2F1 4F0 4F1 0F2 4B0 4B1 2F2 2B0 2B1 4F2 0B0 0B1 4B2 2B2 0B2",
        "1F0 1F1 3F0 3F1 5F0 5B0 5F1 5B1 1F2 3B0 3B1 3F2 1B0 1B1 5F2 5B2 3B2 1B2",
    ]


def test_the_updates_come_last():
    rows = build_schedule("interleaved-1f1b", 4, 1).to_csv().splitlines()
    assert rows == ["0F0,2F0,2B0,0B0,0U,2U", "1F0,3F0,3B0,1B0,1U,3U"]


def test_one_worker_goes_back_and_forth():
    assert lines(build_schedule("interleaved-1f1b", 2, 2)) == ["0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"]


def test_breadth_first_on_2_workers_of_2_stages_with_4_micro_batches():
    schedule = build_schedule("looped-bfs", 4, 4)
    assert lines(schedule) == [
        "0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 2B3 2B2 2B1 2B0 0B3 0B2 0B1 0B0",
        "1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B3 3B2 3B1 3B0 1B3 1B2 1B1 1B0",
    ]
    assert schedule.placement == ((0, 2), (1, 3))


def test_breadth_first_of_any_number_of_micro_batches_and_3_stages_per_worker():
    assert lines(build_schedule("looped-bfs", 6, 2, stages_per_worker=3)) == [
        "0F0 0F1 2F0 2F1 4F0 4F1 4B1 4B0 2B1 2B0 0B1 0B0",
        "1F0 1F1 3F0 3F1 5F0 5F1 5B1 5B0 3B1 3B0 1B1 1B0",
    ]
    first, *_, last = lines(build_schedule("looped-bfs", 8, 3))
    assert first == "0F0 0F1 0F2 4F0 4F1 4F2 4B2 4B1 4B0 0B2 0B1 0B0"
    assert last == "3F0 3F1 3F2 7F0 7F1 7F2 7B2 7B1 7B0 3B2 3B1 3B0"


# ---- bounds ----


@given(st.integers(1, 5), st.integers(2, 4), st.integers(1, 14))
def test_breadth_first_holds_every_activation_at_once(workers, per_worker, micro_batches):
    schedule = build_schedule("looped-bfs", workers * per_worker, micro_batches, stages_per_worker=per_worker)
    schedule.validate()
    assert schedule.placement == tuple(tuple(range(w, workers * per_worker, workers)) for w in range(workers))
    assert schedule.worker_peak_in_flight == [per_worker * micro_batches] * workers


@given(st.integers(1, 5), st.integers(2, 4), st.integers(1, 14))
def test_every_number_of_micro_batches_can_be_run_in_the_published_memory(workers, per_worker, micro_batches):
    stages = workers * per_worker
    schedule = build_schedule("interleaved-1f1b", stages, micro_batches, stages_per_worker=per_worker)
    schedule.validate()
    assert schedule.placement == tuple(tuple(range(w, stages, workers)) for w in range(workers))
    for w, peak in enumerate(schedule.worker_peak_in_flight):
        most = 2 * (workers - 1 - w) + (per_worker - 1) * workers + 1
        assert peak <= min(most, per_worker * micro_batches)
        if micro_batches % workers == 0:
            assert peak == min(most, per_worker * micro_batches)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble"])
@pytest.mark.parametrize("per_worker", [2, 3])
def test_the_default_is_2_stages_per_worker(per_worker, name):
    default = build_schedule(name, 6, 3)
    assert (default == build_schedule(name, 6, 3, stages_per_worker=per_worker)) == (per_worker == 2)
