"""The program of the emulated cluster on made-up measurements, and the tables and pictures of its record."""

import argparse
import json

import pytest

from avgpipe.errors import PipelineError
from avgpipe.plan import Plan
from benchmarks.papers import draw, emulated
from benchmarks.papers.forecast import Outcome
from benchmarks.tables import papers
from tests.benchmarks.test_papers_runs import row_of

GPIPE = Outcome(Plan.for_system("gpipe", stages=2, micro_batches=2, partition=[3]), 0.2, 0.2, 0.1, 0.1, 2**30)
BEST = Outcome(
    Plan(stages=2, pipelines=2, micro_batches=4, partition=[3]), 0.1, 0.1, 0.1, 0.1, 2**29, way="N = 2"
)


def listed(outcome, system):
    return {**row_of(outcome, system), "described": outcome.described, "binds": outcome.binds}


def forecast():
    rows = [listed(GPIPE, "GPipe"), listed(BEST, "AvgPipe, best"), listed(BEST, "AvgPipe, N = 2")]
    cases = [
        {"model": "gnmt", "batch_size": size, "devices": devices, "rows": rows}
        for size in (128, 64)
        for devices in ("all devices", "as many devices as are best")
    ]
    return {"reading": False, "source": "papers-forecast-2026-01-31.json", "cases": cases}


def asked(**options):
    given = {
        "models": ["gnmt"],
        "rows": ["GPipe", "AvgPipe, best", "AvgPipe, N = 2"],
        "devices": ["all", "best"],
        "batch_sizes": [],
        "scale": [0],
        "slower": [0],
        "rounds": 1,
        "batches": 1,
    }
    return argparse.Namespace(**{**given, **options})


@pytest.fixture
def measured(monkeypatch):
    """The plans that were measured, each a hundredth over its simulated time."""
    made = []

    def measure(emulation, rounds, batches):
        made.append(emulation)
        return {
            "median_s": 1.01 * emulation.batch_s,
            "samples_s": [1.01 * emulation.batch_s],
            "over_simulated": 1.01,
            "quartile1_s": 0.1,
            "quartile3_s": 0.1,
            "simulated_s": emulation.batch_s,
            "batches": 1,
            "busy_fraction": [0.5, 0.7],
            "utilisation": {"seconds": 0.8, "over_time": [0.5] * 120},
            "scale": emulation.scale,
            "slower": emulation.slower,
            "measured_period": 1,
        }

    monkeypatch.setattr(emulated, "measure", measure)
    return made


def record(**options):
    cases = []
    for _ in emulated.run(forecast(), asked(**options), cases):
        pass
    return {"cases": cases}


def test_rows_of_one_plan_are_measured_once(measured):
    found = record()
    assert [len(case["rows"]) for case in found["cases"]] == [3] * 4
    assert len(measured) == 4  # two plans of two batch sizes, however many devices there would have been
    best, same = found["cases"][0]["rows"][1:]
    assert (best["way"], same["way"]) == ("N = 2", "N = 2")
    assert best["median_s"] == same["median_s"] == pytest.approx(0.101)
    assert best["samples_per_second"] == pytest.approx(128 / 0.101)
    assert best["epoch_s"] == pytest.approx({"WMT en-de": 4_500_000 * 0.101 / 128})


def test_what_a_record_has_is_left_out(measured):
    cases = record(rows=["GPipe"])["cases"]
    count = len(measured)
    for _ in emulated.run(forecast(), asked(), json.loads(json.dumps(cases))):
        pass
    assert [m.plan.pipelines for m in measured[count:]] == [2, 2]


def test_only_what_is_asked_for_is_measured(measured):
    found = record(batch_sizes=[64], devices=["all"], rows=["AvgPipe, best"])
    assert [(case["batch_size"], [row["system"] for row in case["rows"]]) for case in found["cases"]] == [
        (64, ["AvgPipe, best"])
    ]


def test_a_row_that_fails_is_reported_and_the_others_go_on(monkeypatch, measured):
    measure = emulated.measure

    def sometimes(emulation, *given):
        if emulation.plan.pipelines == 1:
            raise PipelineError("worker 1 of 2 failed")
        return measure(emulation, *given)

    monkeypatch.setattr(emulated, "measure", sometimes)
    case = record(batch_sizes=[128], devices=["all"])["cases"][0]
    assert [row["system"] for row in case["rows"]] == ["AvgPipe, best", "AvgPipe, N = 2"]
    assert case["failed"][0]["reason"] == "worker 1 of 2 failed"


def test_a_row_may_be_measured_at_several_scales(measured):
    found = record(rows=["GPipe"], batch_sizes=[128], devices=["all"], scale=[16, 1])
    assert [row["scale"] for row in found["cases"][0]["rows"]] == [16, 1]
    assert [row["scale"] for row in papers.nearest(found["cases"][0])] == [1]
    assert "| gnmt, all devices | GPipe | 16 | " in papers.papers_scales(found)
    assert emulated.table(found["cases"][0]).row_count == 2


def test_tables_have_a_row_for_each_system_and_a_column_for_each_case(measured):
    found = record()
    for make in (papers.papers_batches, papers.papers_memory, papers.papers_busy, papers.papers_epochs):
        lines = make(found).splitlines()
        assert lines[0] == "| system | gnmt, all devices | gnmt, as many devices as are best |"
        assert [line.split(" | ")[0] for line in lines[2:]] == [
            "| GPipe",
            "| AvgPipe, best",
            "| AvgPipe, N = 2",
        ]
    assert "202 ms (1.01)" in papers.papers_batches(found)
    assert "512 MiB" in papers.papers_memory(found)
    assert "60 % (50 %)" in papers.papers_busy(found)
    assert "| gnmt, all devices | GPipe | K = 2, M = 2, cuts 3 | bubble |" in papers.papers_plans(found)
    assert "| batches of 128 | batches of 64 |" in papers.papers_batch_sizes(found)


def test_time_to_target_has_its_range():
    rows = [
        {
            "system": "GPipe",
            "way": "one",
            "passes": [1.0, 0.9, 1.1],
            "seconds_to_target": {"WMT": [100.0, 90.0, 110.0]},
        },
        {
            "system": "AvgPipe, best",
            "way": "N = 2",
            "passes": [1.2, 1.0, None],
            "seconds_to_target": {"WMT": [50.0, 40.0, None]},
        },
        {"system": "PipeDream", "way": None, "passes": None, "seconds_to_target": {"WMT": None}},
        {
            "system": "EA-Pipe",
            "way": "ea-pipe",
            "passes": [None, 2.0, None],
            "seconds_to_target": {"WMT": [None, 1.0, None]},
        },
    ]
    made = papers.papers_targets({"cases": [{"model": "gnmt", "devices": "all devices", "rows": rows}]})
    assert "| GPipe | one | 100 s (90.0 s to 110 s) | 1.000 | 2.00 |" in made
    assert "| AvgPipe, best | N = 2 | 50.0 s (40.0 s to never) | 1.200 | 1.00 |" in made
    assert "| PipeDream | | not trained |" in made
    assert "| EA-Pipe | ea-pipe | not reached |" in made


def test_bars_are_over_the_best_of_our_settings_and_at_least_so_much_where_nothing_is_reached():
    def row(system, passes, seconds):
        times = {"WMT": [seconds, seconds, seconds]}
        return {
            "system": system,
            "way": "one",
            "passes": [passes] * 3,
            "epoch_s": {"WMT": 100.0},
            "seconds_to_target": times,
        }

    rows = [
        row("GPipe", 1.0, 200.0),
        row("PipeDream", None, None),
        row("zero bubble", 1.0, 150.0),
        row("AvgPipe (G), N = 2", 1.1, 125.0),
        row("AvgPipe (G), best", None, None),
    ]
    case = {"model": "gnmt", "devices": "all devices", "epochs": 2.0, "rows": rows}
    made = papers.papers_bars({"cases": [case, {**case, "rows": []}]})
    assert "| GPipe | 1.60 |" in made
    assert "| PipeDream | \N{GREATER-THAN OR EQUAL TO} 1.60 |" in made
    assert "| zero bubble | 1.20 |" in made
    assert "| pipeline systems, geometric mean | **1.45** |" in made


def test_real_seconds_to_a_target_lie_between_validations_or_are_reckoned():
    def run(way, *losses, step_s=10.0, whole=True, seed=0):
        courses = [[100 * (n + 1), loss, step_s * (n + 1)] for n, loss in enumerate(losses)]
        shape = {"batches": 2, "busy": [0.5, 0.25]}
        return {"workload": "gnmt", "way": way, "seed": seed, "whole": whole, "losses": courses, **shape}

    runs = [
        run("gpipe", 3.0, 1.0),
        run("data-parallel", 3.0, step_s=100.0, whole=False),
        run("pipedream", 3.0, 2.0),
        run("avgpipe, N = 2", 3.0, 1.005, step_s=8.0),
        run("dapple", 3.0, step_s=80.0, whole=False),
        *(run("dapple", 3.0, 1.0, step_s=step_s, seed=seed) for seed, step_s in ((1, 9.0), (2, 11.0))),
    ]
    plan = {"micro_batches": 4, "partition": [1, 3], "advance": None, "forecast_s": 2.0}
    plans = {run["way"]: plan for run in runs}
    line = {"sample_s": 0.1, "cut_bytes": 2048, "share": 0.5, "bits_per_s": 2e6, "plans": plans}
    found = {"lines": {"gnmt": line}, "runs": runs}
    made = papers.papers_real(found)
    assert "| gpipe | 20.0 s (1.25) |" in made
    assert "| dapple | 20.0 s (1.25; 18.0 s to 22.0 s) |" in made
    assert "| data-parallel | about 200 s (12.48) |" in made
    assert "| pipedream | never |" in made
    assert "| avgpipe, N = 2 | 16.0 s (1.00) |" in made
    assert "| gnmt | 100 ms | 2 KiB | 0.50 | 2.0 Mbit/s |" in papers.papers_real_lines(found)
    assert "| gnmt | gpipe | 1, 3 | 4 | | 2.00 s | 10.0 s | 50 % 25 % |" in papers.papers_real_plans(found)


def test_pictures_have_a_panel_for_each_case(measured, tmp_path, monkeypatch):
    found = record()
    (tmp_path / "record.json").write_text(json.dumps(found))
    monkeypatch.setattr("sys.argv", ["draw", str(tmp_path / "record.json"), str(tmp_path)])
    draw.main()
    names = ["papers-batch-sizes.png", "papers-batches.png", "papers-memory.png", "papers-utilisation.png"]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == names
    bars = draw.batches(found, tmp_path / "again.png")
    assert [len(axes.patches) for axes in bars.axes] == [3, 3]
    assert draw.batch_sizes(record(batch_sizes=[128]), tmp_path / "none.png") is None
