"""The two models of the comparison as chains of small layers, so that a cut can be made anywhere; batch first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 8192


@dataclass(frozen=True)
class Shape:
    """layers: makes the chain anew, with the same weights each time. length: tokens of a sample."""

    layers: Callable[[], list[nn.Module]]
    length: int


class Embedding(nn.Module):
    """(samples, length) -> (samples, length, width), with learnt positions if there are any."""

    def __init__(self, width: int, positions: int = 0) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(positions, width)) if positions else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.token(tokens)
        return made if self.position is None else made + self.position


class Attention(nn.Module):
    """The first half of a decoder's layer: x + attention(norm(x)), causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        parts = self.into(self.norm(x)).view(samples, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(seen.transpose(1, 2).reshape(samples, length, width))


class Perceptron(nn.Module):
    """The second half: x + mlp(norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.out(functional.gelu(self.into(self.norm(x))))
        return made


class Recurrence(nn.Module):
    """A layer of an LSTM, all its steps, in dense memory both ways as every transport wants it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dense: torch.Tensor = _DenseGradient.apply(x)  # type: ignore[no-untyped-call]
        output: torch.Tensor = self.lstm(dense)[0]
        return output.clone(memory_format=torch.contiguous_format)


class _DenseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.contiguous()


def transformer(width: int = 256, blocks: int = 8, heads: int = 8, length: int = 128) -> list[nn.Module]:
    torch.manual_seed(0)
    made: list[nn.Module] = [Embedding(width, length)]
    for _ in range(blocks):
        made += [Attention(width, heads), Perceptron(width)]
    return [*made, nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))]


def lstm(width: int = 384, layers: int = 4) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Embedding(width), *(Recurrence(width) for _ in range(layers)), nn.Linear(width, VOCABULARY)]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy per token."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


MODELS = {"transformer": Shape(transformer, 128), "lstm": Shape(lstm, 64)}
