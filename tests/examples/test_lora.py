from __future__ import annotations

import pytest

pytest.importorskip("peft", reason="adapters are of a package of their own")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from tests.examples.scripts import COMMANDS, EXAMPLES, printed
from tests.examples.test_hf_trainer import losses

SCRIPT = EXAMPLES / "lora.py"


@pytest.mark.ranks
@pytest.mark.parametrize("command", [COMMANDS[0], pytest.param(COMMANDS[1], marks=pytest.mark.slow)])
def test_the_adapters_learn(command, tmp_path):
    found = losses(printed(SCRIPT, command, str(tmp_path)), "loss")
    assert found[-1] < 0.8 * found[0]
    names = {path.name for path in tmp_path.iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) < 40
