import pytest
from hypothesis import given, settings

from avgpipe.errors import ScheduleError
from avgpipe.planning import Costs, predict, simulate
from avgpipe.schedule import Action, Schedule, build_schedule
from tests.planning.problems import cases


@settings(max_examples=100)
@given(cases())
def test_it_is_what_the_timeline_says(case):
    schedule, problem, pipelines, batches = case
    options = {"pipelines": pipelines, "batches": batches}
    timeline, found = (
        simulate(schedule, problem.costs(), **options),
        predict(schedule, problem.costs(), **options),
    )
    assert found.makespan_s == timeline.makespan_s
    assert found.busy_s == pytest.approx(timeline.busy_s, abs=1e-12)
    assert found.bubble_fraction == pytest.approx(timeline.bubble_fraction, abs=1e-12)
    assert list(found.peak_memory_bytes or ()) == list(timeline.peak_memory_bytes or ())
    assert found.actions == len(timeline.events)
    assert found.batch_end_s == tuple(
        max(event.end_s for event in timeline.events if event.batch == j) for j in range(batches)
    )


def test_memory_that_is_not_asked_for_is_none():
    assert predict(build_schedule("1f1b", 2, 2), Costs(1, 2)).peak_memory_bytes is None


def test_nothing_that_takes_time_leaves_no_bubble():
    assert predict(build_schedule("1f1b", 2, 2), Costs(0, 0)).bubble_fraction == 0


def test_wrong_arguments_are_refused():
    wrong = Schedule("by hand", 1, ((Action("B", 0), Action("F", 0), Action("U")),))
    with pytest.raises(ScheduleError, match="stage 0, position 0, B0"):
        predict(wrong, Costs(1, 1))
    with pytest.raises(ValueError, match="pipelines=0: must be an int of at least 1"):
        predict(build_schedule("1f1b", 2, 2), Costs(1, 1), pipelines=0)
    with pytest.raises(
        ValueError, match=r"forward_s\[0\] has 3 entries for 2 micro-batches: give one for each"
    ):
        predict(build_schedule("1f1b", 1, 2), Costs([[1, 2, 3]], 1))
    with pytest.raises(ValueError, match=r"shared_links has \(2, 3\) for 2 stages, 0..1"):
        predict(build_schedule("1f1b", 2, 2), Costs(1, 1, shared_links=[[(0, 1), (2, 3)]]))
    with pytest.raises(ValueError, match="batches=2000000000, pipelines=1: must be at most"):
        predict(build_schedule("1f1b", 1, 1), Costs(1, 1), batches=2_000_000_000)


@pytest.mark.parametrize("name", ["forward_s", "transfer_s", "latency_s", "allreduce_s", "update_s"])
def test_times_too_long_to_count_are_refused(name):
    with pytest.raises(ValueError, match="too long to simulate: a single one must be below 288230 s"):
        predict(build_schedule("1f1b", 2, 2), Costs(**{"forward_s": 1, "backward_s": 1, name: 1e6}))


@pytest.mark.parametrize("pipelines", [1, 2])
@pytest.mark.parametrize("slow", ["forward_s", "transfer_s"])
def test_runs_too_long_to_count_are_refused(slow, pipelines):
    costs = Costs(**{"forward_s": 1, "backward_s": 1, slow: 2e5})
    with pytest.raises(ValueError, match="a run below 4611686 s; costs are in seconds"):
        predict(build_schedule("gpipe", 2, 200), costs, pipelines=pipelines, batches=2)
