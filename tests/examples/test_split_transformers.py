from __future__ import annotations

import re

import pytest

from tests.examples.scripts import COMMANDS, EXAMPLES, printed

pytest.importorskip("transformers")
SCRIPT = EXAMPLES / "split_transformers.py"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_model_learns_and_its_weights_load_back(command):
    text = printed(SCRIPT, command)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) == 4  # of one rank only
    assert losses[-1] < losses[0] / 2
    (accuracy,) = re.findall(r"accuracy of the plain model: ([\d.]+)%", text)
    assert float(accuracy) > 90


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) < 40
