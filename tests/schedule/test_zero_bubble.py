from hypothesis import given
from hypothesis import strategies as st

from avgpipe.schedule import build_schedule


def rows(schedule):
    return [row.replace(",", " ") for row in schedule.to_csv().splitlines()]


# ---- literal tables ----


def test_h1_on_3_stages_with_4_micro_batches():
    schedule = build_schedule("zero-bubble-h1", 3, 4)
    assert rows(schedule) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 U",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3 U",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 U",
    ]
    assert schedule.peak_in_flight == [3, 3, 3]
    assert schedule.is_plain


def test_h1_of_fewer_micro_batches_than_stages():
    assert rows(build_schedule("zero-bubble-h1", 3, 1)) == ["F0 I0 W0 U"] * 3
    assert rows(build_schedule("zero-bubble-h1", 3, 2)) == [
        "F0 F1 I0 W0 I1 W1 U",
        "F0 F1 I0 I1 W0 W1 U",
        "F0 I0 F1 I1 W0 W1 U",
    ]


def test_h1_in_unit_times_is_idle_for_as_many_slots_as_there_are_stages_before_the_last():
    assert str(build_schedule("zero-bubble-h1", 3, 4)).splitlines()[1:] == [
        "stage 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3 U",
        "stage 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3 U",
        "stage 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 U",
    ]


def test_v_on_2_workers_with_4_micro_batches():
    schedule = build_schedule("zero-bubble-v", 4, 4)
    assert schedule.placement == ((0, 3), (1, 2))
    assert rows(schedule) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 0U 3U",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3 1U 2U",
    ]
    assert schedule.worker_peak_in_flight == [4, 4]


def test_v_in_unit_times_is_never_idle_between_its_first_forward_and_its_last_backward():
    first, second = str(build_schedule("zero-bubble-v", 4, 4)).splitlines()[1:]
    assert first.split("|")[1].split().count(".") == 0
    assert (
        second.split("|")[1].split().count(".") == 1
    )  # the first forward of worker 1 awaits that of worker 0


def test_v_of_a_single_micro_batch():
    assert rows(build_schedule("zero-bubble-v", 4, 1)) == [
        "0F0 3F0 3I0 3W0 0I0 0W0 0U 3U",
        "1F0 2F0 2I0 2W0 1I0 1W0 1U 2U",
    ]


def test_interleaved_on_2_workers_of_2_stages_with_4_micro_batches():
    schedule = build_schedule("interleaved-zero-bubble", 4, 4)
    assert schedule.placement == ((0, 2), (1, 3))
    assert rows(schedule) == [
        "0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3 0U 2U",
        "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3 1U 3U",
    ]
    assert schedule.worker_peak_in_flight == [4, 4]


def test_interleaved_with_3_stages_per_worker_and_a_smaller_last_group():
    assert rows(build_schedule("interleaved-zero-bubble", 6, 1, stages_per_worker=3)) == [
        "0F0 2F0 4F0 4I0 4W0 2I0 2W0 0I0 0W0 0U 2U 4U",
        "1F0 3F0 5F0 5I0 5W0 3I0 3W0 1I0 1W0 1U 3U 5U",
    ]
    first, last = rows(build_schedule("interleaved-zero-bubble", 4, 3))
    assert first == "0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0I0 0W0 2F2 0I1 0W1 2I2 2W2 0I2 0W2 0U 2U"
    assert last == "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1I1 1W0 3F2 3I2 1W1 3W2 1I2 1W2 1U 3U"


# ---- bounds ----


@given(st.integers(1, 5), st.integers(2, 4), st.integers(1, 14))
def test_interleaved_holds_on_every_worker_a_micro_batch_of_each_stage(workers, per_worker, micro_batches):
    """As the first stage of 1F1B does: with V stages per worker, an activation is V times smaller."""
    schedule = build_schedule(
        "interleaved-zero-bubble", workers * per_worker, micro_batches, stages_per_worker=per_worker
    )
    schedule.validate()
    assert schedule.placement == tuple(tuple(range(w, workers * per_worker, workers)) for w in range(workers))
    most = per_worker * min(workers, micro_batches)
    assert max(schedule.worker_peak_in_flight) <= most
    if micro_batches % workers == 0:
        assert schedule.worker_peak_in_flight == [most] * workers


@given(st.integers(1, 7), st.integers(1, 16))
def test_h1_holds_as_much_as_the_first_stage_of_1f1b_and_no_more(stages, micro_batches):
    schedule = build_schedule("zero-bubble-h1", stages, micro_batches)
    schedule.validate()
    assert schedule.peak_in_flight == [min(stages, micro_batches)] * stages
    most = build_schedule("1f1b", stages, micro_batches).peak_in_flight[0]
    assert max(schedule.peak_in_flight) == most


@given(st.integers(1, 7), st.integers(1, 16))
def test_v_holds_as_much_as_1f1b_on_as_many_workers(workers, micro_batches):
    """A stage of the V is half as large, so its activation is half of one of 1F1B."""
    schedule = build_schedule("zero-bubble-v", 2 * workers, micro_batches)
    schedule.validate()
    assert schedule.placement == tuple((w, 2 * workers - 1 - w) for w in range(workers))
    most = build_schedule("1f1b", workers, micro_batches).peak_in_flight[0]
    assert max(schedule.worker_peak_in_flight) <= 2 * most
