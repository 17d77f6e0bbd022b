"""Deaths, refusals and disagreements over each link: a clear error on every rank in time, and nothing left behind."""

from __future__ import annotations

import os
import resource
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.errors import PipelineError
from avgpipe.links import shared
from avgpipe_ext import ring
from tests.links.ends import LINKS
from tests.options import grouped
from tests.patience import SharedMemory, limit
from tests.runner import Ranks, run, touch
from tests.runtime.cases import language_model, momentum, token_batches

pytestmark = pytest.mark.ranks

LOSS = nn.CrossEntropyLoss()


class Wide(nn.Module):
    """Makes a message of ``size`` floats for each sample, from which one number is used."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.scale = size, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :1] * self.scale).expand(-1, self.size)


class Narrow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :4]


def endless(K: int, link: str, floats: int, N: int = 1) -> None:
    """Messages of ``floats`` float32 between all stages, until something ends it."""
    layers: list[nn.Module] = []
    for _ in range(K - 1):
        layers += [nn.Linear(4, 4), Wide(floats), Narrow()]
    model = nn.Sequential(*layers, nn.Linear(4, 4))
    plan = Plan(stages=K, pipelines=N, micro_batches=2, partition=[3 * k + 2 for k in range(K - 1)])
    batch = torch.randn(2, 4), torch.zeros(2, dtype=torch.long)
    with Pipeline(model, plan, loss_fn=LOSS, optimizer=momentum, link=link, timeout_s=30) as p:
        for _ in range(1_000_000):
            for result in p.train([batch] * 4):
                if result.batch == 3:
                    touch("going")


CASES = [
    # small messages: each rank alone, and several at once
    *((link, 3, victims, 16) for link in LINKS for victims in [(0,), (1,), (2,), (0, 2)]),
    # 64 MiB, so that the end comes in the middle of a transfer
    *((link, 2, victims, 16 << 20) for link in LINKS for victims in [(0,), (1,)]),
    ("shm", 3, (0, 1, 2), 1 << 16),
]


@pytest.mark.promise(1)
@pytest.mark.slow
@pytest.mark.parametrize(("link", "K", "victims", "floats"), CASES)
def test_survivors_name_a_rank_that_was_killed_and_nothing_is_left(
    link: str, K: int, victims: tuple[int, ...], floats: int
) -> None:
    memory = SharedMemory()
    workers = Ranks(K, endless, K=K, link=link, floats=floats, N=1 if floats > 1000 else 2)
    workers.wait_for(K, "going")
    workers.kill(*victims)
    started = time.monotonic()
    ends = workers.join(40)
    assert time.monotonic() - started < limit(40)
    for rank, (code, output) in enumerate(ends):
        if rank in victims:
            assert code == -9
            continue
        assert code == 1, (rank, output)
        last = output.strip().split("\n")[-1]
        assert "PeerLost" in last, output
        assert any(f"rank {v} (stage {v}) died or closed its connection" in last for v in victims), output
    memory.assert_nothing_is_left()


def refused(link: str, how: str) -> str:
    """Train with messages that grow, on a rank 0 that gets no memory for them."""
    if os.environ["RANK"] == "0":
        if how == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
        else:
            reserve = ring.Sender.reserve
            ring.Sender.reserve = lambda sender, size: reserve(  # type: ignore[method-assign]
                sender, size if size <= 4 << 20 else 1 << 50
            )
    model = nn.Sequential(nn.Linear(4, 4), Wide(1 << 20), Narrow())
    plan = Plan(stages=2, micro_batches=2, partition=[2])
    with Pipeline(model, plan, loss_fn=LOSS, optimizer=momentum, link=link, timeout_s=30) as p:
        batches = [(torch.randn(n, 4), torch.zeros(n, dtype=torch.long)) for n in (2, 8)]
        with pytest.raises((PipelineError, MemoryError)) as caught:
            list(p.train(batches))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["limit", "memory"])
def test_memory_that_is_refused_is_an_error_on_every_rank(how: str) -> None:
    texts = run(2, refused, link="shm", how=how)
    reason = "File too large" if how == "limit" else "Cannot allocate memory"
    assert texts[0].startswith("MemoryError: no ")
    assert f"bytes of shared memory ({reason}): use smaller or fewer micro-batches" in texts[0]
    assert texts[1].startswith("PeerLost: rank 1 stops because of rank 0: MemoryError: no ")
    assert "\n" not in texts[1]


def no_inbox(link: str) -> str:
    if os.environ["RANK"] == "1":

        def refuse(size: int) -> Any:
            raise MemoryError(f"no {size} bytes of shared memory (Cannot allocate memory)")

        shared.Memory.create = refuse  # type: ignore[method-assign]
    return joined(link)


def elsewhere(link: str) -> str:
    """Rank 1 says that it is on another host."""
    if os.environ["RANK"] == "1":
        shared.host = lambda: "another host"
    return joined(link)


def joined(link: str) -> str:
    """The links that were chosen, or why there are none."""
    plan = Plan(stages=3, micro_batches=2)
    try:
        with Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=momentum, link=link, timeout_s=30) as p:
            losses = [r.loss for r in p.train(token_batches(2, 6))]
            names = [p._session.worker.links[k].name.split(" (")[0] for k in range(3)]
            return f"{names} {losses}"
    except PipelineError as error:
        return str(error)


@pytest.mark.ranks
def test_shared_memory_needs_one_host() -> None:
    for text in run(3, elsewhere, link="shm"):
        assert "link 'shm' cannot join ranks 0 and 1: not on this host; use 'auto' or 'gloo'" in text
    texts = run(3, elsewhere, link="auto")
    assert texts[0].startswith("['local', 'torch.distributed', 'shared memory']")
    assert texts[1].startswith("['torch.distributed', 'local', 'torch.distributed']")
    assert len({text.partition("] ")[2] for text in texts}) == 1


@pytest.mark.ranks
def test_an_inbox_that_is_refused_is_an_error_on_every_rank_or_another_link() -> None:
    for text in run(3, no_inbox, link="shm"):
        assert "link 'shm' cannot join ranks 0 and 1: no " in text
    for text in run(3, no_inbox, link="auto"):
        assert "torch.distributed" in text


def disagree(what: str) -> str:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plan = {"stages": 2, "micro_batches": 2}
    options: dict[str, Any] = {"timeout_s": 30}
    other = {
        "stages": (plan, "stages", 3),
        "micro_batches": (plan, "micro_batches", 3),
        "schedule": (plan, "schedule", "1f1b"),
        "link": (options, "link", "gloo"),
        "wire_dtype": (options, "wire_dtype", torch.bfloat16),
        "clip_grad_norm": (options, "clip_grad_norm", 0.5),
    }[what]
    if rank == 1:
        other[0][other[1]] = other[2]
    with pytest.raises(ValueError, match="differs between ranks") as caught:
        Pipeline(language_model(), Plan(**plan), **grouped(loss_fn=LOSS, optimizer=momentum, **options))
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "what", ["stages", "micro_batches", "schedule", "link", "wire_dtype", "clip_grad_norm"]
)
def test_ranks_that_disagree_are_refused_on_every_rank(what: str) -> None:
    for text in run(2, disagree, what=what):
        assert "ranks [1] disagree with rank 0" in text
        assert "rank 0 has " in text
        assert " and rank 1 has " in text
        assert what in text or what in ("stages", "micro_batches", "schedule")


def changing(link: str) -> Any:
    """Batches whose sizes go up and down by a factor of thousands, in mid-run."""

    class Bag(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), Bag(), nn.Linear(5, 3)).double()
    plan = Plan(stages=2, pipelines=2, micro_batches=3, partition=[2])
    sizes = [(6, 2), (6, 3000), (30, 7), (3, 1), (2, 500), (12, 9000), (4, 4)]
    batches = [
        (torch.randn(n, length, 3, dtype=torch.float64), torch.zeros(n, dtype=torch.long))
        for n, length in sizes
    ]
    with Pipeline(model, plan, loss_fn=LOSS, optimizer=momentum, link=link, timeout_s=30) as p:
        losses = [r.loss for r in p.train(batches * 2)]
        return losses, p.evaluate(batches).loss, p.predict(batches[5][0])


@pytest.mark.ranks
def test_shapes_may_change_in_mid_run() -> None:
    found = [rank for link in LINKS for rank in run(2, changing, link=link)]
    for losses, evaluated, predicted in found:
        assert losses == found[0][0]
        assert evaluated == found[0][1]
        assert torch.equal(predicted, found[0][2])
