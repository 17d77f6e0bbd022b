"""``avgpipe partition``: several methods side by side, and the plan of the best one."""

import pytest

from avgpipe.plan import Plan
from avgpipe.planning import partition_methods
from tests.cli.command import invoke, strict
from tests.measure.examples import heavy

LINK = ("--bandwidth", "10kbit", "--latency", "1ms")
MACHINES = """
[[devices]]
count = 4
[[levels]]
units = 2
bandwidth = "1Gbit"
[[levels]]
units = 2
bandwidth = "1kbit"
latency = "1ms"
"""


@pytest.fixture
def profile(tmp_path):
    heavy().save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def rows_of(*line):
    result = invoke("partition", *line, "--json")
    assert result.exit_code == 0, result.stderr
    found = strict(result.stdout)
    return found, {row["method"]: row for row in found["methods"]}


def test_every_method_has_a_row(profile):
    result = invoke("partition", profile, "--workers", "3", *LINK)
    assert result.exit_code == 0, result.stderr
    for words in ("method", "first layers", "replicas", "workers", "predicted", "samples/s", "best: "):
        assert words in result.stdout
    lines = [line.split()[0] for line in result.stdout.splitlines() if line.strip()]
    assert set(partition_methods()) <= set(lines)


def test_json_has_cut_replicas_placement_and_times(profile):
    found, rows = rows_of(profile, "--workers", "3", *LINK, "--micro-batches", "6")
    assert list(rows) == partition_methods()
    for row in rows.values():
        assert len(row["replication"]) == len(row["boundaries"]) + 1
        assert row["samples_per_s"] == pytest.approx(row["batch_samples"] / row["batch_s"])
    assert found["best"] == max(rows, key=lambda name: rows[name]["samples_per_s"])
    assert rows["simulated"]["plan"]["micro_batches"] == 6


def test_the_time_of_the_simulated_method_is_the_one_it_made_best(profile):
    _, rows = rows_of(profile, "--workers", "2", *LINK, "--method", "simulated", "--pipelines", "2")
    (row,) = rows.values()
    assert row["batch_s"] == pytest.approx(row["value"])
    assert row["plan"]["pipelines"] == 2


def test_the_plan_of_the_only_method_is_written_and_can_be_loaded(profile, tmp_path):
    out = tmp_path / "plan.json"
    _, rows = rows_of(profile, "--workers", "2", *LINK, "--method", "pipedream", "--out", str(out))
    plan = Plan.load(out)
    assert (plan.system, plan.weights) == ("pipedream", "stash")
    assert list(plan.partition or ()) == rows["pipedream"]["boundaries"]


def test_a_cluster_of_machines_tells_which_worker_runs_what(profile, tmp_path):
    (tmp_path / "machines.toml").write_text(MACHINES)
    line = (profile, "--cluster", str(tmp_path / "machines.toml"), "--method", "dapple,pipedream")
    out = tmp_path / "plan.json"
    _, rows = rows_of(*line, "--out", str(out))
    for row in rows.values():
        assert sorted(w for own in row["placement"] for w in own) == list(range(sum(row["replication"])))
    plan = Plan.load(out)
    assert plan.placement is not None
    assert plan.build_schedule().replicas == plan.placement


def test_a_method_that_finds_nothing_says_why_beside_the_others(profile, tmp_path):
    (tmp_path / "machines.toml").write_text(MACHINES)
    line = ("--cluster", str(tmp_path / "machines.toml"), "--stages", "2")
    result = invoke("partition", profile, *line)
    assert result.exit_code == 0, result.stderr
    assert "pipedream: stages=2 with 2 levels" in result.stdout
    alone = invoke("partition", profile, *line, "--method", "pipedream")
    assert alone.exit_code == 2
    assert "stages=2 with 2 levels" in alone.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("--workers", "2", "--method", "papple"), "unknown method 'papple': did you mean 'dapple'"),
        ((), "say what the plan is for: --workers NUMBER, or --cluster FILE"),
        (("--workers", "2", "--memory-limit", "1KiB", "--method", "dapple"), "nothing fits"),
        (("--workers", "2", "--latency", "1us"), "--latency without --bandwidth"),
    ],
)
def test_what_cannot_be_is_one_line(profile, line, words):
    result = invoke("partition", profile, *line)
    assert result.exit_code == 2
    assert words in result.stderr


def test_what_is_neither_a_workload_nor_a_file_is_refused():
    result = invoke("partition", "gpd", "--workers", "2")
    assert result.exit_code == 2
    assert (
        "'gpd' is neither a workload nor a file that `avgpipe profile` wrote: did you mean 'gpt'"
        in result.stderr
    )


@pytest.mark.ranks
@pytest.mark.slow
def test_a_workload_is_profiled_first():
    _, rows = rows_of("awd-lstm", "--workers", "2", "--budget", "1", "--method", "balance")
    assert len(rows["balance"]["boundaries"]) == 1
