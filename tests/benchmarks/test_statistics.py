"""The tables and the picture of what each way of training learns."""

import gzip
import json

import pytest
import torch

from benchmarks.statistics import characters
from benchmarks.statistics.record import picture, plans_of, runs_of
from benchmarks.statistics.run import WAYS
from benchmarks.tables.statistics import (
    statistics_early,
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


def test_a_default_plan_has_the_bar_of_its_pipelines():
    found = [*RUNS[:2], *(run("N = 2, default plan", seed, 4.0, 3.0, 2.2) for seed in (0, 1))]
    assert cells(statistics_passes({"runs": runs_of(found)}), "N = 2, default plan") == ["**never** |"]


def test_early_losses_are_those_of_a_fifth_and_of_two_fifths_beside_one_pipeline():
    one = [run("one", seed, 5.0, 4.0, 3.0, 2.5, 2.25 - 0.25 * seed) for seed in (0, 1)]
    two = [run("N = 2, default plan", seed, 5.5, 4.0 + seed, 3.0, 2.5, 2.25) for seed in (0, 1)]
    lines = statistics_early({"runs": runs_of([*one, *two])}).splitlines()
    assert lines[2:] == [
        "| a fifth | one | 5.000 |",
        "| a fifth | N = 2, default plan | 5.500 (+0.500) |",
        "| two fifths | one | 4.000 |",
        "| two fifths | N = 2, default plan | 4.500 (+0.500) |",
    ]


def test_a_record_holds_one_plan_of_each_way_that_tells_it():
    planned = {**run("N = 2, lr x 2", 0, 2.0), "plan": {"pipelines": 2}}
    assert plans_of([RUNS[0], planned]) == {"N = 2": {"pipelines": 2}}
    with pytest.raises(ValueError, match="'N = 2' was trained by several plans"):
        plans_of([planned, {**planned, "plan": {"pipelines": 3}}])


def test_default_plans_ask_for_nothing_but_their_pipelines():
    ways = {name: way for name, way in WAYS.items() if name.endswith(", default plan")}
    assert [way.plan for way in ways.values()] == [(("pipelines", 2),), (("pipelines", 4),)]
    assert {way.warmup for way in ways.values()} == {None}


def test_the_model_of_characters_sees_none_behind_and_knows_those_of_the_training_text(tmp_path):
    for name, text in (("train", "abc\n" * 200), ("val", "abz\n" * 40)):
        (tmp_path / f"{name}.de.gz").write_bytes(gzip.compress(text.encode()))
    made, again, other = (characters.built(tmp_path, seed, 4) for seed in (0, 0, 1))
    inputs, targets = next(iter(made.train_batches(0)))
    assert inputs.shape == targets.shape == (4, characters.LENGTH)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    held_out, _ = next(iter(made.valid_batches()))
    assert {*held_out.unique().tolist()} == {characters.UNKNOWN, 1, 2, 3}
    net = torch.nn.Sequential(*made.layers)
    changed = inputs.clone()
    changed[:, 40:] = 1
    assert torch.equal(net(inputs)[:, :40], net(changed)[:, :40])
    first = [next(net.parameters()) for net in (made.layers[0], again.layers[0], other.layers[0])]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_losses_are_means_with_their_range(record):
    assert cells(statistics_losses(record), "one") == ["1.995 (0.010) |"]


def test_a_longer_run_counts_where_one_pipelines_ends_and_may_reach_the_target_later():
    longer = [run("N = 2", seed, 4.0, 3.0, 2.2, 1.8) for seed in (0, 1)]
    found = {"runs": runs_of([*RUNS[:2], *longer])}
    assert cells(statistics_losses(found), "N = 2") == ["2.200 (0.000) |"]
    assert cells(statistics_passes(found), "N = 2") == ["**1.166** (1.162 to 1.166) |"]


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
