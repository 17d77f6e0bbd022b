from __future__ import annotations

import re
import runpy

import pytest
import torch

from tests.examples.scripts import COMMANDS, EXAMPLES, printed

SCRIPT = EXAMPLES / "gradient_norms.py"
LINE = re.compile(r"batch (\d+), pipeline 0, stage (\d): ([\w.]+) has norm ([\d.]+)")


def test_the_norms_are_those_of_one_device(caplog):
    with caplog.at_level("INFO", "gradients"):
        found = runpy.run_path(str(SCRIPT))
    model, (x, y) = found["model"], found["loader"][0]  # the model has the weights of the beginning
    torch.nn.functional.cross_entropy(model(x), y).backward()
    norms = {name: float(p.grad.norm()) for name, p in model.named_parameters()}
    logged = [LINE.fullmatch(message).groups() for message in caplog.messages]
    assert {name: float(norm) for batch, _, name, norm in logged if batch == "0"} == pytest.approx(
        norms, abs=1e-4
    )
    assert {(stage, name) for _, stage, name, _ in logged} == {
        ("0", "0.weight"),
        ("0", "0.bias"),
        ("1", "2.weight"),
        ("1", "2.bias"),
    }
    assert {batch for batch, *_ in logged} == {"0", "10"}
    assert len(found["losses"]) == 20


@pytest.mark.ranks
@pytest.mark.slow
def test_a_process_for_each_stage_logs_the_same():
    alone, together = (sorted(LINE.findall(printed(SCRIPT, command))) for command in COMMANDS)
    assert len(alone) == 8
    assert alone == together


def test_wrong_intervals_are_refused():
    kind = runpy.run_path(str(SCRIPT))["GradientNorms"]
    with pytest.raises(ValueError, match="every must be 1 or more, not 0"):
        kind(every=0)


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) < 50
