import pytest
from hypothesis import given, settings

from avgpipe.planning import Costs, makespan_bounds, predict
from avgpipe.schedule import build_schedule
from tests.planning.problems import cases


@pytest.mark.slow
@settings(max_examples=600)
@given(cases())
def test_no_run_is_below_a_bound(case):
    schedule, problem, pipelines, batches = case
    costs = problem.costs()
    bounds = makespan_bounds(schedule, costs, pipelines=pipelines, batches=batches)
    found = predict(schedule, costs, pipelines=pipelines, batches=batches)
    assert bounds.makespan_s <= found.makespan_s + 1e-9


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "advance-forward"])
def test_a_uniform_pipeline_without_transfers_reaches_its_bound(name):
    bounds = makespan_bounds(build_schedule(name, 4, 8), Costs(1, 2, update_s=0.5))
    assert bounds.fill_and_drain_s == bounds.makespan_s == 11 * 3 + 0.5
    assert bounds.busiest_device_s == 24.5
    assert bounds.critical_path_s == 12.5
    assert bounds.busiest_link_s == 0


def test_transfers_are_on_the_way_of_a_micro_batch():
    bounds = makespan_bounds(build_schedule("1f1b", 3, 1), Costs(1, 2, 3, latency_s=0.25, allreduce_s=4))
    assert bounds.critical_path_s == bounds.fill_and_drain_s == 9 + 4 * 3.25 + 4


def test_a_slow_link_bounds_a_run():
    schedule = build_schedule("gpipe", 3, 8)
    assert makespan_bounds(schedule, Costs(1, 1, [1, 5])).busiest_link_s == 40
    shared = Costs(1, 1, [1, 5], shared_links=[[(0, 1), (1, 2)]])
    assert makespan_bounds(schedule, shared, batches=2).makespan_s == 96
    assert makespan_bounds(schedule, Costs(1, 1, 5, link_serial=False)).busiest_link_s == 0


def test_nothing_travels_inside_a_worker():
    schedule = build_schedule("zero-bubble-v", 2, 3)
    assert makespan_bounds(schedule, Costs(1, 2, 100)).makespan_s == 18


def test_the_greatest_of_unequal_micro_batches_is_a_bound():
    bounds = makespan_bounds(build_schedule("1f1b", 2, 3), Costs([[1, 2, 9], 1], 1))
    assert bounds.critical_path_s == 9 + 1 + 2


def test_two_at_once_may_be_quicker_and_jitter_too():
    schedule = build_schedule("1f1b", 1, 4)
    assert makespan_bounds(schedule, Costs(1, 2, concurrency_gain=(1, 1.5))).busiest_device_s == 8
    assert makespan_bounds(schedule, Costs(1, 2, jitter=0.1)).busiest_device_s == pytest.approx(
        12 * 0.6536, rel=1e-4
    )


def test_other_things_are_refused_as_by_a_simulation():
    with pytest.raises(TypeError, match=r"costs=1: must be avgpipe\.Costs"):
        makespan_bounds(build_schedule("1f1b", 2, 2), 1)
