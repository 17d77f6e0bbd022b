"""Figures of runs, and which system is best in what."""

import json
from dataclasses import replace

import pytest

from avgpipe_lab.compare.comparison import (
    DOES_NOT_FIT,
    FAILED,
    OK,
    OUT_OF_MEMORY,
    Figures,
    SystemResult,
    format_figure,
)
from tests.lab.compare.comparisons import PLAIN, at, compared, reaching

SUMMARY = {
    "workload": "awd-lstm", "system": "gpipe", "stages": 2, "pipelines": 1, "micro_batches": 4, "batch_size": 16,
    "schedule": "1f1b", "advance": None, "epochs": 2.0, "batches": 50, "samples": 800, "train_seconds": 80.0,
    "samples_per_second": 10.0, "metric_name": "perplexity", "metric": 120.0, "target": None, "seconds_to_target": None,
    "samples_to_target": None,
    "worker_busy_fraction": [0.4, 0.6], "bubble_fraction": 0.5, "peak_memory_bytes": [2**20, 400 * 2**20],
    "parameters": 7, "seed": 0, "versions": {}, "preset": "tiny", "title": "", "best_metric": 110.0,
    "trivial_metric": 900.0,
}  # fmt: skip


def column(comparison, key):
    return next(c for c in comparison.columns() if c.key == key)


def test_figures_are_those_of_the_summary():
    assert Figures.of(SUMMARY) == PLAIN
    assert Figures.of(SUMMARY, 2).replicas == 2
    with pytest.raises(KeyError, match="samples"):
        Figures.of({name: value for name, value in SUMMARY.items() if name != "samples"})


def test_times_follow_from_what_was_done():
    assert (PLAIN.epoch_seconds, PLAIN.samples_per_second) == (40.0, 10.0)
    nothing = at(10.0, epochs=0.0, samples=0)
    assert nothing.epoch_seconds is None


def test_the_best_is_the_smallest_or_the_largest_as_the_column_says():
    found = compared(a=at(10, busy_fraction=0.9), b=at(20), c=at(20, best_metric=100.0))
    best = {c.key: found.best_systems(c) for c in found.columns()}
    assert best["samples_per_second"] == best["epoch_seconds"] == ["b", "c"]
    assert best["busy_fraction"] == ["a"]
    assert best["best_metric"] == ["c"]
    assert best["metric"] == ["a", "b", "c"]


def test_a_high_accuracy_and_a_low_perplexity_are_good():
    systems = {"a": at(10, best_metric=60.0), "b": at(10, best_metric=70.0)}
    assert (found := compared(**systems)).best_systems(column(found, "best_metric")) == ["a"]
    found = compared(**systems, metric_name="accuracy", lower_is_better=False)
    assert found.best_systems(column(found, "best_metric")) == ["b"]


def test_what_does_not_fit_or_failed_is_not_ranked():
    big = SystemResult("big", DOES_NOT_FIT, at(1000), "needs 4 GiB")
    found = compared(big, SystemResult("broken", FAILED, None, "no"), a=at(10), b=at(20))
    assert [name for name, _ in found.ranked] == ["a", "b"]
    assert found.best_systems(column(found, "samples_per_second")) == ["b"]


def test_one_value_is_not_the_best_of_anything():
    found = compared(a=reaching(10.0), b=at(20), target=100.0)
    assert found.best_systems(column(found, "seconds_to_target")) == []


def test_the_target_has_columns_only_if_there_is_one():
    keys = [c.key for c in compared(a=PLAIN, target=100.0).columns()]
    assert keys[2:4] == ["samples_to_target", "seconds_to_target"]
    assert [c.key for c in compared(a=PLAIN).columns()] == keys[:2] + keys[4:]


def test_whether_the_trivial_answer_is_beaten():
    assert compared(a=at(1, best_metric=100.0), trivial=101.0).beaten_trivial
    assert not compared(a=at(1, best_metric=100.0), b=at(1, best_metric=None), trivial=99.0).beaten_trivial
    assert not compared(
        a=at(1, best_metric=50.0), trivial=60.0, metric_name="accuracy", lower_is_better=False
    ).beaten_trivial
    assert compared(a=PLAIN).beaten_trivial


def test_json_has_a_row_for_every_system():
    found = compared(SystemResult("broken", FAILED, None, "no"), a=PLAIN).to_json()
    assert found[0] == {"system": "broken", "status": "failed", "reason": "no", "warnings": []}
    assert found[1]["epoch_seconds"] == 40.0
    assert found[1]["train_seconds"] == 80.0
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.012345, "0.0123"), (1.234, "1.23"), (12.34, "12.3"), (99.96, "100"), (1234.5, "1234"), (-3, "-3.00")],
)  # fmt: skip
def test_numbers_have_three_digits(value, text):
    assert format_figure(value) == text


# ---- several seeds ---------------------------------------------------------------------------------------------------


def seeds(**runs):
    """Results of one system's runs, "s0" for seed 0."""
    results = {
        int(name[1:]): run if isinstance(run, SystemResult) else SystemResult("a", OK, run)
        for name, run in runs.items()
    }
    return SystemResult.joined(results)


def test_one_seed_stays_as_it_is():
    found = seeds(s3=reaching(20.0))
    assert (found.value("seconds_to_target"), found.spread("seconds_to_target")) == (20.0, None)
    assert "runs" not in found.to_json()


def test_figures_of_several_seeds_are_medians_with_the_least_and_the_most():
    found = seeds(s0=reaching(20.0), s1=reaching(30.0), s2=reaching(21.0))
    assert (found.value("seconds_to_target"), found.spread("seconds_to_target")) == (21.0, (20.0, 30.0))
    row = found.to_json()
    assert (row["seconds_to_target"], row["spread"]["seconds_to_target"]) == (21.0, (20.0, 30.0))
    assert [run["seconds_to_target"] for run in row["runs"]] == [20.0, 30.0, 21.0]
    assert json.loads(json.dumps(row))["status"] == "ok"


def test_a_seed_that_did_not_reach_the_target_is_the_last_one():
    found = seeds(s0=reaching(20.0), s1=at(10.0), s2=reaching(21.0))
    assert (found.value("seconds_to_target"), found.spread("seconds_to_target")) == (21.0, (20.0, None))
    assert seeds(s0=reaching(20.0), s1=at(10.0), s2=at(10.0)).value("seconds_to_target") is None


def test_a_seed_that_failed_is_reported_and_does_not_count():
    found = seeds(s0=SystemResult("a", FAILED, None, "no luck"), s1=reaching(20.0), s2=reaching(22.0))
    assert (found.status, found.value("seconds_to_target")) == (OK, 21.0)
    assert found.warnings == ("seed 0: failed: no luck",)


def test_seeds_that_all_failed_are_a_failure():
    found = seeds(
        s0=SystemResult("a", FAILED, None, "no luck"), s1=SystemResult("a", OUT_OF_MEMORY, None, "no room")
    )
    assert (found.status, found.reason, found.figures) == (FAILED, "no luck", None)
    assert found.warnings == ("seed 1: out of memory: no room",)


def test_the_best_is_that_of_the_medians():
    fast = replace(seeds(s0=reaching(20.0), s1=reaching(90.0), s2=reaching(21.0)), system="fast")
    found = compared(fast, steady=reaching(25.0), target=100.0)
    assert found.best_systems(column(found, "seconds_to_target")) == ["fast"]
    assert found.seeds == 3


def test_a_comparison_prints_and_draws_itself(tmp_path):
    found = compared(
        seeds(s0=reaching(20.0), s1=reaching(30.0)), slow=at(10.0), late=reaching(40.0), target="loss=2"
    )
    assert "25.0*" in str(found)
    assert "20.0.." in str(found)
    assert "Target: loss 2.00; not reached by slow." in str(found)
    figure = found.plot(tmp_path / "bars.png")
    samples, seconds = figure.axes
    assert (samples.get_xlabel(), seconds.get_xlabel()) == ("samples to target", "s to target")
    assert [bar.get_width() for bars in seconds.containers for bar in bars] == [25.0, 40.0]
    assert [list(line.get_xdata()) for line in seconds.get_lines()] == [[20.0, 30.0]]
    assert (tmp_path / "bars.png").stat().st_size > 3_000
    without = compared(a=at(10.0), b=at(20.0)).plot()
    assert [axes.get_xlabel() for axes in without.axes] == ["samples/s", "best perplexity"]
