from __future__ import annotations

import re

import pytest

from tests.examples.scripts import EXAMPLES, printed

SCRIPT = EXAMPLES / "torch_schedule.py"


@pytest.mark.ranks
@pytest.mark.slow
def test_the_model_learns():
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", printed(SCRIPT, "avgpipe run"))]
    assert len(losses) == 5  # of the last rank only
    assert losses[-1] < losses[0] / 3


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) < 40
