"""Failures of a run: every rank ends in time, with a message that names the cause."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from tests.patience import limit
from tests.runner import Ranks
from tests.runtime.cases import momentum

pytestmark = pytest.mark.ranks


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken on purpose")


class Hangs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.environ["RANK"] == "2":  # rank 0 runs the whole model, for Audit
            threading.Event().wait(60)
        return x


def with_layer(kind: str, timeout_s: float) -> None:
    layer = {"fails": Fails, "hangs": Hangs}[kind]()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), layer)
    plan = Plan(stages=3, micro_batches=2)
    batch = torch.zeros(4, 4), torch.zeros(4, dtype=torch.long)
    with Pipeline(model, plan, loss_fn=nn.CrossEntropyLoss(), optimizer=momentum, timeout_s=timeout_s) as p:
        list(p.train([batch]))


@pytest.mark.promise
def test_an_error_in_a_layer_ends_all_ranks_with_its_text() -> None:
    for code, output in Ranks(3, with_layer, kind="fails", timeout_s=60).join(30):
        assert code == 1
        last = output.strip().split("\n")[-1]
        assert (
            "stage 2, layer 2 (Fails) failed on its input ([2, 4] float32; it came from stage 1): broken on purpose"
            in last
        )


@pytest.mark.slow
def test_a_wait_over_the_limit_names_the_rank_and_the_message() -> None:
    ranks = Ranks(3, with_layer, kind="hangs", timeout_s=6)
    for process in ranks.processes[:2]:
        process.join(limit(40))
    ranks.processes[2].kill()
    texts = [
        f"rank {rank} waited 6 s for the gradient of micro-batch 0 of batch 0 from stage {rank + 1} "
        f"(pipeline 0, stage {rank}); rank {rank + 1} was last seen"
        for rank in (0, 1)
    ]
    hung = "s ago: F0 of batch 0, pipeline 0, stage 2"
    for code, output in ranks.join(10)[:2]:
        assert code == 1
        assert any(text in output for text in texts), output[-1500:]
        assert hung in output or "waiting for the gradient of micro-batch 0 of batch 0 from stage 2" in output
