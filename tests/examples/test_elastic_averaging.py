from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "elastic_averaging.py"


@pytest.mark.slow
def test_four_replicas_beat_one_given_as_many_steps():
    """The script with fewer steps, both at their best learning rate of its grid."""
    spec = importlib.util.spec_from_file_location("elastic_averaging", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    one, four = (min(script.fit(n, lr, steps=120) for lr in (0.008, 0.016)) for n in (1, 4))
    assert four < one - 0.1


def test_the_script_is_short():
    assert len([line for line in SCRIPT.read_text().splitlines() if line.strip()]) < 30
