from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.cli.command import avgpipe, environment
from tests.examples.scripts import COMMANDS, EXAMPLES
from tests.patience import limit

STEPS = "24"
LOSS = re.compile(r"step (\d+): loss ([\d.]+)")


def losses(text):
    return {int(step): float(loss) for step, loss in LOSS.findall(text)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses of the loop on one device."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "nanogpt.py", STEPS],
        cwd=tmp_path_factory.mktemp("plain"),
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=limit(100),
    )
    return losses(done.stdout)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_stages_have_the_losses_of_the_loop(command, plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = str(EXAMPLES / "nanogpt_pipeline.py")
    if command == "python":
        process = subprocess.Popen(
            [sys.executable, script, STEPS],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    else:
        process = avgpipe("run", "--stages", "2", script, STEPS)
    stdout, stderr = process.communicate(timeout=limit(100))
    assert process.returncode == 0, stderr
    assert list(plain) == [0, 10, 20, 23]
    assert losses(stdout) == pytest.approx(plain, abs=2e-5)  # of one rank only; printed with five digits
    assert (tmp_path / "checkpoint" / "manifest.json").exists()
