"""``avgpipe train --rebalance``: layers move between stages that take uneven times, and training goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from avgpipe import Plan
from tests.cli.command import avgpipe, invoke, rows
from tests.patience import limit
from tests.scripts import WriteScript

SPINNING = """
import time

class Spins(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        end = time.process_time() + 2e-3
        while time.process_time() < end:
            pass
        return torch.tanh(self.lin(x))

def make(lr=0.1):
    layers = [*(Spins() for _ in range(6)), nn.Linear(4, 2)]
    pairs = [(torch.randn(8, 4).double(), torch.randint(2, (8,))) for _ in range(10)]
    momentum = lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9)
    model = nn.Sequential(*layers).double()
    return task(model=model, loader=pairs, optimizer=momentum, held_out=pairs[:2], epochs=3)
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.promise(1)
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("pipelines", [1, 2])
def test_layers_move_and_losses_stay(pipelines: int, write_script: WriteScript, tmp_path: Path) -> None:
    script, uneven = write_script(SPINNING), tmp_path / "uneven.json"
    batch = {} if pipelines == 1 else {"batch": "per-pipeline", "staleness": 0}
    Plan(stages=2, pipelines=pipelines, micro_batches=2, partition=(1,), **batch).save(uneven)
    losses = []
    for name, more in (("stays", []), ("moves", ["--rebalance", "--verify-every", "4", "--verify-wire"])):
        out = tmp_path / name
        arguments = ["train", f"{script}:make", "--plan", uneven, "--out", out, "--autocast", "none"]
        command = avgpipe(*arguments, *more)
        _, said = command.communicate(timeout=limit(200))
        assert command.returncode == 0, said
        losses.append([row["loss"] for row in rows(out)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    first, *later = re.findall(r"rebalanced: .*", said)  # later ones where other work slows a worker down
    pattern = (
        r"rebalanced: stages now begin with layers (\d) instead of {}; batches should take (\d+) % less time"
    )
    assert re.fullmatch(pattern.format(1), first), first
    line = [first, *later][-1]
    found = re.fullmatch(pattern.format(r"\d"), line)
    assert found is not None, line
    assert found[1] in "34"
    assert 0 < int(found[2]) < 60  # by times that were measured beside all other tests
    kept = [
        json.loads((tmp_path / "moves" / name).read_text())["partition"] for name in ("plan.json", "run.json")
    ]
    assert kept == [[int(found[1])]] * 2


def test_plans_without_stages_to_move_between_are_refused(write_script: WriteScript, tmp_path: Path) -> None:
    script = write_script(SPINNING)
    for more in (["--stages", "1"], ["--stages", "2", "--spread"], ["--stages", "2", "--replication", "2,1"]):
        result = invoke("train", f"{script}:make", "--rebalance", "--out", str(tmp_path / "run"), *more)
        assert result.exit_code == 2
        assert "--rebalance moves layers between stages that have a worker each" in result.stderr
