"""Models with BatchNorm, and a slow float64 loop over micro-batches that says what a pipeline must make of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.runtime.cases import momentum

LOSS = nn.CrossEntropyLoss()


class Block(nn.Module):
    """A BatchNorm deep inside, called twice in a forward if ``twice``."""

    def __init__(self, twice: bool = False, **options: Any) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, **options))
        self.twice = twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.inner(x))
        return y + torch.tanh(self.inner[1](1.5 * y + 0.2)) if self.twice else x + y


def image_model(twice: bool = False, **options: Any) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4, **options),
        nn.ReLU(inplace=True),
        Block(twice, **options),
        nn.Flatten(),
        nn.BatchNorm1d(64, affine=False, **options),
        nn.Linear(64, 3),
    ]
    return nn.Sequential(*layers).double()


def image_batches(count: int, samples: int = 10, last: int | None = None, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [samples] * (count - 1) + [last or samples]
    # every sample has a mean of its own, so that micro-batches differ
    return [
        (
            2 * torch.randn(n, 2, 4, 4, generator=generator, dtype=torch.float64)
            + torch.randn(n, 1, 1, 1, generator=generator, dtype=torch.float64),
            torch.randint(3, (n,), generator=generator),
        )
        for n in sizes
    ]


class SlowNorm(nn.Module):
    """What is promised, spelled out: ``parts`` holds the inputs of the batch, by call within a forward."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.momentum, self.eps = norm.weight, norm.bias, norm.momentum, norm.eps
        for name, buffer in norm.named_buffers():
            self.register_buffer(name, buffer)
        self.parts: list[list[torch.Tensor]] = []
        self.call = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.transpose(0, 1).flatten(1)
        if len(self.parts) == self.call:
            self.parts.append([])
        self.parts[self.call].append(rows.detach())
        self.call += 1
        mean = (rows.sum(1) / rows.shape[1]).view(-1, *[1] * (x.dim() - 2))
        variance = ((rows - mean.view(-1, 1)) ** 2).sum(1).view_as(mean) / rows.shape[1]
        y = (x - mean) / (variance + self.eps).sqrt()
        return y if self.weight is None else y * self.weight.view_as(mean) + self.bias.view_as(mean)

    def end_of_batch(self) -> None:
        for parts in self.parts:
            rows = torch.cat(parts, dim=1)
            self.num_batches_tracked += 1
            f = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
            mean = rows.sum(1) / rows.shape[1]
            variance = ((rows - mean[:, None]) ** 2).sum(1) / (rows.shape[1] - 1)
            self.running_mean.copy_((1 - f) * self.running_mean + f * mean)
            self.running_var.copy_((1 - f) * self.running_var + f * variance)
        self.parts = []


def slow_norms(model: nn.Module) -> list[SlowNorm]:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
                setattr(module, name, SlowNorm(child))
    return [m for m in model.modules() if isinstance(m, SlowNorm)]


def slow_training(
    model: nn.Module, batches: list[Any], M: int, optimizer: Any = momentum, clip: float | None = None
) -> Any:
    """Losses and the final state of a plain loop over micro-batches; as from tests.runtime.cases otherwise."""
    model = copy.deepcopy(model)
    norms = slow_norms(model)
    opt = optimizer(model.parameters())
    losses = []
    for inputs, targets in batches:
        opt.zero_grad()
        total = 0.0
        for x, y in zip(inputs.tensor_split(M), targets.tensor_split(M)):
            for norm in norms:
                norm.call = 0
            loss = LOSS(model(x), y) * (len(x) / len(inputs))
            loss.backward()
            total += float(loss.detach())
        for norm in norms:
            norm.end_of_batch()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        losses.append(total)
    return losses, model.state_dict()
