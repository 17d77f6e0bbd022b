import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe.schedule import Action, Schedule, build_schedule
from avgpipe.simulation import Costs
from avgpipe.simulation.engine import compile_schedule, run
from tests.simulation.reference import (
    MS,
    check_outcome,
    folded_schedules,
    longest_paths,
    millisecond_costs,
    schedules,
    streaming_schedules,
)


def outcome_of(schedule, costs, pipelines, batches):
    program = compile_schedule(schedule, costs.of_stages(schedule.stages))
    return run(program, pipelines, batches)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 3))
def test_one_pipeline_takes_the_longest_paths(data, batches):
    schedule = data.draw(schedules() | streaming_schedules())
    costs, ms = data.draw(millisecond_costs(schedule.stages))
    expected = longest_paths(schedule, ms, batches)
    outcome = outcome_of(schedule, costs, 1, batches)
    found = {
        (r.stage, r.batch, schedule.columns[r.stage][r.position]): (r.start / MS, r.end / MS)
        for r in outcome.actions
    }
    assert found == expected


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 7))
def test_every_rule_holds_for_several_pipelines(data, pipelines, batches):
    schedule = data.draw(schedules() | streaming_schedules() | folded_schedules())
    costs, ms = data.draw(millisecond_costs(schedule.stages))
    outcome = outcome_of(schedule, costs, pipelines, batches)
    check_outcome(schedule, ms, outcome, pipelines, batches)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 5))
def test_in_flight_are_the_forwards_begun_whose_backward_has_not_ended(data, pipelines, batches):
    schedule = data.draw(schedules() | streaming_schedules() | folded_schedules())
    _, ms = data.draw(millisecond_costs(schedule.stages))
    # No action in no time: at an instant, nothing both begins and ends.
    costs = Costs([(f + 1) / 1000 for f in ms["F"]], [(b + 2) / 1000 for b in ms["B"]], 0.003)
    outcome = outcome_of(schedule, costs, pipelines, batches)
    for k, column in enumerate(schedule.columns):
        row = [(r, column[r.position].kind) for r in outcome.actions if r.stage == k]
        begun = [r.start for r, kind in row if kind == "F"]
        over = [r.end for r, kind in row if kind in "BW"]
        held = [sum(b <= t for b in begun) - sum(o <= t for o in over) for t in begun]
        assert outcome.peak_in_flight[k] == max(held)
        assert outcome.peak_in_flight[k] <= pipelines * schedule.peak_in_flight[k]


def test_a_device_with_several_pipelines_takes_backwards_first_then_the_oldest_batch():
    outcome = outcome_of(build_schedule("gpipe", 1, 2), Costs(0.001, 0.002), 2, 4)
    column = build_schedule("gpipe", 1, 2).columns[0]
    order = [f"{column[r.position]}/{r.batch}" for r in outcome.actions]
    assert order == [
        f"{action}/{j}" for j in range(4) for action in ("F0", "F1", "B0", "B1", "U")
    ]  # a backward is ready as soon as the forwards are done, so no other batch comes between


def test_a_pipeline_goes_on_where_its_own_update_is_done_though_other_stages_have_theirs_before_them():
    schedule = build_schedule("1f1b", 2, 1)
    costs = Costs(0.001, 0.001, 0.0, update_s=[0.0, 0.010])
    starts = {
        (r.stage, r.batch, str(schedule.columns[r.stage][r.position])): r.start // MS
        for r in outcome_of(schedule, costs, 1, 2).actions
    }
    assert starts[1, 0, "U"] == 3
    assert starts[0, 1, "F0"] == 4
    assert starts[1, 1, "F0"] == 13  # its input came at 5 and waited for the update


def test_a_serial_link_delays_what_a_free_one_does_not():
    schedule = build_schedule("gpipe", 2, 3)

    def arrivals(serial):
        costs = Costs(0.001, 0.001, 0.005, link_serial=serial)
        return [s.end // MS for s in outcome_of(schedule, costs, 1, 1).transfers if s.link == 0]

    assert arrivals(True) == [6, 11, 16]
    assert arrivals(False) == [6, 7, 8]


def test_directions_of_a_boundary_do_not_share_a_link():
    schedule = build_schedule("1f1b", 2, 2)
    transfers = outcome_of(schedule, Costs(0.001, 0.001, 0.010), 1, 1).transfers
    assert [(s.link, s.start // MS, s.end // MS) for s in transfers] == [
        (0, 1, 11),
        (0, 11, 21),
        (1, 13, 23),
        (1, 23, 33),
    ]


def starts_ms(schedule, costs, stage, kind):
    """Of the stage's actions of a kind, in one batch."""
    ran = outcome_of(schedule, costs, 1, 1).actions
    return [
        r.start // MS for r in ran if r.stage == stage and schedule.columns[stage][r.position].kind == kind
    ]


def test_directions_that_share_a_link_wait_for_each_other():
    """F1 is under way from 11 to 21, B0 of stage 1 ends at 13."""
    schedule = build_schedule("1f1b", 2, 2)
    costs = Costs(0.001, 0.001, 0.010, shared_links=[[(0, 1), (1, 0)]])
    assert starts_ms(schedule, costs, 0, "B") == [31, 41]


def test_boundaries_that_share_a_link_wait_for_each_other():
    """F1 of stage 0 leaves at 11; F0 of stage 1, which ends at 12, comes after it."""
    schedule = build_schedule("gpipe", 3, 2)
    alone, shared = (
        starts_ms(schedule, Costs(0.001, 0.001, 0.010, shared_links=groups), 2, "F")
        for groups in ((), [[(0, 1), (1, 2)]])
    )
    assert alone == [22, 32]
    assert shared == [31, 41]


def test_what_does_not_travel_waits_for_no_shared_link():
    """Both stages 1 and 2 are worker 1's: F0 goes on at once while F1 of stage 0 is on its way."""
    column = "F0 F1 B0 B1 U"
    order = ((0,) * 5, (1, 2, 1, 2, 2, 1, 2, 1, 2, 1))
    schedule = folded(order, column, column, column, micro_batches=2)
    costs = Costs(0.001, 0.001, 0.010, shared_links=[[(0, 1), (1, 2)]])
    assert starts_ms(schedule, costs, 2, "F") == [12, 22]


def test_a_latency_delays_and_occupies_nothing():
    schedule, costs = build_schedule("gpipe", 2, 3), Costs(0.001, 0.001, 0.002, latency_s=0.010)
    assert starts_ms(schedule, costs, 1, "F") == [13, 15, 17]


def test_a_split_backward_sends_its_gradient_before_the_weights_part():
    columns = ("F0 I0 W0 U", "F0 I0 W0 U")
    schedule = Schedule("h", 1, tuple(tuple(map(Action.parse, c.split())) for c in columns))
    outcome = outcome_of(schedule, Costs(0.001, 0.010, 0.002, input_backward_s=0.004), 1, 1)
    starts = [[r.start // MS for r in outcome.actions if r.stage == k] for k in range(2)]
    assert starts == [[0, 10, 14, 20], [3, 4, 8, 14]]


def folded(order, *columns, micro_batches=1):
    parsed = tuple(tuple(map(Action.parse, c.split())) for c in columns)
    return Schedule("folded", micro_batches, parsed, order=order)


def spell(schedule, outcome, worker):
    """What a worker did: 2F3/1 is F3 of stage 2 of batch 1."""
    return [
        f"{r.stage}{schedule.columns[r.stage][r.position]}/{r.batch}"
        for r in outcome.actions
        if schedule.worker_of(r.stage) == worker
    ]


def test_between_stages_of_one_worker_nothing_travels():
    schedule = folded(((0, 3, 3, 0, 0, 3), (1, 2, 2, 1, 1, 2)), *["F0 B0 U"] * 4)
    outcome = outcome_of(schedule, Costs(0.001, 0.002, 0.010), 1, 1)
    starts = {(r.stage, r.position): r.start // MS for r in outcome.actions}
    assert [starts[k, 0] for k in range(4)] == [0, 11, 12, 23]
    assert [starts[k, 1] for k in range(4)] == [50, 38, 36, 24]


def test_a_worker_with_one_pipeline_takes_what_comes_first_in_the_order():
    column = "F0 F1 B0 B1 U"
    for order in ((0, 1, 0, 1, 1, 0, 1, 0, 1, 0), (0, 0, 1, 1, 1, 1, 0, 0, 0, 1)):
        schedule = folded((order,), column, column, micro_batches=2)
        done = spell(schedule, outcome_of(schedule, Costs(0.001, 0.002), 1, 2), 0)
        rows = [schedule.rows().token(cell) for cell in schedule.rows().cells[0]]
        assert done == [f"{token}/{j}" for j in range(2) for token in rows]


def test_a_stage_runs_ahead_of_another_of_its_worker_that_waits():
    """The order names 2F0 first, which comes late: 0F1 need not wait for it."""
    column = "F0 F1 B0 B1 U"
    schedule = folded(
        ((0, 2, 0, 2, 2, 2, 0, 0, 0, 2), (1, 1, 1, 1, 1)), column, column, column, micro_batches=2
    )
    done = spell(schedule, outcome_of(schedule, Costs(0.001, 0.001, 0.005), 1, 1), 0)
    assert done == ["0F0/0", "0F1/0", "2F0/0", "2F1/0", "2B0/0", "2B1/0", "2U/0", "0B0/0", "0B1/0", "0U/0"]


def test_with_several_pipelines_backwards_come_before_the_order():
    column = "F0 F1 B0 B1 U"
    schedule = folded(((0, 1, 0, 1, 0, 1, 1, 0, 1, 0),), column, column, micro_batches=2)
    done = spell(schedule, outcome_of(schedule, Costs(0.001, 0.002), 2, 2), 0)
    assert done[:6] == ["0F0/0", "1F0/0", "0F1/0", "1F1/0", "1B0/0", "0B0/0"]


def test_with_several_pipelines_a_backward_comes_before_the_forward_of_an_older_batch():
    """When B0/0 ends, at 23, F2/0 could run, and B0/1 has come at 17."""
    schedule = build_schedule("1f1b", 2, 3)
    done = spell(schedule, outcome_of(schedule, Costs(0.001, [0.010, 0.001], 0.005), 2, 2), 0)
    assert done[:7] == ["0F0/0", "0F1/0", "0F0/1", "0F1/1", "0B0/0", "0B0/1", "0F2/0"]


def test_without_a_flush_a_batch_begins_while_the_one_before_is_under_way():
    schedule = build_schedule("pipedream", 2, 1)
    outcome = outcome_of(schedule, Costs(0.001, 0.002), 1, 3)
    starts = {
        k: [
            f"{schedule.columns[k][r.position]}/{r.batch}@{r.start // MS}"
            for r in outcome.actions
            if r.stage == k
        ]
        for k in range(2)
    }
    assert starts == {
        0: ["F0/0@0", "F0/1@1", "B0/0@4", "U/0@6", "F0/2@6", "B0/1@7", "U/1@9", "B0/2@10", "U/2@12"],
        1: ["F0/0@1", "B0/0@2", "U/0@4", "F0/1@4", "B0/1@5", "U/1@7", "F0/2@7", "B0/2@8", "U/2@10"],
    }
    assert outcome.peak_in_flight == [2, 1]


def test_times_that_are_equal_on_paper_are_equal():
    """0.1 + 0.2 is not 0.3 for floats; a device must not choose before an input that arrives at that time."""
    schedule = build_schedule("1f1b", 3, 4)
    outcome = outcome_of(schedule, Costs([0.1, 0.2, 0.3], [0.3, 0.2, 0.1], 0.1), 2, 4)
    assert all(r.start % (100 * MS) == 0 for r in outcome.actions)


@pytest.mark.parametrize("pipelines", [1, 3])
def test_an_evaluation_takes_well_under_a_second(pipelines):
    begun = time.process_time()
    outcome_of(build_schedule("advance-forward", 6, 12), Costs(0.01, 0.02, 0.0087), pipelines, 20)
    assert time.process_time() - begun < 0.5
