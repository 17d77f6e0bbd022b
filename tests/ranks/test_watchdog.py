"""What the other ranks report when a rank hangs, fails, dies, or leaves because it is done."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Audit, Pipeline, Plan
from avgpipe.errors import PeerLost
from avgpipe.links.link import Key, Mailbox
from avgpipe.ranks.met import Watchdog
from avgpipe.ranks.world import since
from tests.links.ends import LINKS
from tests.patience import limit, wait_until
from tests.runner import Ranks, touch
from tests.runtime.cases import momentum

FROM_1, FROM_2 = Key("B", 0, 1, 0, 5, 0), Key("R", 0, 2, 0, 5, 0)


class FakeWorld:
    rank = 0

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.failure: PeerLost | None = None

    def note_doing(self, doing: str) -> None:
        self.noted.append(doing)

    def reported(self) -> PeerLost | None:
        return self.failure

    def lost(self, peer: int, doing: str) -> PeerLost:
        return PeerLost(f"rank {peer} died")


def test_closing_waits_for_what_the_thread_is_at() -> None:
    """A thread that is left in torch would abort the process when it ends."""
    is_at, may_go_on = threading.Event(), threading.Event()

    def look() -> None:
        is_at.set()
        may_go_on.wait(limit(20))

    watchdog = Watchdog(FakeWorld(), Mailbox(), str, {}, looks=[look])  # type: ignore[arg-type]
    assert is_at.wait(limit(20))
    closing = threading.Thread(target=watchdog.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    may_go_on.set()
    closing.join(limit(20))
    assert not watchdog._thread.is_alive()


@pytest.fixture
def watched() -> Any:
    """A watchdog of a process that stands for rank 2."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    world, box, doing = FakeWorld(), Mailbox(), ["F0"]
    watchdog = Watchdog(world, box, lambda: doing[0], {2: process.pid})
    yield world, box, doing, process
    watchdog.close()
    process.kill()
    process.communicate()


@pytest.mark.promise
def test_what_this_rank_does_is_published_when_it_changes(watched: Any) -> None:
    world, _, doing, _ = watched
    wait_until(lambda: world.noted == ["F0"])
    doing[0] = "B0"
    wait_until(lambda: world.noted == ["F0", "B0"])


@pytest.mark.ranks
def test_a_failure_of_another_rank_ends_every_wait(watched: Any) -> None:
    world, box, _, _ = watched
    world.failure = PeerLost("rank 0 stops because of rank 1: ValueError: broken")
    with pytest.raises(PeerLost, match="rank 0 stops because of rank 1: ValueError: broken"):
        box.wait_until(lambda: False, 20)


@pytest.mark.promise
@pytest.mark.parametrize("how", ["killed", "done"])
def test_a_process_that_ends_ends_waits_for_its_messages_alone(watched: Any, how: str) -> None:
    _, box, _, process = watched
    process.kill() if how == "killed" else process.communicate(b"\n")
    with pytest.raises(PeerLost, match="rank 2 died"):
        box.wait_until(lambda: False, 20, lambda: [FROM_1, FROM_2])
    assert not box.wait_until(lambda: False, 0.01, lambda: [FROM_1])
    box.put(FROM_2, 1)
    assert box.wait_until(lambda: FROM_2 in box, 0, lambda: [k for k in [FROM_2] if k not in box])


@pytest.mark.promise
def test_a_process_that_is_gone_before_is_noticed() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    box = Mailbox()
    watchdog = Watchdog(FakeWorld(), box, str, {2: process.pid})
    with pytest.raises(PeerLost):
        box.wait_until(lambda: False, 20, lambda: [FROM_2])
    watchdog.close()


def test_time_is_shown_in_seconds_that_matter() -> None:
    now = time.monotonic()
    assert since("waiting", now) == "waiting"
    assert since("waiting", now - 3.2) == "waiting, for 3 s"


# ---- ranks -------------------------------------------------------------------------------------------------------


class Waits(nn.Module):
    """A layer that touches "in" and waits for the file "go" in its last backward (or forward)."""

    def __init__(self, at: int, where: str) -> None:
        super().__init__()
        self.at, self.where, self.count = at, where, {"forward": 0, "backward": 0}

    def note(self, where: str) -> None:
        self.count[where] += 1
        if self.where == where and self.count[where] == self.at:
            touch("in")
            wait_until(Path(os.environ["TEST_FOLDER"], "go").exists, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note("forward")
        return _Hook.apply(x, self)


class _Hook(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Waits) -> torch.Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.layer.note("backward")
        return grad, None


def train(
    K: int,
    stage: int,
    at: int,
    where: str,
    link: str,
    timeout_s: float = 60,
    N: int = 1,
    count: int = 3,
    audit: str = "off",
) -> list[float]:
    """Of two layers a stage, the second on ``stage`` is the one that waits."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(2 * K)]
    layers[2 * stage + 1] = nn.Sequential(nn.Linear(4, 4), Waits(at, where))
    plan = Plan(stages=K, pipelines=N, partition=[2 * k for k in range(1, K)])
    batches = [(torch.ones(4, 4), torch.zeros(4, dtype=torch.long))] * count
    options: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": momentum}
    options["extensions"] = [Audit(audit)]  # which may run all layers on the first rank, before training
    with Pipeline(nn.Sequential(*layers), plan, **options, link=link, timeout_s=timeout_s) as p:
        losses = [r.loss for r in p.train(batches)]
    touch("done")
    return losses


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS)
def test_a_rank_that_has_finished_and_left_disturbs_no_other(link: str) -> None:
    workers = Ranks(3, train, K=3, stage=1, at=3, where="backward", link=link)
    workers.wait_for(1, "in")
    workers.processes[2].join(limit(60))
    assert workers.processes[2].exitcode == 0, workers.outputs()[2]
    time.sleep(1.2)  # for whoever wrongly minds: two ticks of its watchdog
    assert workers.processes[0].is_alive(), workers.outputs()[0]
    (workers.folder / "go").touch()
    losses = workers.results()
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_hung_layer_is_named_on_every_rank(link: str, stage: int) -> None:
    timeout_s = 3.0
    workers = Ranks(3, train, K=3, stage=stage, at=1, where="forward", link=link, timeout_s=timeout_s)
    others = [rank for rank in range(3) if rank != stage]
    for rank in others:
        workers.processes[rank].join(limit(60))
    workers.kill(stage)
    ends = workers.join(10)
    for rank in others:
        code, output = ends[rank]
        last = output.strip().split("\n")[-1]
        assert code == 1, output
        # its own wait ran into the limit, or it follows the rank whose wait did first
        assert "waited 3 s for the" in last, output
        assert "of micro-batch 0 of batch 0 from stage" in last
        assert "(pipeline 0, stage" in last
        assert "was last seen" in last
        assert f"F0 of batch 0, pipeline 0, stage {stage}" in last or "waiting for the" in last, last
    assert any(f"F0 of batch 0, pipeline 0, stage {stage}" in ends[rank][1] for rank in others), ends


@pytest.mark.ranks
def test_a_hung_layer_is_named_where_the_first_batch_is_compared_with_the_model() -> None:
    workers = Ranks(
        2, train, K=2, stage=1, at=1, where="forward", link="shm", timeout_s=3.0, audit="first-batch"
    )
    workers.processes[1].join(limit(60))
    workers.kill(0)
    last = workers.join(10)[1][1].strip().split("\n")[-1]
    assert "rank 0 was last seen" in last
    assert "comparing the stages with the model, for Audit" in last
