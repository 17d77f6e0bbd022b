"""``avgpipe check``: what it prints, and the code that it ends with."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.command import invoke, strict
from tests.scripts import WriteScript

MAKE = """
def make():
    return task()

def summed():
    return task(loss_fn=lambda y, t: nn.functional.cross_entropy(y, t, reduction="sum"))

class Noisy(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x)

def noisy():
    return task(model=nn.Sequential(*model(), Noisy(), nn.Linear(2, 2)))
"""


def check(write_script: WriteScript, function: str, *options: str) -> Any:
    return invoke("check", f"{write_script(MAKE)}:{function}", "--batches", "3", "--alone", *options)


def test_a_plan_that_trains_as_one_device_ends_well(write_script: WriteScript) -> None:
    result = check(write_script, "make")
    assert result.exit_code == 0, result.stderr
    first, *rest = result.stdout.splitlines()
    assert first == (
        "in one process: 3 batches in float64: 2 stages, 2 pipelines, 4 micro-batches, advance-forward trains as one "
        "device does"
    )
    assert [line.split("  ")[1] for line in rest[:3]] == [
        *("losses", "weights and buffers after the first batch", "weights and buffers after the last batch")
    ]
    assert (
        "differs by design: 2 pipelines are averaged by the rule mean-gradient with staleness 1"
        in result.stdout
    )


def test_a_loss_that_is_weighed_wrongly_ends_with_1(write_script: WriteScript) -> None:
    result = check(write_script, "summed", "--json", "--pipelines", "1")
    assert result.exit_code == 1
    found = strict(result.stdout)["in one process"]
    assert not found["equal"]
    assert found["plan"]["stages"] == 2
    assert found["compared"][0]["apart"] > 0.1


@pytest.mark.ranks
def test_layers_that_draw_are_compared_with_one_stage_on_the_workers_too(write_script: WriteScript) -> None:
    result = invoke("check", f"{write_script(MAKE)}:noisy", "--batches", "3", "--json", "--pipelines", "1")
    assert result.exit_code == 0, result.stderr
    found = strict(result.stdout)
    assert list(found) == ["in one process", "on 2 workers"]
    assert all(of["equal"] for of in found.values())
    assert any("layers draw random numbers" in note for of in found.values() for note in of["notes"])


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--isolate",), "--isolate: check trains in one process and on the plan's workers"),
        (("--stages", "9"), "9 stages are more than"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    write_script: WriteScript, option: tuple[str, ...], said: str
) -> None:
    result = check(write_script, "make", *option)
    assert result.exit_code == 2
    assert said in result.stderr


def test_under_torchrun_it_is_refused(write_script: WriteScript, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = check(write_script, "make")
    assert result.exit_code == 2
    assert "run it once, without torchrun" in result.stderr
