from __future__ import annotations

import re

import pytest

from tests.examples.scripts import COMMANDS, EXAMPLES, printed

pytest.importorskip("transformers")
SCRIPT = EXAMPLES / "large_model.py"


@pytest.mark.ranks
@pytest.mark.slow
def test_the_model_learns_the_same_in_one_process_and_in_two(tmp_path):
    folder = str(tmp_path / "model")
    printed(SCRIPT, "python", "make", folder)
    alone, together = (printed(SCRIPT, command, "train", folder) for command in COMMANDS)
    assert alone == together
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", alone)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 3


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) < 50
