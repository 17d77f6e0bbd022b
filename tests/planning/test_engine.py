import time

import pytest
from hypothesis import given, settings

from avgpipe.planning import Costs
from avgpipe.planning.engine import compile_schedule, run
from avgpipe.schedule import Action, Row, Schedule, build_schedule
from tests.planning.outcomes import actions_of, outcome_of
from tests.planning.problems import cases
from tests.planning.reference import MS, Reference


def busy_ticks(schedule, actions):
    """Per worker, the length of the union of its actions."""
    busy = [0] * schedule.workers
    reached = [0] * schedule.workers
    for ran in sorted(actions, key=lambda ran: ran.start):
        w = ran.worker
        busy[w] += max(0, ran.end - max(ran.start, reached[w]))
        reached[w] = max(reached[w], ran.end)
    return busy


@pytest.mark.slow
@settings(max_examples=2500)
@given(cases())
def test_every_tick_is_that_of_the_reference(case):
    schedule, problem, pipelines, batches = case
    expected = Reference(schedule, problem, pipelines, batches)
    question = compile_schedule(schedule, problem.costs())
    outcome = run(question, pipelines, batches, events=True)
    assert sorted(actions_of(outcome), key=repr) == sorted(expected.ran, key=repr)
    assert outcome.peak_in_flight.tolist() == expected.in_flight
    assert outcome.peak_held_bytes.tolist() == expected.held_bytes
    assert outcome.busy.tolist() == busy_ticks(schedule, expected.ran)
    assert outcome.batch_end.tolist() == [
        max(ran.end for ran in expected.ran if ran.batch == j) for j in range(batches)
    ]
    assert outcome.makespan == max(outcome.batch_end)
    assert outcome.actions == len(expected.ran)
    without = run(question, pipelines, batches)
    assert without.records is None
    for name in ("makespan", "actions"):
        assert getattr(without, name) == getattr(outcome, name)
    for name in ("busy", "batch_end", "peak_in_flight", "peak_held_bytes"):
        assert getattr(without, name).tolist() == getattr(outcome, name).tolist()


@settings(max_examples=150)
@given(cases())
def test_rows_of_actions_run_as_the_loops_that_they_come_from(case):
    schedule, problem, pipelines, batches = case
    actions = Schedule("actions", schedule.micro_batches, [Row(tuple(row)) for row in schedule.rows])
    one, two = (outcome_of(s, problem.costs(), pipelines, batches) for s in (schedule, actions))
    assert one.records.tolist() == two.records.tolist()


@settings(max_examples=150)
@given(cases())
def test_records_are_in_the_order_of_their_starts(case):
    schedule, problem, pipelines, batches = case
    starts = outcome_of(schedule, problem.costs(), pipelines, batches).records["start"].tolist()
    assert starts == sorted(starts)


def test_a_device_with_several_pipelines_takes_backwards_first_then_the_oldest_batch():
    outcome = outcome_of(build_schedule("gpipe", 1, 2), Costs(0.001, 0.002), 2, 4)
    order = [f"{r.action}/{r.batch}" for r in actions_of(outcome)]
    assert order == [
        f"{action}/{j}" for j in range(4) for action in ("F0", "F1", "B0", "B1", "U")
    ]  # a backward is ready as soon as the forwards are done, so no other batch comes between


def test_a_pipeline_goes_on_where_its_own_update_is_done_though_other_stages_have_theirs_before_them():
    schedule = build_schedule("1f1b", 2, 1)
    costs = Costs(0.001, 0.001, 0.0, update_s=[0.0, 0.010])
    starts = {
        (r.stage, r.batch, str(r.action)): r.start // MS
        for r in actions_of(outcome_of(schedule, costs, 1, 2))
    }
    assert starts[1, 0, "U"] == 3
    assert starts[0, 1, "F0"] == 4
    assert starts[1, 1, "F0"] == 13  # its input came at 5 and waited for the update


def test_a_split_backward_sends_its_gradient_before_the_weights_part():
    columns = ("F0 I0 W0 U", "F0 I0 W0 U")
    schedule = Schedule("h", 1, tuple(tuple(map(Action.parse, c.split())) for c in columns))
    outcome = outcome_of(schedule, Costs(0.001, 0.010, 0.002, input_backward_s=0.004), 1, 1)
    starts = [[r.start // MS for r in actions_of(outcome) if r.stage == k] for k in range(2)]
    assert starts == [[0, 10, 14, 20], [3, 4, 8, 14]]


def folded(order, *columns, micro_batches=1):
    rest = [iter(column.split()) for column in columns]
    return Schedule(
        "folded", micro_batches, [[Action.parse(f"{k}{next(rest[k])}") for k in row] for row in order]
    )


def spell(schedule, outcome, worker):
    """What a worker did: 2F3/1 is F3 of stage 2 of batch 1."""
    return [f"{r.stage}{r.action}/{r.batch}" for r in actions_of(outcome) if r.worker == worker]


def test_between_stages_of_one_worker_nothing_travels():
    schedule = folded(((0, 3, 3, 0, 0, 3), (1, 2, 2, 1, 1, 2)), *["F0 B0 U"] * 4)
    outcome = outcome_of(schedule, Costs(0.001, 0.002, 0.010), 1, 1)
    starts = {(r.stage, r.action.kind): r.start // MS for r in actions_of(outcome)}
    assert [starts[k, "F"] for k in range(4)] == [0, 11, 12, 23]
    assert [starts[k, "B"] for k in range(4)] == [50, 38, 36, 24]


def test_a_worker_with_one_pipeline_takes_what_comes_first_in_the_order():
    column = "F0 F1 B0 B1 U"
    for order in ((0, 1, 0, 1, 1, 0, 1, 0, 1, 0), (0, 0, 1, 1, 1, 1, 0, 0, 0, 1)):
        schedule = folded((order,), column, column, micro_batches=2)
        done = spell(schedule, outcome_of(schedule, Costs(0.001, 0.002), 1, 2), 0)
        assert done == [f"{action}/{j}" for j in range(2) for action in schedule.rows[0]]


def test_a_row_runs_as_it_stands_though_a_later_action_could_run():
    """2F0 comes late: 0F1, which is behind it, waits too."""
    column = "F0 F1 B0 B1 U"
    schedule = folded(
        ((0, 2, 0, 2, 2, 2, 2, 0, 0, 0), (1, 1, 1, 1, 1)), column, column, column, micro_batches=2
    )
    outcome = outcome_of(schedule, Costs(0.001, 0.001, 0.005), 1, 1)
    assert spell(schedule, outcome, 0) == [f"{action}/0" for action in schedule.rows[0]]
    starts = [r.start // MS for r in actions_of(outcome) if r.worker == 0]
    assert starts[:3] == [0, 12, 13]


def test_with_several_pipelines_backwards_come_before_the_forwards_of_another():
    able = folded(((0, 1, 1, 0, 0, 1, 1, 0, 1, 0),), "F0 B0 F1 B1 U", "F0 B0 F1 B1 U", micro_batches=2)
    done = spell(able, outcome_of(able, Costs(0.001, 0.002), 2, 2), 0)
    assert done[:6] == ["0F0/0", "1F0/0", "1B0/0", "0B0/0", "0F1/0", "1F1/0"]


def test_with_several_pipelines_a_backward_comes_before_the_forward_of_an_older_batch():
    """When B0/0 ends, at 23, F2/0 could run, and B0/1 has come at 17."""
    schedule = build_schedule("1f1b", 2, 3)
    done = spell(schedule, outcome_of(schedule, Costs(0.001, [0.010, 0.001], 0.005), 2, 2), 0)
    assert done[:7] == ["0F0/0", "0F1/0", "0F0/1", "0F1/1", "0B0/0", "0B0/1", "0F2/0"]


def test_a_replica_waits_with_its_update_for_the_others():
    """Micro-batch 1 comes back at 9 and its backward ends at 10; the sum takes 7."""
    schedule = build_schedule("1f1b", 2, 2, replication=[2, 1])
    costs = Costs(0.001, 0.001, 0.002, update_s=0.001, allreduce_s=[0.007, 0])
    ran = {(r.worker, str(r.action)): r.start // MS for r in actions_of(outcome_of(schedule, costs, 1, 1))}
    assert (ran[0, "F0"], ran[1, "F1"], ran[2, "F0"], ran[2, "F1"]) == (0, 0, 3, 5)
    assert (ran[0, "B0"], ran[1, "B1"], ran[0, "U"], ran[1, "U"]) == (7, 9, 17, 17)


def test_without_a_flush_a_batch_begins_while_the_one_before_is_under_way():
    schedule = build_schedule("pipedream", 2, 1)
    outcome = outcome_of(schedule, Costs(0.001, 0.002), 1, 3)
    starts = {
        k: [f"{r.action}/{r.batch}@{r.start // MS}" for r in actions_of(outcome) if r.stage == k]
        for k in range(2)
    }
    assert starts == {
        0: ["F0/0@0", "F0/1@1", "B0/0@4", "U/0@6", "F0/2@6", "B0/1@7", "U/1@9", "B0/2@10", "U/2@12"],
        1: ["F0/0@1", "B0/0@2", "U/0@4", "F0/1@4", "B0/1@5", "U/1@7", "F0/2@7", "B0/2@8", "U/2@10"],
    }
    assert outcome.peak_in_flight.tolist() == [2, 1]


def test_times_that_are_equal_on_paper_are_equal():
    """0.1 + 0.2 is not 0.3 for floats; a device must not choose before an input that arrives at that time."""
    schedule = build_schedule("1f1b", 3, 4)
    outcome = outcome_of(schedule, Costs([0.1, 0.2, 0.3], [0.3, 0.2, 0.1], 0.1), 2, 4)
    assert all(r.start % (100 * MS) == 0 for r in actions_of(outcome))


@pytest.mark.parametrize("pipelines", [1, 3])
def test_an_evaluation_takes_well_under_a_second(pipelines):
    begun = time.process_time()
    outcome_of(build_schedule("advance-forward", 6, 12), Costs(0.01, 0.02, 0.0087), pipelines, 20)
    assert time.process_time() - begun < 0.5
