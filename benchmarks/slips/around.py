"""A block with a forward of the caller's own around it, which most slips in a model are."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.slips.script import Script

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Around(nn.Module):
    """A block, and what a forward of the caller's own makes of it."""

    def __init__(self, inner: nn.Module, function: Forward) -> None:
        super().__init__()
        self.inner, self._function = inner, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(self.inner, x)


def around(script: Script, n: int, forward: Forward) -> None:
    script.replace(n, lambda block: Around(block, forward))


def place(draw: random.Random) -> int:
    return draw.randrange(3)
