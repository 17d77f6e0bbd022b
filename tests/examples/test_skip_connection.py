from __future__ import annotations

import re

import pytest

from tests.examples.scripts import COMMANDS, EXAMPLES, printed

SCRIPT = EXAMPLES / "skip_connection.py"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_model_learns(command):
    text = printed(SCRIPT, command)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) == 5  # of one rank only
    assert losses[-1] < losses[0] / 5
    error, trivial = map(float, re.findall(r"0\.\d{4}", text))
    assert error < trivial / 5


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) < 40
