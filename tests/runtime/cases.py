"""Small float64 models with everything that makes equality hard, and the same training on one device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


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
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final state of plain training."""
    model = copy.deepcopy(model)
    opt = optimizer([p for p in model.parameters() if p.requires_grad])
    scheduler = lr_scheduler(opt) if lr_scheduler else None
    losses = []
    for x, y in batches:
        opt.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        if scheduler:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


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
