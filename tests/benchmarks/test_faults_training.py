"""What a record of runs with kills comes to; who is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from avgpipe.ranks.environment import PIPELINE, SPARE
from benchmarks.faults.training import compared, picture, ranks
from benchmarks.tables.disturbed import disturbed, disturbed_bars


def run(seed: int, loss: float, pace: float, batches: list[list[int]], **more: Any) -> dict[str, Any]:
    valid = [
        {"samples": samples, "loss": loss + 1 / (1 + samples), "metric": 10.0} for samples in (0, 50, 96)
    ]
    of = {
        "seed": seed,
        "samples": 96,
        "seconds": 96 / pace,
        "loss": loss,
        "bleu": 10 * loss,
        "validations": valid,
    }
    paces = {"samples_per_second": pace, "training_samples_per_second": 1.1 * pace}
    return {**of, **paces, "samples_of_batches": batches, **more}


def record() -> dict[str, Any]:
    kills = [{"at": 0.5, "samples": 48}]
    away = [{"pipeline": 1, "at": 0.5, "seconds": 4.25}]
    whole = [[32, 2], [28, 1]]
    runs = {
        "undisturbed, seed 0": run(0, 2.0, 100.0, whole),
        "undisturbed, seed 1": run(1, 2.25, 90.0, whole),
        "disturbed, seed 0": run(
            0, 2.125, 80.0, [[32, 1], [40, 1], [21, 1]], kills=kills, lost=1, joined=1, away=away
        ),
        "disturbed, seed 1": {"seed": 1, "failed": "no pipeline is left"},
    }
    good = {name: one for name, one in runs.items() if "failed" not in one}
    return {"runs": runs, "compared": compared(good)}


def test_kills_are_compared_with_the_undisturbed_run_of_their_seed(tmp_path: Path) -> None:
    found = record()
    (one,) = found["compared"]["disturbed"]
    assert (one["seed"], one["pace"], one["loss_more"], one["bleu_more"]) == (0, 0.8, 0.125, 1.25)
    assert (one["samples_twice"], one["samples_never"]) == (8, 7)
    assert found["compared"]["undisturbed"]["loss"] == {"least": 2.0, "most": 2.25}
    assert "| 0 | **0.80** | **0.80** | 0.125 (0.250) | 1.2 (2.5) | **8** | **7** |" in disturbed_bars(found)
    rows = disturbed(found)
    assert "| disturbed, seed 0 | 96 | 1 | 80 | 88 | 2.125 | 21.2 | 1 | 1 | 1 | 4.2 (4.2) |" in rows
    assert "**failed**: no pipeline is left" in rows
    picture(found["runs"], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.ranks
def test_only_processes_of_pipelines_are_killed(tmp_path: Path) -> None:
    waits = [sys.executable, "-c", "input()"]
    of_pipeline = subprocess.Popen(waits, stdin=subprocess.PIPE, env={**os.environ, PIPELINE: "2"})
    told = subprocess.Popen(waits, stdin=subprocess.PIPE, env={**os.environ, SPARE: str(tmp_path / "gone")})
    spare = subprocess.Popen(waits, stdin=subprocess.PIPE, env={**os.environ, SPARE: str(tmp_path)})
    other = subprocess.Popen(waits, stdin=subprocess.PIPE)
    try:
        assert ranks(os.getpid()) == sorted([of_pipeline.pid, told.pid])
    finally:
        for process in (of_pipeline, told, spare, other):
            process.communicate(b"\n")
