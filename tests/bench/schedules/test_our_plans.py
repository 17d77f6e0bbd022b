"""Our rows as values: for K = 6, M = 12, 10 + 20 ms where nothing else is said."""

import pytest

from avgpipe.bench.schedules.our_plans import OurCase, our_cases, simulated_s, stage_costs
from avgpipe.bench.schedules.rows import Unavailable
from avgpipe.bench.schedules.settings import ScheduleSettings
from avgpipe.plan import Plan

# name: stages, pipelines and micro-batches of the plan, its batches in one of 12, batches under way
CASES = {
    "1f1b": (6, 1, 12, 1, 1),
    "all-forward-all-backward": (6, 1, 12, 1, 1),
    "advance-forward, N = 1": (6, 1, 12, 1, 1),
    "advance-forward, N = 2": (6, 2, 12, 1, 2),
    "advance-forward, N = 3": (6, 3, 12, 1, 3),
    "interleaved-1f1b, 2 a rank": (12, 1, 12, 1, 1),
    "zero-bubble-h1": (6, 1, 12, 1, 1),
    "zero-bubble-v, 2 a rank": (12, 1, 12, 1, 1),
    "pipedream": (6, 1, 1, 12, 2),
    "pipedream-2bw": (6, 1, 12, 1, 2),
    "ea-pipe": (6, 6, 1, 12, 2),
    "data-parallel": (1, 1, 12, 1, 1),
    "model-parallel": (6, 1, 1, 12, 1),
}
# Milliseconds: without a line, and where a tensor takes 10 ms. Those of flushes without a line are in the papers.
SIMULATED = {
    "1f1b": 510,
    "all-forward-all-backward": 510,
    "advance-forward, N = 1": 510,
    "advance-forward, N = 2": 360,
    "advance-forward, N = 3": 360,
    "interleaved-1f1b, 2 a rank": 435,  # (M + (K-1)/2) (t_f + t_b)
    "zero-bubble-h1": 410,  # M (t_f + t_b) + (K-1) (t_f + t_b - 2 t_w), t_w half of t_b
    "zero-bubble-v, 2 a rank": 360,
    "pipedream": 360,
    "pipedream-2bw": 360,
    "ea-pipe": 360,
    "data-parallel": 360,
    "model-parallel": 2160,  # M K (t_f + t_b)
}
ALL = ScheduleSettings(only=("all",))


def by_name(settings=ALL):
    return {case.name.removeprefix("avgpipe "): case for case in our_cases(settings)}


def test_every_row_is_a_plan_for_all_workers():
    found = by_name()
    assert list(found) == list(CASES)
    for name, case in found.items():
        plan = case.plan
        shape = (plan.stages, plan.pipelines, plan.micro_batches, case.per_batch, case.pipelines)
        assert shape == CASES[name], name
        assert plan.workers == 6, name
        assert plan.partition == tuple(range(1, plan.stages))


def test_only_rows_that_are_asked_for_are_there():
    assert list(by_name(ScheduleSettings(only=("ea-pipe", "1f1b", "torch-gpipe")))) == ["1f1b", "ea-pipe"]


@pytest.mark.parametrize("name", CASES)
def test_all_rows_do_the_same_work(name):
    stages = CASES[name][0]
    assert sum(stage_costs(ALL, stages)) * stages == pytest.approx(6 * 0.03)


@pytest.mark.parametrize(("name", "ms"), SIMULATED.items())
def test_the_simulated_time_is_that_of_m_micro_batches(name, ms):
    assert simulated_s(by_name()[name], ALL) == pytest.approx(ms / 1e3)


def test_a_line_counts_where_tensors_travel():
    settings = ScheduleSettings(only=("all",), rate_bits_per_s=8e8, activation_bytes=10**6)
    found = by_name(settings)
    assert simulated_s(found["all-forward-all-backward"], settings) == pytest.approx(0.51 + 2 * 5 * 0.01)
    assert simulated_s(found["model-parallel"], settings) == pytest.approx(12 * (6 * 0.03 + 2 * 5 * 0.01))
    assert simulated_s(found["data-parallel"], settings) == pytest.approx(0.36)


def test_all_that_a_worker_sends_shares_its_line():
    settings = ScheduleSettings(
        stages=3,
        micro_batches=8,
        only=("all-forward-all-backward",),
        rate_bits_per_s=8e7,
        activation_bytes=10**6,
    )
    case = by_name(settings)["all-forward-all-backward"]
    # The worker in the middle sends 8 activations and 8 gradients, of 0.1 s each.
    assert 1.6 < simulated_s(case, settings) < 2.2
    assert simulated_s(case, settings, line_bytes_per_s=2e7) < 1.2
    unlimited = ScheduleSettings(stages=3, micro_batches=8, only=("all-forward-all-backward",))
    assert simulated_s(case, unlimited, line_bytes_per_s=2e7) == pytest.approx(0.3)


def test_actions_may_take_what_was_measured():
    settings = ScheduleSettings(stages=2, micro_batches=4, only=("1f1b", "zero-bubble-h1"))
    found = by_name(settings)
    whole = {"F": [0.011, 0.011], "B": [0.021, 0.021], "U": [0.001, 0.001]}
    assert simulated_s(found["1f1b"], settings, actions=whole) == pytest.approx(5 * 0.032 + 0.001)
    parts = {"F": [0.011, 0.011], "I": [0.0, 0.011], "W": [0.021, 0.010], "U": [0.001, 0.001]}
    assert simulated_s(found["zero-bubble-h1"], settings, actions=parts) == pytest.approx(
        4 * 0.032 + 0.012 + 0.001
    )


def test_workers_that_divide_the_micro_batches_unevenly_wait_for_the_busiest():
    settings = ScheduleSettings(stages=4, micro_batches=6, only=("data-parallel",))
    assert simulated_s(by_name(settings)["data-parallel"], settings) == pytest.approx(2 * 4 * 0.03)


def test_what_a_plan_refuses_is_left_out_with_the_reason():
    settings = ScheduleSettings(micro_batches=4, only=("pipedream-2bw", "data-parallel", "pipedream"))
    found = by_name(settings)
    assert isinstance(found["pipedream-2bw"], Unavailable)
    assert "4 are fewer than 6" in found["pipedream-2bw"].reason
    assert "at least 6 micro-batches" in found["data-parallel"].reason
    assert isinstance(found["pipedream"], OurCase)


@pytest.mark.parametrize(
    ("plan", "per_batch", "pipelines"),
    [
        (Plan(stages=6, schedule="pipedream"), 1, 6),
        (
            Plan(stages=6, schedule="pipedream"),
            2,
            4,
        ),  # 6 batches of the plan: 3, and what of a fourth is begun
        (Plan(stages=6, schedule="pipedream-2bw", micro_batches=6), 1, 2),
        (Plan(stages=6, schedule="pipedream-2bw", micro_batches=6, weights="stash"), 1, 2),
        (Plan(stages=1, schedule="pipedream"), 1, 1),
        (Plan(stages=6, pipelines=6), 4, 3),  # 12 batches are two rounds of the pipelines
        (Plan(stages=6, pipelines=6), 5, 6),
    ],
)
def test_batches_under_way(plan, per_batch, pipelines):
    assert OurCase("a row", plan, per_batch).pipelines == pipelines
