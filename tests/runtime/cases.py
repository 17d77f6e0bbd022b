"""Small float64 models with everything that makes equality hard, and the same training on one device."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from avgpipe import Pipeline, Plan
from tests.options import grouped

Trained = tuple[list[float], dict[str, torch.Tensor]]  # losses, and the final state


class Tied(nn.Module):
    """A decoder that uses an embedding's table."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.weight = table
        self.bias = nn.Parameter(torch.zeros(table.shape[0], dtype=table.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + self.bias


class Fork(nn.Module):
    """Returns several things, some of which need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"main": torch.tanh(self.lin(x)), "skip": x, "mask": x > 0, "scale": 0.5}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: dict[str, Any]) -> torch.Tensor:
        return self.lin(x["main"]) * x["mask"] + x["scale"] * x["skip"]


def language_model(frozen: bool = False, dropout: float = 0.0) -> nn.Sequential:
    """Seven layers: tied embedding and decoder, a fork and join of pytrees, an in-place activation; class targets."""
    torch.manual_seed(7)
    embedding = nn.Embedding(11, 8)
    layers = [
        embedding,
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        Fork(),
        Join(),
        nn.Dropout(dropout),
        Tied(embedding.weight),
    ]
    model = nn.Sequential(*layers).double()
    # .double() keeps the identity of tied parameters
    if frozen:
        for p in model[1].parameters():
            p.requires_grad_(False)
    return model


def token_batches(
    count: int, samples: int, last: int | None = None, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [samples] * count
    if last is not None:
        sizes[-1] = last
    return [
        (torch.randint(11, (n,), generator=generator), torch.randint(11, (n,), generator=generator))
        for n in sizes
    ]


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def train_on_one_device(
    model: nn.Module,
    batches: list[Any],
    loss_fn: Any,
    optimizer: Any,
    clip: float | None = None,
    lr_scheduler: Any = None,
    copies: bool = True,
) -> Trained:
    """Losses and final state of plain training. ``optimizer``: as a Pipeline takes it.

    ``copies``: whether the model stays as it is; a copy lacks the hooks of parameters.
    """
    model = copy.deepcopy(model) if copies else model
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wants_names = "named_params" in inspect.signature(optimizer).parameters
    made = optimizer(list(named.items() if wants_names else named.values()))
    steppers = [*made] if isinstance(made, list) else [made]
    with_modes = [opt for opt in steppers if hasattr(opt, "train")]
    steppers += [lr_scheduler(opt) for opt in steppers] if lr_scheduler else []
    for opt in with_modes:
        opt.train()
    losses = []
    for x, y in batches:
        model.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for one in steppers:
            one.step()
        losses.append(float(loss.detach()))
    for opt in with_modes:
        opt.eval()
    return losses, model.state_dict()


def train_pipeline(
    model: Any, plan: Plan, batches: list[Any], loss_fn: Any, optimizer: Any, **options: Any
) -> Trained:
    """Losses and final state of a pipeline's training."""
    with Pipeline(model, plan, **grouped(loss_fn=loss_fn, optimizer=optimizer, **options)) as pipeline:
        losses = [r.loss for r in pipeline.train(batches)]
        return losses, pipeline.state_dict()


def assert_same_training(ours: Trained, theirs: Trained, bound: float = 1e-10) -> None:
    assert unequal(ours[0], theirs[0]) <= bound
    assert_same_state(ours[1], theirs[1], bound)


def assert_trains_as_one_device(
    model: nn.Module,
    plan: Plan,
    batches: list[Any],
    loss_fn: Any,
    optimizer: Any,
    clip: float | None = None,
    lr_scheduler: Any = None,
    **options: Any,
) -> Trained:
    """Return a pipeline's losses and final state, if they are those of plain training."""
    options |= {"clip_grad_norm": clip, "lr_scheduler": lr_scheduler}
    ours = train_pipeline(model, plan, batches, loss_fn, optimizer, **options)
    assert_same_training(ours, train_on_one_device(model, batches, loss_fn, optimizer, clip, lr_scheduler))
    return ours


def assert_goes_on(pipeline: Callable[[int], Pipeline], K: int, batches: list[Any], folder: Path) -> None:
    """Under ``K`` stages, from a checkpoint of two stages in the middle of the batches: in every bit if ``K`` is 2."""
    half = len(batches) // 2
    with pipeline(2) as p:
        list(p.train(batches[:half]))
        p.save(folder)
        middle = p.state_dict()
        expected = [r.loss for r in p.train(batches[half:])], p.state_dict()
    with pipeline(K) as p:
        p.load(folder)
        assert_same_state(p.state_dict(), middle)
        ours = [r.loss for r in p.train(batches[half:])], p.state_dict()
    assert_same_training(ours, expected, 0 if K == 2 else 1e-10)


def assert_same_state(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], bound: float = 1e-10
) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=bound, atol=bound, msg=lambda m, n=name: f"{n}: {m}"
        )


def unequal(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
