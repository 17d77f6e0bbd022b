"""The tables and the picture of what each way of training learns."""

import json

import pytest

from benchmarks.statistics.record import picture, runs_of
from benchmarks.tables.statistics import (
    statistics_losses,
    statistics_passes,
    statistics_search,
    statistics_targets,
    statistics_variants,
)


def run(way, seed, *losses, lr=0.01, workload="gnmt"):
    courses = [[100 * (n + 1), loss, 1.0] for n, loss in enumerate(losses)]
    return {"workload": workload, "way": way, "seed": seed, "lr": lr, "losses": courses}


RUNS = [
    run("one", 0, 4.0, 3.0, 2.0),
    run("one", 1, 4.0, 3.0, 1.99),
    run("N = 2, warm-up", 0, 4.0, 3.0, 2.0),
    run("N = 2, warm-up", 1, 4.0, 3.5, 2.0),
    run("2bw", 0, 5.0, 4.0, 3.0),
    run("halves, predicted", 0, 4.0, 3.5, 2.009),
    run("halves, predicted", 1, 5.0, 4.5, 4.0),
    run("muon", 0, 3.0, 2.0, 1.0, lr=0.02),
    run("muon, 2bw", 0, 3.0, 2.0, 1.2, lr=0.02),
]


@pytest.fixture
def record():
    return {"runs": runs_of(RUNS)}


def cells(table, name):
    return next(line for line in table.splitlines() if line.startswith(f"| {name} |")).split(" | ")[1:]


def test_passes_are_paired_by_seed_and_what_misses_its_bar_is_bold(record):
    made = statistics_passes(record)
    assert cells(made, "one") == ["1 |"]
    assert cells(made, "N = 2, warm-up") == ["1.004 (1.000 to 1.004) |"]
    assert cells(made, "2bw") == ["never |"]  # which has no bar
    assert cells(made, "halves, predicted") == ["**never** |"]
    assert cells(made, "muon, 2bw") == ["**never** |"]


def test_losses_are_means_with_their_range(record):
    assert cells(statistics_losses(record), "one") == ["1.995 (0.010) |"]


def test_targets_are_those_of_one_pipeline_with_each_optimizer(record):
    made = statistics_targets(record)
    assert "| gnmt | one | 0.01 | 2.010 | 2 |" in made
    assert "| gnmt | muon | 0.02 | 1.005 | 1 |" in made


def test_what_was_tried_with_several_rates_counts_at_the_best_that_has_as_many_seeds():
    once = run("one, lr x 2", 0, 4.0, 3.0, 1.0, lr=0.02)
    better = [run("one, lr x 1.4", seed, 4.0, 2.9, 1.9, lr=0.014) for seed in (0, 1)]
    found = {"runs": runs_of([*RUNS, RUNS[0], once, *better])}
    assert "| gnmt | one | 0.01: 1.995 (2), 0.014: **1.900** (2), 0.02: 1.000 |" in statistics_search(found)
    assert "| muon |" not in statistics_search(found)
    assert "| gnmt | one | 0.014 | 1.909 | 2 |" in statistics_targets(found)
    assert cells(statistics_passes(found), "N = 2, warm-up") == ["**never** |"]


def test_variants_have_a_column_for_each_optimizer_and_rate():
    made = [
        ("one", "adamw", 0, 2.0),
        ("one", "adamw", 1, 2.2),
        ("elastic", "adamw", 0, 2.5),
        ("one", "sgd", 0, 3.0),
    ]
    found = [
        {
            "variant": variant,
            "optimizer": optimizer,
            "lr": 0.1,
            "seed": seed,
            "loss": loss,
            "tail": loss - 0.1,
        }
        for variant, optimizer, seed, loss in made
    ]
    lines = statistics_variants({"variants": found}).splitlines()
    assert lines[0] == "| variant | adamw, 0.1 | mean of its last tenth | sgd, 0.1 | mean of its last tenth |"
    assert lines[2:] == ["| one | 2.100 (0.200) | 2.000 | 3.000 | 2.900 |", "| elastic | 2.500 | 2.400 | | |"]


def test_a_panel_for_each_workload(tmp_path):
    found = [*RUNS, *(run("one", seed, 3.0, 2.0, workload="resnet") for seed in (0, 1))]
    drawn = picture(json.loads(json.dumps(runs_of(found))), tmp_path / "losses.png")
    assert [axes.get_title("left") for axes in drawn.axes] == ["gnmt", "resnet"]
    assert (tmp_path / "losses.png").stat().st_size > 10_000
