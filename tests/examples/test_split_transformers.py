from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.cli.command import ROOT, avgpipe, environment

pytest.importorskip("transformers")
SCRIPT = ROOT / "examples" / "split_transformers.py"


def printed(command):
    """What the script prints, alone or on two workers."""
    if command == "python":
        done = subprocess.run(
            [sys.executable, SCRIPT], env=environment(), capture_output=True, text=True, check=True
        )
        return done.stdout
    process = avgpipe("run", "--stages", "2", str(SCRIPT))
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr
    return stdout


@pytest.mark.parametrize("command", ["python", "avgpipe run"])
def test_the_model_learns_and_its_weights_load_back(command):
    text = printed(command)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) == 4  # of one rank only
    assert losses[-1] < losses[0] / 2
    (accuracy,) = re.findall(r"accuracy of the plain model: ([\d.]+)%", text)
    assert float(accuracy) > 90


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) < 40
