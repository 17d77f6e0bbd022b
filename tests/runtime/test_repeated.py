"""Recomputation moves the state of layers once: buffers, and what is drawn from Python's and NumPy's generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from avgpipe import Pipeline, Plan
from avgpipe.errors import StageError
from tests.runtime.cases import assert_same_training, momentum, train_on_one_device

LOSS = nn.MSELoss()


class Subclass(nn.BatchNorm1d):
    pass


class Codebook(nn.Module):
    """An exponential moving average of what is near each code."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                self.codes.index_add_(0, near, 0.1 * (x - self.codes[near]))
                self.calls += 1
        return x + self.calls + (self.codes[near] - x).detach()


class Replaced(nn.Module):
    """A buffer that is another tensor after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Drawing(nn.Module):
    """Layers and values that are drawn by what is no generator of torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + random.random()) + float(np.random.rand())


class Shared(nn.Module):
    """A table that several modules have, and each moves."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table.add_(x.detach().mean(0))
        return x * self.table


def shared() -> nn.Module:
    table = torch.zeros(4, dtype=torch.float64)
    return nn.Sequential(Shared(table), nn.Tanh(), Shared(table))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "subclass of a batch norm": lambda: Subclass(4),
    "spectral norm": lambda: spectral_norm(nn.Linear(4, 4)),
    "codebook": Codebook,
    "replaced": Replaced,
    "drawing": Drawing,
}


def chain(middle: nn.Module) -> nn.Sequential:
    layers = [nn.Linear(4, 4), middle, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)]
    return nn.Sequential(*layers).double()


def batches(count: int = 4) -> list[Any]:
    draw = torch.Generator().manual_seed(2)
    return [
        tuple(torch.randn(8, n, dtype=torch.float64, generator=draw) for n in (4, 3)) for _ in range(count)
    ]


def trained(model: nn.Module, plan: Plan, data: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    random.seed(3)
    np.random.seed(3)
    with Pipeline(model, plan, loss_fn=LOSS, optimizer=momentum) as pipeline:
        return [result.loss for result in pipeline.train(data)], pipeline.state_dict()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_forward_that_runs_again_moves_nothing(kind: str, stages: int) -> None:
    torch.manual_seed(1)
    model, data = chain(KINDS[kind]()), batches()
    random.seed(3)
    np.random.seed(3)
    expected, following = (
        train_on_one_device(model, data, LOSS, momentum),
        (random.random(), np.random.rand()),
    )
    for recompute in ("never", "always"):
        plan = Plan(stages=stages, micro_batches=1, recompute=recompute)
        assert_same_training(trained(model, plan, data), expected)
        assert (random.random(), np.random.rand()) == following


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble-h1"])
def test_with_micro_batches_recomputation_changes_nothing(kind: str, schedule: str) -> None:
    torch.manual_seed(1)
    model, data, found = chain(KINDS[kind]()), batches(), []
    for recompute in ("never", "always", "except-last"):
        plan = Plan(stages=2, micro_batches=3, schedule=schedule, recompute=recompute)
        found.append(trained(model, plan, data))
    for other in found[1:]:
        assert_same_training(other, found[0])


def test_a_buffer_of_several_modules_moves_once_for_each() -> None:
    torch.manual_seed(1)
    model, data = chain(shared()), batches()
    plan = Plan(stages=2, micro_batches=1, recompute="always", partition=[3])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train_on_one_device(model, data, LOSS, momentum)  # a product keeps it for the backward
    model[1][0].forward = model[1][2].forward = lambda x: x + 0  # type: ignore[method-assign]
    assert_same_training(trained(model, plan, data), train_on_one_device(model, data, LOSS, momentum))


def test_a_buffer_that_begins_to_move_late_ends_the_run() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 2:
                self.mean.add_(1)
            return x + self.mean

    with pytest.raises(StageError, match=r"buffer '1.mean' was written to in a forward, and in none before"):
        trained(chain(Late()), Plan(stages=1, micro_batches=1, recompute="always"), batches())
