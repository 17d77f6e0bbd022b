"""``avgpipe tune``: plans from a profile, for a cluster, and with trials."""

import json

import pytest
from rich.console import Console

from avgpipe.cli.tune import lines, table
from avgpipe.measure.tune import ONE_DEVICE, PIPELINE
from avgpipe.plan import Plan
from tests.cli.command import invoke, strict
from tests.measure.examples import heavy, row, tuning

CLUSTER = """
[[devices]]
count = 4
memory = "1MiB"
[[levels]]
units = 4
bandwidth = "1kbit"
latency = "1us"
"""


@pytest.fixture
def profile(tmp_path):
    heavy().save(tmp_path / "profile.json")
    return [
        "--profile",
        str(tmp_path / "profile.json"),
        "--batch-size",
        "4",
        "--out",
        str(tmp_path / "plan.json"),
    ]


def test_a_plan_from_a_profile(profile, tmp_path):
    result = invoke("tune", *profile, "--workers", "2", "--bandwidth", "1kbit", "--latency", "1us")
    assert result.exit_code == 0, result.stderr
    plan = Plan.load(tmp_path / "plan.json")
    assert (plan.stages, plan.partition) == (2, (2,))
    for words in (
        "pipeline",
        "one device",
        "data parallel",
        "runner-up",
        "Advice: use the",
    ):
        assert words in result.stdout
    assert "not timed: there is no workload" in result.stdout


def test_json_is_what_was_found(profile, tmp_path):
    result = invoke("tune", *profile, "--workers", "2", "--json")
    assert result.exit_code == 0, result.stderr
    found = strict(result.stdout)
    assert found["plan"] == json.loads((tmp_path / "plan.json").read_text())
    assert found["workers"] == 2
    assert {row["what"] for row in found["rows"]} >= {"pipeline", "one device"}


def test_a_plan_for_a_cluster_file(profile, tmp_path):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    result = invoke("tune", *profile, "--cluster", str(tmp_path / "cluster.toml"))
    assert result.exit_code == 0, result.stderr
    assert Plan.load(tmp_path / "plan.json").workers <= 4


@pytest.mark.promise
def test_a_workload_is_profiled_and_the_best_plans_are_timed(text, tmp_path):
    """Two workers need two cores for trials; with fewer the plan is a prediction, which is said."""
    out = tmp_path / "plan.json"
    result = invoke(
        *("tune", "awd-lstm", "--data", str(text), "--batch-size", "4", "--workers", "1"),
        *("--budget", "0.5", "--trials", "1", "--micro-batches", "1,2", "--out", str(out), "--json"),
    )
    assert result.exit_code == 0, result.stderr
    found = strict(result.stdout)
    best = found["rows"][0]
    assert best["what"] == "one device"
    assert best["measured_batch_s"] > 0
    assert best["measured_memory_bytes"][0] > 50e6
    assert Plan.load(out).stages == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), "--workers NUMBER, or --cluster FILE"),
        (("--workers", "0"), "--workers 0: must be more than 0"),
        (("--workers", "2", "--memory-limit", "7 cubits"), "--memory-limit 7 cubits"),
        (("--workers", "2", "--memory-limit", "0"), "--memory-limit 0: must be more than 0"),
        (("--workers", "2", "--memory-limit", "100"), "nothing fits; the smallest plan needs"),
        (("--workers", "2", "--pipelines", "1,x"), "--pipelines 1,x"),
        (("--workers", "2", "--micro-batches", "8"), "a batch of 4 samples"),
        (("--workers", "2", "--trials", "-1"), "--trials -1: must be at least 0"),
        (("--workers", "2", "--bandwidth", "fast", "--latency", "1us"), "--bandwidth fast"),
        (("--cluster", "nowhere.toml"), "nowhere.toml"),
        (("--cluster", "nowhere.toml", "--workers", "2"), "--workers NUMBER, or --cluster FILE"),
        (("--cluster", "nowhere.toml", "--memory-limit", "1GiB"), "--memory-limit with --cluster"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(profile, options, named):
    result = invoke("tune", *profile, *options)
    assert result.exit_code == 2
    assert named in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (CLUSTER.replace("memory", "memry"), "unknown key 'memry'"),
        (CLUSTER.replace('"1kbit"', '"1 furlong"'), "levels[0]: bandwidth 1 furlong"),
        (CLUSTER.replace("count = 4", "count = 5"), "4 devices, but there are 5"),
    ],
)
def test_a_cluster_file_that_is_wrong_is_named(profile, tmp_path, text, named):
    (tmp_path / "cluster.toml").write_text(text)
    result = invoke("tune", *profile, "--cluster", str(tmp_path / "cluster.toml"))
    assert result.exit_code == 2
    assert named in result.stderr
    assert "cluster.toml" in result.stderr


def test_without_a_workload_the_profile_and_the_batch_are_needed():
    result = invoke("tune", "--workers", "2")
    assert result.exit_code == 2
    assert "--profile FILE and --batch-size NUMBER" in result.stderr


def test_a_profile_that_is_none_is_refused(tmp_path):
    (tmp_path / "p.json").write_text('{"format": 1, "layers": []}')
    result = invoke("tune", "--profile", str(tmp_path / "p.json"), "--batch-size", "4", "--workers", "2")
    assert result.exit_code == 2
    assert "p.json" in result.stderr


# ---- what a reader sees ----------------------------------------------------------------------------------------------

TWO = Plan(stages=2, pipelines=2, micro_batches=4, partition=[1])
WIDE = Plan(stages=2, micro_batches=4, partition=[1], replication=[2, 2], advance=[1, 0])


def printed(found):
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(table(found))
    return [line.split() for line in capture.get().splitlines()]


def test_a_row_has_the_plan_and_both_times():
    found = tuning(row(PIPELINE, 0.5, 0.4, TWO), row(PIPELINE, 0.6, None, WIDE), row(ONE_DEVICE, 2.0))
    rows = [words for words in printed(found) if words and words[0] in ("pipeline", "one")]
    assert rows[0] == [
        *("pipeline", "2", "2", "4", "1", "default", "never"),
        *("500.0", "400.0", "+25.0", "%", "20", "100", "110"),
    ]
    assert rows[1][:8] == ["pipeline", "2", "x", "2", "1", "4", "1", "1,0"]
    assert rows[1][-4:] == ["-", "13.33", "100", "-"]
    assert rows[2][:5] == ["one", "device", "1", "1", "1"]


def test_the_lines_name_the_best_the_runner_up_and_what_failed():
    found = tuning(
        row(PIPELINE, 0.5, 0.4, TWO),
        row(ONE_DEVICE, 2.0, 2.1),
        row(PIPELINE, 0.6, None, WIDE, failure="worker 1 failed"),
        excluded=3,
    )
    said = lines(found)
    assert said[0].startswith(
        "12 sizes of plans were considered, 3 of those simulated do not fit into the memory; search 0.5 s"
    )
    assert said[1] == "best: pipeline, peak memory per worker 100, 100 MiB predicted, 110, 110 MiB measured"
    assert said[2].startswith("runner-up: one device, peak memory per worker 100 MiB predicted")
    assert said[3] == "pipeline was not timed: worker 1 failed"
    assert said[-1].startswith("Advice: ")


def test_long_lists_are_cut():
    plan = Plan(stages=9, micro_batches=9, partition=list(range(1, 9)))
    assert any("1,2,3,4,5,6,..." in words for words in printed(tuning(row(PIPELINE, 0.5, None, plan))))
