"""Commands as they are installed: a process of its own that ends well and prints what it should.

`train`, `run` and `join` have such tests of their own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import environment, strict
from tests.lab.pages.folders import write_run
from tests.patience import limit
from tests.scripts import WriteScript

COMMAND = Path(sys.executable).with_name("avgpipe")
LINE = ("--bandwidth", "1Gbit", "--latency", "1ms")
MAKE = """
def make():
    return task(held_out=[(torch.randn(8, 4), torch.randint(2, (8,)))])
"""


def said(*words: object) -> Any:
    """What a command prints with ``--json``."""
    command = [str(COMMAND), *map(str, words), "--json"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=limit(100))
    assert done.returncode == 0, done.stdout + done.stderr
    return strict(done.stdout)


@pytest.mark.promise
def test_from_a_model_to_a_plan(write_script: WriteScript, tmp_path: Path) -> None:
    assert said("doctor")["links"]
    model, profile, plan = f"{write_script(MAKE)}:make", tmp_path / "profile.json", tmp_path / "plan.json"
    layers = said("profile", model, "--budget", "0.1", "--micro-batch-sizes", "1,2", *LINE, "--out", profile)[
        "layers"
    ]
    assert len(layers) == 3
    assert {row["method"] for row in said("partition", profile, "--workers", "2")["methods"]} >= {"pipedream"}
    options = ("--workers", "2", "--batch-size", "4", "--out", plan)
    assert said("tune", "--profile", profile, *options)["plan"] == strict(plan.read_text())
    simulated = said(
        "simulate", "--stages", "2", "--micro-batches", "4", "--forward-ms", "1", "--backward-ms", "2"
    )
    assert simulated["makespan_s"] == pytest.approx(0.015)


@pytest.mark.promise
def test_a_plan_is_checked_in_one_process_and_on_its_workers(write_script: WriteScript) -> None:
    found = said("check", f"{write_script(MAKE)}:make", "--batches", "2", "--pipelines", "1")
    assert list(found) == ["in one process", "on 2 workers"]
    assert all(where["equal"] for where in found.values())
    alone, apart = (where["losses"]["plan"] for where in found.values())
    assert alone == pytest.approx(apart)


@pytest.mark.promise
def test_from_runs_to_a_report(write_script: WriteScript, tmp_path: Path) -> None:
    model, out = f"{write_script(MAKE)}:make", tmp_path / "out"
    compared = said("compare", model, "--systems", "avgpipe,gpipe", "--validations", "2", "--out", out)
    assert (compared["what"], compared["metric_name"]) == ("own_script", "loss")
    assert [system["status"] for system in compared["systems"]] == ["ok", "ok"]
    assert all(system["samples"] == 40 for system in compared["systems"])
    run = write_run(tmp_path / "run", batches=8)
    assert len(said("report", run)["runs"]) == 1
    command = [str(COMMAND), "watch", str(run), "--once"]
    watched = subprocess.run(command, env=environment(), capture_output=True, timeout=limit(100), check=True)
    assert b"batch 8" in watched.stdout


@pytest.mark.promise(0)
@pytest.mark.parametrize(
    "options",
    [
        "kernels --elements 2000 --threads 1 --rounds 2 --no-compile --only pull",
        "transfers --sizes 8 --rounds 1 --links local",
        "schedules --stages 2 --micro-batches 4 --forward-ms 1 --backward-ms 2 --activation 4KiB --rounds 1 --batches 1"
        " --rows 1f1b",
        "faults --seed 1 --kinds kill --ways plain --only plain-0",
    ],
    ids=lambda options: options.split()[0],
)
def test_a_benchmark(options: str) -> None:
    found = said("bench", *options.split())
    assert found["command"].startswith(f"avgpipe bench {options.split()[0]} ")
    assert found.get("violations", []) == []
