from __future__ import annotations

import re

import pytest

pytest.importorskip("lightning", reason="the example trains with Lightning")

from tests.examples.scripts import COMMANDS, EXAMPLES, printed

SCRIPT = EXAMPLES / "lightning_module.py"


@pytest.mark.ranks
@pytest.mark.parametrize("command", [COMMANDS[0], pytest.param(COMMANDS[1], marks=pytest.mark.slow)])
def test_the_model_learns(command, tmp_path):
    found = re.findall(r"validation loss ([\d.]+)", printed(SCRIPT, command, str(tmp_path)))
    assert len(found) == 1
    assert float(found[0]) < 0.3
    assert list(tmp_path.glob("**/*.ckpt.pipeline/manifest.json"))


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) < 40
