"""The rule "mean-gradient" without a pipeline: one optimizer, several replicas."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import ElasticAveraging, Reference

MAKE: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "nesterov": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def made(
    N: int, kind: str, staleness: int, warmup_rounds: int = 0
) -> tuple[Reference, list[nn.Sequential], list[ElasticAveraging]]:
    start, make = model(), MAKE[kind]
    options: dict[str, Any] = {
        "rule": "mean-gradient",
        "staleness": staleness,
        "warmup_rounds": warmup_rounds,
    }
    reference = Reference(start.parameters(), N, outer=make, **options)
    replicas = [copy.deepcopy(start) for _ in range(N)]
    optimizers = [
        ElasticAveraging(make(r.parameters()), reference, replica=i) for i, r in enumerate(replicas)
    ]
    return reference, replicas, optimizers


def loss_of(net: nn.Module, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return net(torch.randn(6, 4, dtype=torch.float64, generator=draw)).square().mean()


@pytest.mark.parametrize(("staleness", "warmup_rounds"), [(0, 0), (1, 0), (1, 1), (1, 4)])
@pytest.mark.parametrize("kind", MAKE)
def test_z_steps_by_the_mean_and_replicas_from_z_by_their_own(
    kind: str, staleness: int, warmup_rounds: int
) -> None:
    reference, replicas, optimizers = made(3, kind, staleness, warmup_rounds)
    slow, slow_replicas = model(), [model() for _ in range(3)]
    slow_optimizer = MAKE[kind](slow.parameters())
    for step in range(6):
        for i in (1, 0, 2):  # any order
            optimizers[i].zero_grad()
            loss_of(replicas[i], 3 * step + i).backward()
            optimizers[i].step()
        gradients = []
        for i in range(3):
            own = list(slow_replicas[i].parameters())
            gradients.append(torch.autograd.grad(loss_of(slow_replicas[i], 3 * step + i), own))
        trials = []
        for i in range(3):
            trial = copy.deepcopy(slow)
            optimizer = MAKE[kind](trial.parameters())
            optimizer.load_state_dict(copy.deepcopy(slow_optimizer.state_dict()))
            for p, g in zip(trial.parameters(), gradients[i]):
                p.grad = g
            optimizer.step()
            trials.append(trial)
        for p, *gs in zip(slow.parameters(), *gradients):
            p.grad = sum(gs) / 3
        slow_optimizer.step()
        waits = staleness == 0 or step < warmup_rounds
        slow_replicas = [copy.deepcopy(slow) for _ in range(3)] if waits else trials
        for z, expected in zip(reference.parameters, slow.parameters(), strict=True):
            torch.testing.assert_close(z, expected.detach(), rtol=1e-11, atol=1e-11)
        for mine, theirs in zip(replicas, slow_replicas):
            for p, expected in zip(mine.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(p, expected, rtol=1e-11, atol=1e-11)


def test_there_is_one_state() -> None:
    reference, replicas, optimizers = made(2, "adamw", 1)
    for i in (0, 1):
        loss_of(replicas[i], i).backward()
        optimizers[i].step()
    assert reference.outer is not None
    for optimizer, replica in zip(optimizers, replicas):
        shown = [optimizer.state[p]["exp_avg"] for p in replica.parameters()]
        kept = [reference.outer.state[z]["exp_avg"] for z in reference.parameters]
        assert [t.data_ptr() for t in shown] == [t.data_ptr() for t in kept]


def test_states_are_saved_and_loaded() -> None:
    reference, replicas, optimizers = made(2, "adamw", 1)

    def train(replicas: Any, optimizers: Any, steps: range) -> None:
        for step in steps:
            for i in (0, 1):
                optimizers[i].zero_grad()
                loss_of(replicas[i], 2 * step + i).backward()
                optimizers[i].step()

    train(replicas, optimizers, range(3))
    saved = copy.deepcopy(
        [reference.state_dict(), *(o.state_dict() for o in optimizers), *(r.state_dict() for r in replicas)]
    )
    train(replicas, optimizers, range(3, 6))
    other, others, other_optimizers = made(2, "adamw", 1)
    other.load_state_dict(saved[0])
    for i in (0, 1):
        others[i].load_state_dict(saved[3 + i])
        other_optimizers[i].load_state_dict(saved[1 + i])
    train(others, other_optimizers, range(3, 6))
    for z, expected in zip(other.parameters, reference.parameters, strict=True):
        assert torch.equal(z, expected)


def test_what_has_no_gradient_anywhere_makes_no_step() -> None:
    reference, replicas, optimizers = made(2, "adamw", 1)
    for i, replica in enumerate(replicas):
        replica[2].bias.requires_grad_(False)
        loss_of(replica, i).backward()
        optimizers[i].step()
    assert torch.equal(reference.parameters[3], model()[2].bias)
    assert not torch.equal(reference.parameters[2], model()[2].weight)


def test_rounds_of_the_warm_up_wait() -> None:
    _, replicas, optimizers = made(2, "sgd", 1, warmup_rounds=1)
    for i in (0, 1, 1):
        assert optimizers[i].ready
        loss_of(replicas[i], i).backward()
        optimizers[i].step()
        assert optimizers[i].settled is (i == 1)
        assert optimizers[0].settled is (i == 1)
    with pytest.raises(ValueError, match="warmup_rounds=3 with rule 'easgd': only rule 'mean-gradient'"):
        Reference(model().parameters(), 2, rule="easgd", warmup_rounds=3)
    with pytest.raises(ValueError, match="warmup_rounds=-1: must be an int of at least 0"):
        Reference(model().parameters(), 2, rule="mean-gradient", outer=MAKE["sgd"], warmup_rounds=-1)


def test_it_needs_an_optimizer_for_the_reference() -> None:
    with pytest.raises(ValueError, match="needs outer, the optimizer that steps the reference"):
        Reference(model().parameters(), 2, rule="mean-gradient")


def test_another_kind_of_optimizer_is_refused() -> None:
    net = model()
    reference = Reference(net.parameters(), 2, rule="mean-gradient", outer=MAKE["adamw"])
    replica = copy.deepcopy(net)
    with pytest.raises(ValueError, match="the replica's optimizer is SGD and the reference's AdamW"):
        ElasticAveraging(MAKE["sgd"](replica.parameters()), reference, replica=0)
    ElasticAveraging(MAKE["adamw"](replica.parameters()), reference, replica=0)  # it is still free
