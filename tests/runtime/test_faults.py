"""Failures of a run: every rank ends in time, with a message that names the cause."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.checkpoint import verify_checkpoint
from tests.patience import limit, wait_until
from tests.runner import Ranks
from tests.runtime.cases import language_model, momentum, token_batches

pytestmark = pytest.mark.ranks


def endless(K: int, N: int, folder: str) -> None:
    """Train until something ends it; a file per rank says that training is under way."""
    plan = Plan(stages=K, pipelines=N, micro_batches=2)
    batches = token_batches(2, 8)
    with Pipeline(language_model(), plan, loss_fn=nn.CrossEntropyLoss(), optimizer=momentum) as p:
        for _ in range(1_000_000):
            for result in p.train(batches):
                if result.batch == 10:
                    Path(folder, os.environ["RANK"]).touch()


@pytest.mark.promise(1)
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_every_rank_names_the_one_that_was_killed(victim: int, tmp_path: Path) -> None:
    ranks = Ranks(3, endless, K=3, N=2, folder=str(tmp_path))
    wait_until(lambda: len(list(tmp_path.iterdir())) == 3, 60)
    ranks.kill(victim)
    started = time.monotonic()
    ends = ranks.join(15)
    assert time.monotonic() - started < limit(15)
    for rank, (code, output) in enumerate(ends):
        if rank != victim:
            assert code == 1, output
            assert "PeerLost" in output
            assert f"rank {victim} (stage {victim}) died or closed its connection" in output, output[-1500:]


def endless_saving(K: int, folder: str) -> None:
    """Save again and again; most of the time goes into collectives."""
    with Pipeline(language_model(), Plan(stages=K), loss_fn=nn.CrossEntropyLoss(), optimizer=momentum) as p:
        for _ in range(1_000_000):
            p.save(f"{folder}/checkpoint")
            Path(folder, os.environ["RANK"]).touch()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_while_saving_is_named_and_the_checkpoint_is_whole(victim: int, tmp_path: Path) -> None:
    ranks = Ranks(3, endless_saving, K=3, folder=str(tmp_path))
    wait_until(lambda: len(list(tmp_path.iterdir())) == 4, 60)
    ranks.kill(victim)
    for rank, (code, output) in enumerate(ranks.join(15)):
        if rank != victim:
            assert code == 1, output
            assert f"PeerLost: rank {victim} (stage {victim}) died" in output, output[-1500:]
    assert len(verify_checkpoint(tmp_path / "checkpoint").files) == 3


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken on purpose")


class Hangs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
def test_a_wait_over_the_limit_says_who_waited_for_what() -> None:
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
