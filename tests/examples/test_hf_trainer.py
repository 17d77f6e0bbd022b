from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="the example trains a model of transformers")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from tests.cli.command import environment
from tests.examples.scripts import COMMANDS, EXAMPLES, printed
from tests.patience import limit

SCRIPT = EXAMPLES / "hf_trainer.py"


def losses(text, name):
    """The values that the trainer has printed under a name."""
    return [float(part.split("'")[1]) for part in text.split(f"'{name}': ")[1:]]


def assert_learnt(text, folder):
    assert losses(text, "loss")[-1] < 0.7 * losses(text, "loss")[0]
    evaluated = losses(text, "eval_loss")
    assert evaluated[-1] < evaluated[0]
    assert {"config.json", "model.safetensors", "checkpoint-28"} <= {path.name for path in folder.iterdir()}


@pytest.mark.ranks
@pytest.mark.parametrize("command", [COMMANDS[0], pytest.param(COMMANDS[1], marks=pytest.mark.slow)])
def test_the_model_learns(command, tmp_path):
    assert_learnt(printed(SCRIPT, command, str(tmp_path)), tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
def test_accelerates_launcher_starts_the_ranks(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    rest = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    done = subprocess.run(
        [*command, *rest, SCRIPT, tmp_path],
        env=environment(HF_HOME=str(tmp_path / "home"), PATH=os.environ["PATH"]),
        capture_output=True,
        text=True,
        timeout=limit(100),
    )
    assert done.returncode == 0, done.stderr
    assert_learnt(done.stdout, tmp_path)
    assert done.stdout.count("'train_runtime'") == 1  # one rank alone tells


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) < 40
