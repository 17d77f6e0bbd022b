"""Our rows as values: for K = 6, M = 12, 10 + 20 ms where nothing else is said."""

import pytest
import torch

from benchmarks.common.rows import Unavailable, batches_in_flight
from benchmarks.common.schedules import DEFAULT, ROWS, PlanCase, ScheduleSettings, compare, our_cases

V_RUNS = torch.__version__ >= (2, 13)  # of torch's schedules, over gloo

# name: stages, pipelines and micro-batches of the plan, its batches in one of 12, batches in flight
CASES = {
    "1f1b": (6, 1, 12, 1, 1),
    "all-forward-all-backward": (6, 1, 12, 1, 1),
    "advance-forward, N = 1": (6, 1, 12, 1, 1),
    "advance-forward, N = 2": (6, 2, 12, 1, 2),
    "advance-forward, N = 3": (6, 3, 12, 1, 2),
    "interleaved-1f1b, 2 a rank": (12, 1, 12, 1, 1),
    "looped-bfs, 2 a rank": (12, 1, 12, 1, 1),
    "zero-bubble-h1": (6, 1, 12, 1, 1),
    "interleaved-zero-bubble, 2 a rank": (12, 1, 12, 1, 1),
    "zero-bubble-v, 2 a rank": (12, 1, 12, 1, 1),
    "dualpipe-v, 2 a rank": (12, 1, 12, 1, 1),
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
    "advance-forward, N = 2": 410,
    "advance-forward, N = 3": 360,
    "interleaved-1f1b, 2 a rank": 435,  # (M + (K-1)/2) (t_f + t_b)
    "looped-bfs, 2 a rank": 435,
    "zero-bubble-h1": 410,  # M (t_f + t_b) + (K-1) (t_f + t_b - 2 t_w), t_w half of t_b
    "interleaved-zero-bubble, 2 a rank": 385,
    "zero-bubble-v, 2 a rank": 360,
    "dualpipe-v, 2 a rank": 385,
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
        shape = (plan.stages, plan.pipelines, plan.micro_batches, case.per_batch)
        shape += (batches_in_flight(plan, case.per_batch),)
        assert shape == CASES[name], name
        assert plan.workers == 6, name
        assert plan.partition == tuple(range(1, plan.stages))


def test_only_rows_that_are_asked_for_are_there():
    assert list(by_name(ScheduleSettings(only=("ea-pipe", "1f1b", "torch-gpipe")))) == ["1f1b", "ea-pipe"]


@pytest.mark.parametrize("name", CASES)
def test_all_rows_do_the_same_work(name):
    stages = CASES[name][0]
    assert sum(ALL.stage_s(stages)) * stages == pytest.approx(6 * 0.03)


@pytest.mark.parametrize(("name", "ms"), SIMULATED.items())
def test_the_simulated_time_is_that_of_m_micro_batches(name, ms):
    assert by_name()[name].simulated_s(ALL) == pytest.approx(ms / 1e3)


def test_workers_that_divide_the_micro_batches_unevenly_wait_for_the_busiest():
    settings = ScheduleSettings(stages=4, micro_batches=6, only=("data-parallel",))
    assert by_name(settings)["data-parallel"].simulated_s(settings) == pytest.approx(2 * 4 * 0.03)


def test_what_a_plan_refuses_is_left_out_with_the_reason():
    settings = ScheduleSettings(micro_batches=4, only=("pipedream-2bw", "data-parallel", "pipedream"))
    found = by_name(settings)
    assert isinstance(found["pipedream-2bw"], Unavailable)
    assert "4 are fewer than 6" in found["pipedream-2bw"].reason
    assert "at least 6 micro-batches" in found["data-parallel"].reason
    assert isinstance(found["pipedream"], PlanCase)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"activation_bytes": 60}, "--activation 60"),
        ({"activation_bytes": 66}, "--activation 66"),
        ({"only": ("torch-2f2b",)}, "--rows torch-2f2b"),
    ],
)
def test_values_out_of_range_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        ScheduleSettings(**options)


def test_rows_are_some_by_default_or_all_or_those_asked_for_in_the_order_of_the_table():
    assert ScheduleSettings().rows == DEFAULT
    assert set(DEFAULT) < set(ROWS)
    assert ScheduleSettings(only=("all",)).rows == ROWS
    assert ScheduleSettings(only=("torch-1f1b", "pipedream")).rows == ("pipedream", "torch-1f1b")


def test_the_budget_is_far_above_what_one_micro_batch_after_another_takes():
    settings = ScheduleSettings(stages=20, micro_batches=100, only=("model-parallel",))
    batches = (settings.rounds + 1) * (settings.batches + 1)
    assert settings.budget_s > 3 * batches * 100 * 20 * 0.03


@pytest.mark.ranks
@pytest.mark.slow
def test_systems_and_both_sides_schedules_are_rows():
    names = ("interleaved-1f1b", "zero-bubble-v", "dualpipe-v", "pipedream", "data-parallel")
    names += ("torch-advance-forward", "torch-looped-bfs", *(("torch-dualpipe-v",) if V_RUNS else ()))
    settings = ScheduleSettings(
        stages=2,
        micro_batches=4,
        forward_s=1e-3,
        backward_s=2e-3,
        activation_bytes=4096,
        batches=1,
        rounds=1,
        only=names,
    )
    result = compare(settings)
    assert result["unavailable"] == []
    assert [row["name"] for row in result["rows"]] == [
        "avgpipe interleaved-1f1b, 2 a rank",
        "avgpipe zero-bubble-v, 2 a rank",
        "avgpipe dualpipe-v, 2 a rank",
        "avgpipe pipedream",
        "avgpipe data-parallel",
        "torch advance-forward (ours)",
        "torch looped-bfs, 2 a rank",
        *(["torch dualpipe-v, 2 a rank"] if V_RUNS else []),
    ]
    assert [row["name"] for row in result["rows"] if row["simulated_s"]] == [
        row["name"] for row in result["rows"] if row["name"].startswith("avgpipe ")
    ]
