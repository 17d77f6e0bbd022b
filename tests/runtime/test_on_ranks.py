"""Runs over each link: narrower wires, kept inputs, random delays, and memory that does not grow."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan, Precision
from avgpipe.links.link import Mailbox
from avgpipe.links.shared import SharedLink
from avgpipe.model.context import Carry
from avgpipe.runtime.lane import Lane
from tests.links.ends import LINKS
from tests.runner import run
from tests.runtime.cases import language_model, momentum, token_batches

pytestmark = pytest.mark.ranks

LOSS = nn.CrossEntropyLoss()


def learn(link: str, wire: str | None, K: int = 2) -> Any:
    batches = token_batches(2, 8) * 15
    wire_dtype = getattr(torch, wire) if wire else None
    plan = Plan(stages=K, pipelines=2, micro_batches=2)
    model = language_model().float()
    with Pipeline(
        model,
        plan,
        loss_fn=LOSS,
        optimizer=momentum,
        link=link,
        extensions=[Precision(wire_dtype=wire_dtype)],
        timeout_s=30,
    ) as p:
        losses = [r.loss for r in p.train(batches)]
        state = p.state_dict()
        evaluated, predicted = p.evaluate(batches[:2]).loss, p.predict(batches[0][0])
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        output = model(torch.cat([x for x, _ in batches[:2]]))
        exact = float(LOSS(output, torch.cat([y for _, y in batches[:2]])))
    return {
        "losses": losses,
        "evaluated": evaluated,
        "exact": exact,
        "off": (predicted - output[:8]).abs().max(),
    }


@pytest.mark.promise
def test_a_narrower_wire_trains_nearly_as_well_and_evaluates_exactly() -> None:
    found = {
        (link, wire): run(2, learn, link=link, wire=wire) for link in LINKS for wire in (None, "bfloat16")
    }
    for link, wire in found:
        for rank in found[link, wire]:
            assert rank["losses"] == found["shm", wire][0]["losses"]  # bitwise, over any link, on any rank
            assert abs(rank["evaluated"] - rank["exact"]) < 1e-6
            assert rank["off"] < 1e-6  # float32, in micro-batches of another size: no rounding to bfloat16
    full, narrow = (found["shm", wire][0]["losses"] for wire in (None, "bfloat16"))
    assert full != narrow
    assert full[-1] < full[0] - 0.5
    assert max(abs(a - b) for a, b in zip(full, narrow, strict=True)) < 0.05  # bfloat16 keeps 8 bits


def learn_tied(wire: str | None, replication: list[int] | None = None) -> torch.Tensor:
    """Return the tied weight after training as this rank has it."""
    held: list[nn.Parameter] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        held[:] = parameters
        return momentum(held)

    plan = Plan(stages=2, micro_batches=2, replication=replication)
    wire_dtype = getattr(torch, wire) if wire else None
    with Pipeline(
        language_model(),
        plan,
        loss_fn=LOSS,
        optimizer=optimizer,
        extensions=[Precision(wire_dtype=wire_dtype)],
        timeout_s=30,
    ) as p:
        for _ in p.train(token_batches(10, 8)):
            pass
        return next(w.detach().clone() for w in held if w.shape == (11, 8))


@pytest.mark.ranks
@pytest.mark.parametrize("replication", [None, [1, 2], [2, 2]], ids=str)
def test_gradients_of_tied_weights_are_rounded_for_all_that_hold_them(replication: list[int] | None) -> None:
    ranks = sum(replication or [1, 1])
    wide = run(ranks, learn_tied, wire=None, replication=replication)
    narrow = run(ranks, learn_tied, wire="bfloat16", replication=replication)
    assert all(torch.equal(weight, narrow[0]) for weight in narrow)
    assert not torch.equal(narrow[0], wide[0])
    torch.testing.assert_close(narrow[0], wide[0], rtol=0.02, atol=0.02)


class Keeps(nn.Module):
    """Adds what it received in the previous batch, of which it keeps an alias, not a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.carry = Carry()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.carry.get()
        self.carry.set(x.detach())
        return x if before is None else x + 0.1 * before


def keep(K: int, link: str, recompute: str = "never", count: int = 200) -> list[float]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Linear(3, 8),
        Keeps(),
        nn.Tanh(),
        Keeps(),
        nn.Linear(8, 8),
        Keeps(),
        nn.Linear(8, 3),
    ]
    plan = Plan(stages=K, pipelines=2, micro_batches=2, partition=[1, 3, 5][: K - 1], recompute=recompute)
    generator = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randn(4, 3, generator=generator, dtype=torch.float64),
            torch.randint(3, (4,), generator=generator),
        )
        for _ in range(count)
    ]
    model = nn.Sequential(*layers).double()
    with Pipeline(model, plan, loss_fn=LOSS, optimizer=momentum, link=link, timeout_s=30) as p:
        losses = [r.loss for r in p.train(batches)]
        if K > 1 and link == "shm":
            bounded(p)
        return losses


def bounded(p: Pipeline) -> None:
    """Slots are as many as a schedule holds at once, those that layers keep, and a few that are on their way."""
    schedule = p.plan.build_schedule()
    kept = 2 * p.plan.micro_batches
    for link in p._session.worker.links.values():
        for channel, (sender, _) in getattr(link, "_outgoing", {}).items():
            limit = max(schedule.peak_in_flight) + kept + p.plan.micro_batches + 1
            assert sender.slots()[0] <= limit, (channel, sender.slots(), limit)


@pytest.mark.slow
def test_what_a_layer_keeps_of_its_input_stays_right() -> None:
    for recompute in ("never", "always"):
        expected = keep(1, "auto", recompute)
        for link in LINKS:
            for losses in run(3, keep, K=3, link=link, recompute=recompute):
                assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-10


def delayed(K: int, link: str) -> Any:
    """Steps and deliveries that take a random time, another on every run and rank."""
    dice = random.Random(os.urandom(8))

    def late(function: Any) -> Any:
        def call(*args: Any) -> Any:
            time.sleep(dice.choice([0, 0, 0, 0, 1e-4, 1e-3]))
            return function(*args)

        return call

    Lane.advance = late(Lane.advance)  # type: ignore[method-assign]
    SharedLink._collect = late(SharedLink._collect)  # type: ignore[method-assign]
    Mailbox.deliver = late(Mailbox.deliver)  # type: ignore[method-assign]
    found = []
    for plan in [
        Plan(stages=K, pipelines=3, micro_batches=1),
        Plan(stages=K, micro_batches=2, schedule="1f1b"),
        Plan(stages=K, pipelines=2, micro_batches=5, schedule="all-forward-all-backward", staleness=0),
        Plan(stages=K, pipelines=2, micro_batches=4, staleness=0),
        Plan(stages=K, pipelines=4, micro_batches=9),
        Plan.for_system("pipedream", stages=K),
        Plan(stages=K, micro_batches=2, schedule="pipedream", weights="vertical-sync"),
        Plan.for_system("pipedream-2bw", stages=K, micro_batches=5),
        Plan.for_system("ea-pipe", stages=K),
    ]:
        with Pipeline(
            language_model(),
            plan,
            loss_fn=LOSS,
            optimizer=momentum,
            link=link,
            timeout_s=30,
            clip_grad_norm=0.5,
        ) as p:
            batches = token_batches(2 * plan.pipelines + K + 1, 9)
            found.append([r.loss for r in p.train(batches)])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("K", [2, 4])
def test_random_delays_change_nothing(K: int) -> None:
    ranks = [found for link in LINKS for found in run(K, delayed, K=K, link=link)]
    assert all(found == ranks[0] for found in ranks)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def long(link: str) -> tuple[int, int]:
    """Resident memory after 200 and after 1,000 batches."""
    plan = Plan(stages=2, pipelines=2, micro_batches=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 3))
    batch = torch.randn(64, 8), torch.zeros(64, dtype=torch.long)
    sizes = {}
    with Pipeline(model, plan, loss_fn=LOSS, optimizer=momentum, link=link, timeout_s=30) as p:
        for result in p.train(batch for _ in range(1000)):
            if result.batch in (199, 999):
                sizes[result.batch] = resident_bytes()
    return sizes[199], sizes[999]


@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS)
def test_memory_does_not_grow_over_1000_batches(link: str) -> None:
    # A leaked message of 32 KiB in each batch would be 25 MiB. What may grow is the record of events for the
    # timeline: at most 40,000 of about 200 bytes.
    for early, late in run(2, long, link=link):
        assert late - early < 12 << 20, f"{(late - early) / 2**20:.1f} MiB more"
