from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import avgpipe, invoke, strict
from tests.examples.scripts import COMMANDS, EXAMPLES, printed
from tests.patience import limit

SCRIPT = EXAMPLES / "train_your_model.py"
WORKLOAD = f"{SCRIPT}:make"
SIZES = ["--stages", "2", "--pipelines", "2", "--max-batches", "8", "--validations", "2"]


def answer(*arguments: str) -> Any:
    """What a command on the example prints as JSON."""
    process = avgpipe(*arguments, "--json")
    stdout, stderr = process.communicate(timeout=limit(110))
    assert process.returncode == 0, stderr
    return strict(stdout)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_model_learns(command):
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", printed(SCRIPT, command))]
    assert len(losses) == 5  # of one rank only
    assert losses[-1] < losses[0] / 1.5


def test_the_command_trains_it(tmp_path):
    asked = ["--stages", "1", "--max-batches", "4", "--validations", "1", "--out", str(tmp_path / "run")]
    result = invoke("train", WORKLOAD, *asked, "--lr", "0.001", "--json")
    assert result.exit_code == 0, result.stderr
    assert strict(result.stdout)["samples"] == 128


@pytest.mark.slow
@pytest.mark.ranks
def test_the_command_trains_it_in_processes_and_goes_on(tmp_path):
    out = ["--out", str(tmp_path / "run")]
    before = answer("train", WORKLOAD, *SIZES, *out)
    assert (before["stages"], before["pipelines"], before["batches"]) == (2, 2, 8)
    after = answer("train", WORKLOAD, *out, "--resume", "--max-batches", "64")
    assert after["batches"] == 64
    assert after["metric"] < before["metric"] / 1.5


@pytest.mark.slow
@pytest.mark.ranks
def test_its_layers_are_profiled_and_cut(tmp_path):
    profile = tmp_path / "profile.json"
    quick = ["--bandwidth", "10Gbit", "--latency", "50us", "--budget", "0.1"]
    found = answer("profile", WORKLOAD, *quick, "--micro-batch-sizes", "4,8", "--out", str(profile))
    assert found["model"] == "train_your_model"
    assert [layer["name"] for layer in found["layers"]] == [
        "0 Linear",
        "1 ReLU",
        "2 Linear",
        "3 ReLU",
        "4 Linear",
    ]
    of_profile = answer("partition", str(profile), "--workers", "2", "--method", "balance")
    cut = answer("partition", WORKLOAD, "--workers", "2", "--method", "balance", *quick)
    assert cut["model"] == of_profile["model"] == "train_your_model"
    assert cut["methods"][0]["batch_samples"] == 32  # the loader's


@pytest.mark.slow
@pytest.mark.ranks
def test_a_plan_is_found_for_it_and_trains_it(tmp_path):
    plan = tmp_path / "plan.json"
    few = ["--workers", "2", "--pipelines", "1", "--micro-batches", "2", "--trials", "1", "--budget", "0.1"]
    found = answer("tune", WORKLOAD, *few, "--out", str(plan))
    assert found["batch_size"] == 32
    assert any(row["measured_batch_s"] for row in found["rows"])
    trained = answer(
        "train", WORKLOAD, "--plan", str(plan), "--max-batches", "4", "--out", str(tmp_path / "run")
    )
    assert trained["batches"] == 4


@pytest.mark.slow
@pytest.mark.ranks
def test_systems_are_compared_on_it(tmp_path):
    few = ["--max-batches", "8", "--validations", "1", "--out", str(tmp_path / "out")]
    found = answer("compare", WORKLOAD, "--systems", "avgpipe,gpipe", *few)
    assert found["what"] == "train_your_model"
    assert [(system["status"], system["samples"]) for system in found["systems"]] == [("ok", 256)] * 2
    assert Path(tmp_path / "out" / "curves.png").is_file()


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) < 50
