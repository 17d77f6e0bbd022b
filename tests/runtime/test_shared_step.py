"""Pipelines that share a batch and its optimizer's step: the step reads their gradients where they are, once.

A batch's step is the one that publishing each gradient, and adding what is published, gives: in every bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import avgpipe_ext
from avgpipe import Pipeline, Plan
from avgpipe.elastic.reference import Reference
from tests.options import grouped
from tests.runtime.cases import adamw, momentum, token_batches
from tests.runtime.test_trained_stage import LOSS, assert_bitwise, everything, model

OPTIMIZERS: dict[str, Any] = {
    "momentum": momentum,
    "adamw": adamw,
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
}


def batches(count: int, last: int | None = None, seed: int = 0) -> list[Any]:
    return token_batches(count, 6, last, seed)


def train(N: int, optimizer: Any, at_once: bool, dtype: torch.dtype, **options: Any) -> Any:
    joins = Reference._joins_gradients
    if not at_once:
        Reference._joins_gradients = property(lambda self: False)  # type: ignore[method-assign]
    plan = Plan(stages=2, pipelines=N, micro_batches=N + 1, **{"staleness": 0, **options.pop("plan", {})})
    chosen: dict[str, Any] = {
        "loss_fn": LOSS,
        "optimizer": optimizer,
        "lr_scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        **options,
    }
    layers = chosen.pop("layers", None) or model(dtype)
    try:
        with Pipeline(layers, plan, **grouped(timeout_s=60, **chosen)) as p:
            losses = [r.loss for r in p.train(batches(5, last=N - 1))]  # a pipeline has nothing of the last
            middle = everything(p)
            losses += [r.loss for r in p.train(batches(4, seed=5))]
            dropped = [reference.dropped_updates for reference in p._session.worker.references.values()]
            return losses, middle, everything(p), dropped
    finally:
        Reference._joins_gradients = joins  # type: ignore[method-assign]


def compare(N: int, optimizer: Any, dtype: torch.dtype = torch.float32, **options: Any) -> list[int]:
    mine, theirs = (train(N, optimizer, at_once, dtype, **options) for at_once in (True, False))
    assert mine[0] == theirs[0]
    assert_bitwise(mine[1], theirs[1])
    assert_bitwise(mine[2], theirs[2])
    assert mine[3] == theirs[3]
    found: list[int] = mine[3]
    return found


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("N", "dtype"), [(2, torch.float32), (3, torch.float64)], ids=str)
def test_it_is_the_step_by_what_each_publishes(
    name: str, N: int, dtype: torch.dtype, clip: float | None
) -> None:
    compare(N, OPTIMIZERS[name], dtype, clip_grad_norm=clip)


def test_rounds_of_the_warm_up_are_such_steps_too() -> None:
    compare(2, adamw, plan={"staleness": 1, "warmup_rounds": 4})


class Gate(nn.Module):
    """Gradients of what comes before it are infinite in some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Overflow.apply(x * self.weight)  # type: ignore[no-untyped-call, no-any-return]


class _Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.bad = float(x.detach().flatten()[0]) > 1.0
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.inf if ctx.bad else grad


def test_a_gradient_that_is_not_finite_is_dropped_whole_and_the_rate_is_that_of_the_batch() -> None:
    layers = list(model(torch.float32))
    dropped = compare(2, adamw, layers=nn.Sequential(layers[0], Gate(), *layers[1:]))
    assert sum(dropped) > 0


def test_a_batch_that_is_skipped_makes_no_step() -> None:
    layers = list(model(torch.float32))
    whole = nn.Sequential(layers[0], Gate(), *layers[1:])
    assert compare(2, adamw, layers=whole, skip_nonfinite=True) == [0, 0]


def test_nothing_is_copied_before_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass over the gradients for each stage and batch, and a copy of z to each pipeline."""
    sums: list[int] = []
    own = avgpipe_ext.reference_apply_

    def counted(z: Any, update: Any, *args: Any, **options: Any) -> Any:
        sums.append(len(update) // len(z))
        return own(z, update, *args, **options)

    monkeypatch.setattr(avgpipe_ext, "reference_apply_", counted)
    plan = Plan(stages=2, pipelines=3, micro_batches=3, staleness=0)
    with Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), plan, loss_fn=LOSS, optimizer=adamw) as p:
        data = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(4)]
        list(p.train(data))
        published = [
            u for reference in p._session.worker.references.values() for u in reference._updates.values()
        ]
    assert sums == [3] * 2 * 4
    assert all(not flat.any() for update in published for flat in update.flats)
