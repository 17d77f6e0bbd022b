from __future__ import annotations

import re
import runpy

import pytest

from tests.examples.scripts import COMMANDS, EXAMPLES, printed

SCRIPT = EXAMPLES / "parameter_groups.py"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_model_learns(command):
    first, last = map(float, re.findall(r"[\d.]+", printed(SCRIPT, command)))
    assert last < first / 3


def test_groups_follow_from_names(capsys):
    found = runpy.run_path(str(SCRIPT))
    optimizers = found["pipeline"].optimizers
    groups = {shape: g for o in optimizers for g in o.param_groups for shape in [tuple(g["params"][0].shape)]}
    assert groups[32, 8]["lr"] == pytest.approx(3e-3 * 0.8**5)
    assert groups[4, 32]["lr"] == 3e-3
    assert {len(shape): g["weight_decay"] for shape, g in groups.items()} == {2: 0.1, 1: 0.0}
    first, last = map(float, re.findall(r"[\d.]+", capsys.readouterr().out))
    assert last < first / 3


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) < 40
