"""Stages of the papers' models at their published widths: what a lane of one worker computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class StageModel:
    """A stage between others: its input and its output are activations of one shape.

    Attributes:
        name: Of the model.
        layers: Makes the stage's layers, given the probability of dropout.
        dropout: Of the published model.
        batch: Samples of a batch.
        sample: Shape of one, (length, width).
    """

    name: str
    layers: Callable[[float], list[nn.Module]]
    dropout: float
    batch: int
    sample: tuple[int, int]

    def module(self, dropout: float | None = None) -> nn.Sequential:
        return nn.Sequential(*self.layers(self.dropout if dropout is None else dropout))


class Encoder(nn.Module):
    """A layer of BERT: attention and perceptron, each with dropout, its input added and normalised."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.after_attention, self.after_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.after_attention(x + self._dropped(self.out(self._attention(x))))
        made: torch.Tensor = self.down(functional.gelu(self.up(x)))
        normalised: torch.Tensor = self.after_perceptron(x + self._dropped(made))
        return normalised

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        parts = self.into(x).view(samples, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        return seen.transpose(1, 2).reshape(samples, length, width)

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self.dropout, self.training)


class Recurrent(nn.Module):
    """An LSTM over all time steps, and dropout. No state is carried from batch to batch."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.lstm, self.dropout = nn.LSTM(width, width, batch_first=True), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.lstm(x)[0], self.dropout, self.training)


def _encoders(width: int, heads: int, count: int) -> Callable[[float], list[nn.Module]]:
    return lambda dropout: [Encoder(width, heads, dropout) for _ in range(count)]


def _lstms(width: int, count: int) -> Callable[[float], list[nn.Module]]:
    return lambda dropout: [Recurrent(width, dropout) for _ in range(count)]


def stage_models(small: bool) -> list[StageModel]:
    """Return a stage of four of each model. small: tiny ones, to see that a program runs."""
    if small:
        return [
            StageModel("bert", _encoders(16, 2, 1), 0.1, 8, (4, 16)),
            StageModel("gnmt", _lstms(16, 1), 0.2, 8, (3, 16)),
        ]
    return [
        StageModel("bert", _encoders(1024, 16, 6), 0.1, 32, (128, 1024)),
        StageModel("gnmt", _lstms(1024, 2), 0.2, 128, (25, 1024)),
        StageModel("awd-lstm", _lstms(1150, 1), 0.4, 40, (70, 1150)),
    ]
