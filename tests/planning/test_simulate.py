import json

import pytest

import avgpipe
from avgpipe.errors import ScheduleError
from avgpipe.planning import Costs, simulate
from avgpipe.schedule import Action, Schedule, build_schedule
from avgpipe.schedule.row import Event
from avgpipe.timeline.timeline import Timeline

LINE = Costs(0.010, 0.020, 0.0087)


def test_the_public_names():
    assert avgpipe.simulate is simulate
    assert avgpipe.Costs is Costs


def test_events_are_rows_with_times_in_seconds():
    timeline = simulate(build_schedule("1f1b", 2, 1), Costs([0.1, 0.2], [0.3, 0.4], 0.05, update_s=0.01))
    assert isinstance(timeline, Timeline)
    assert sorted(timeline.events, key=lambda event: (event.stage, event.kind)) == [
        Event(0, 0, 0, 0, "B", 0.8, 1.1),
        Event(0, 0, 0, 0, "F", 0.0, 0.1),
        Event(0, 0, 0, None, "U", 1.1, 1.11),
        Event(1, 0, 0, 0, "B", 0.35, 0.75),
        Event(1, 0, 0, 0, "F", 0.15, 0.35),
        Event(1, 0, 0, None, "U", 0.75, 0.76),
    ]
    assert timeline.makespan_s == 1.11


@pytest.mark.parametrize(
    ("name", "milliseconds"), [("advance-forward", 597), ("1f1b", 753.6), ("gpipe", 597)]
)
def test_one_batch_on_six_stages(name, milliseconds):
    """t_f = 10, t_b = 20, 8.7 per transfer, M = 12. A flush costs at least (K-1)(t_f + t_b + 2 transfers): 597."""
    assert simulate(build_schedule(name, 6, 12), LINE).makespan_s == milliseconds / 1000


def test_without_transfers_all_schedules_take_the_textbook_time():
    for name in ("1f1b", "gpipe", "advance-forward"):
        timeline = simulate(build_schedule(name, 4, 8), Costs(1, 2))
        assert timeline.makespan_s == (8 + 3) * 3
        assert timeline.busy_s == [24] * 4
        assert timeline.bubble_fraction == pytest.approx(3 / 11)


def test_batches_belong_to_pipelines_in_turn():
    timeline = simulate(build_schedule("1f1b", 2, 2), LINE, pipelines=3, batches=7)
    assert {(event.batch, event.pipeline) for event in timeline.events} == {(j, j % 3) for j in range(7)}
    assert len(timeline.events) == 7 * 2 * 5


def test_more_pipelines_than_batches_leave_some_without_work():
    assert {event.pipeline for event in simulate(build_schedule("1f1b", 2, 2), LINE, pipelines=4).events} == {
        0
    }


def test_memory_is_the_weights_of_all_pipelines_and_the_activations_in_flight():
    schedule = build_schedule("1f1b", 3, 6)
    costs = Costs(1, 2, activation_bytes=[100, 200, 300], weight_bytes=[1000, 2000, 3000])
    assert simulate(schedule, costs).peak_memory_bytes == (1300, 2400, 3300)
    assert simulate(schedule, costs, pipelines=2, batches=4).peak_memory_bytes[2] in (6300, 6600)
    assert simulate(schedule, Costs(1, 2, activation_bytes=7)).peak_memory_bytes == (21, 14, 7)
    assert simulate(schedule, Costs(1, 2, weight_bytes=7), pipelines=2).peak_memory_bytes == (14,) * 3
    assert simulate(schedule, LINE).peak_memory_bytes is None


def test_the_memory_of_a_worker_is_that_of_its_stages_together():
    schedule = build_schedule("interleaved-1f1b", 4, 2)
    assert schedule.worker_peak_in_flight == [4, 3]
    costs = Costs(1, 2, activation_bytes=[1, 10, 100, 1000], weight_bytes=[5, 50, 500, 5000])
    timeline = simulate(schedule, costs)
    assert timeline.stages == 2
    assert timeline.peak_memory_bytes == (2 * 1 + 2 * 100 + 505, 2 * 10 + 1000 + 5050)
    assert simulate(schedule, costs, pipelines=2).peak_memory_bytes == (202 + 1010, 1020 + 10100)


def test_rows_are_workers_and_a_worker_may_have_several_stages():
    timeline = simulate(build_schedule("zero-bubble-v", 4, 1), Costs(1, 2, 5))
    found = {(event.worker, event.kind, event.stage): event.start_s for event in timeline.events}
    assert timeline.stages == 2
    assert found[0, "F", 0] == 0.0
    assert found[1, "F", 1] == 6.0
    assert found[1, "F", 2] == 7.0
    assert found[0, "F", 3] == 13.0
    assert all(e.worker == e.stage for e in simulate(build_schedule("1f1b", 2, 2), LINE).events)


def test_where_workers_have_several_stages_reports_make_no_neighbours_of_them(tmp_path):
    timeline = simulate(build_schedule("zero-bubble-v", 4, 2), Costs(0.010, 0.020, 0.005))
    timeline.to_chrome_trace(tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [row for row in rows if row["ph"] == "X"]
    assert {"F0", "I1", "W1", "U"} <= {row["name"] for row in slices}
    assert {row["args"]["stage"] for row in slices} == {0, 1, 2, 3}
    assert not [row for row in rows if row["ph"] in "sf"]
    assert {(e.worker, e.stage) for e in Timeline.from_chrome_trace(tmp_path / "trace.json").events} == {
        (0, 0), (1, 1), (1, 2), (0, 3)
    }  # fmt: skip
    assert "computing" in timeline.explain()


def test_two_runs_are_the_same():
    costs = Costs([0.1, 0.21, 0.33], [0.2, 0.19, 0.4], 0.07)
    schedule = build_schedule("advance-forward", 3, 5)
    assert simulate(schedule, costs, pipelines=2, batches=6) == simulate(
        schedule, costs, pipelines=2, batches=6
    )


def test_a_schedule_that_cannot_be_run_is_refused():
    wrong = Schedule("by hand", 1, ((Action("B", 0), Action("F", 0), Action("U")),))
    with pytest.raises(ScheduleError, match="stage 0, position 0, B0"):
        simulate(wrong, LINE)


@pytest.mark.parametrize("value", [0, -1, True, 1.0, None])
@pytest.mark.parametrize("which", ["pipelines", "batches"])
def test_counts_must_be_positive_ints(which, value):
    with pytest.raises(ValueError, match=f"{which}={value!r}: must be an int of at least 1"):
        simulate(build_schedule("1f1b", 2, 2), LINE, **{which: value})


def test_other_things_are_refused_by_their_type():
    with pytest.raises(TypeError, match="schedule='1f1b': must be a Schedule"):
        simulate("1f1b", LINE)
    with pytest.raises(TypeError, match=r"costs=0\.1: must be avgpipe\.Costs"):
        simulate(build_schedule("1f1b", 2, 2), 0.1)


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ValueError, match="forward_s has 3 entries for 2 stages"):
        simulate(build_schedule("1f1b", 2, 2), Costs([1, 2, 3], 1))
