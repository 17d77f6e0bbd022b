"""Links, sums, several actions at once, draws: each alone, with times worked out by hand."""

import pytest

from avgpipe.planning import Costs
from avgpipe.schedule import build_schedule
from tests.planning.outcomes import actions_of, outcome_of
from tests.planning.reference import MS


def starts_ms(schedule, costs, stage, kind, pipelines=1, batches=1):
    """Of the stage's actions of a kind."""
    found = actions_of(outcome_of(schedule, costs, pipelines, batches))
    return [r.start // MS for r in found if r.stage == stage and r.action.kind == kind]


def test_a_serial_link_delays_what_a_free_one_does_not():
    schedule = build_schedule("gpipe", 2, 3)
    assert starts_ms(schedule, Costs(0.001, 0.001, 0.005), 1, "F") == [6, 11, 16]
    assert starts_ms(schedule, Costs(0.001, 0.001, 0.005, link_serial=False), 1, "F") == [6, 7, 8]


def test_directions_of_a_boundary_do_not_share_a_link():
    schedule, costs = build_schedule("1f1b", 2, 2), Costs(0.001, 0.001, 0.010)
    assert starts_ms(schedule, costs, 1, "F") == [11, 21]
    assert starts_ms(schedule, costs, 0, "B") == [23, 33]


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


def test_a_latency_delays_and_occupies_nothing():
    schedule, costs = build_schedule("gpipe", 2, 3), Costs(0.001, 0.001, 0.002, latency_s=0.010)
    assert starts_ms(schedule, costs, 1, "F") == [13, 15, 17]


def test_gradients_may_take_longer_than_activations():
    schedule, costs = build_schedule("1f1b", 2, 1), Costs(0.001, 0.001, 0.002, gradient_transfer_s=0.005)
    assert starts_ms(schedule, costs, 1, "F") == [3]
    assert starts_ms(schedule, costs, 0, "B") == [10]


def test_micro_batches_may_differ():
    schedule = build_schedule("gpipe", 2, 2)
    costs = Costs([[0.001, 0.005], 0.002], [0.001, [0.003, 0.004]], [[0.001, 0.002]])
    assert starts_ms(schedule, costs, 1, "F") == [2, 8]
    assert starts_ms(schedule, costs, 1, "B") == [10, 13]


def test_an_update_waits_for_the_sum_while_another_pipeline_computes():
    schedule, costs = build_schedule("1f1b", 1, 1), Costs(0.001, 0.001, update_s=0.001, allreduce_s=0.010)
    done = [(str(r.action), r.batch, r.start // MS) for r in actions_of(outcome_of(schedule, costs, 2, 2))]
    assert done == [("F0", 0, 0), ("B0", 0, 1), ("F0", 1, 2), ("B0", 1, 3), ("U", 0, 12), ("U", 1, 14)]


def test_two_actions_at_once_are_both_slower():
    """3 ms of work in 4 ms where two together reach 1.5 times the speed of one."""
    schedule = build_schedule("1f1b", 1, 1)
    costs = Costs(0.003, 0.003, concurrency_gain=(1, 1.5))
    done = [(str(r.action), r.batch, r.end // MS) for r in actions_of(outcome_of(schedule, costs, 2, 2))]
    assert done == [("F0", 0, 4), ("F0", 1, 4), ("B0", 0, 8), ("B0", 1, 8), ("U", 0, 8), ("U", 1, 8)]
    assert outcome_of(schedule, costs, 1, 2).makespan == 12 * MS


def test_draws_are_the_same_on_every_machine():
    schedule = build_schedule("1f1b", 2, 2)
    costs = Costs(1, 2, 0.5, jitter=0.1, stragglers=(0.3, 4), seed=7)
    outcome = outcome_of(schedule, costs, 1, 1)
    assert outcome.makespan == 19736455128863
    assert outcome.makespan != outcome_of(schedule, Costs(1, 2, 0.5, jitter=0.1, seed=8), 1, 1).makespan


def test_jitter_has_the_mean_and_the_deviation_that_it_is_given():
    schedule = build_schedule("gpipe", 1, 20_000)
    records = outcome_of(schedule, Costs(1, 1, jitter=0.1), 1, 1).records[:-1]
    times = (records["end"] - records["start"]) / 1e12
    assert times.mean() == pytest.approx(1, abs=0.003)
    assert times.std() == pytest.approx(0.1, rel=0.03)
    assert abs(times - 1).max() < 0.347


def test_stragglers_are_as_many_and_as_slow_as_said():
    records = outcome_of(build_schedule("gpipe", 1, 20_000), Costs(1, 1, stragglers=(0.05, 3)), 1, 1).records[
        :-1
    ]
    times = (records["end"] - records["start"]) // 10**12
    assert set(times.tolist()) == {1, 3}
    assert (times == 3).mean() == pytest.approx(0.05, rel=0.1)
