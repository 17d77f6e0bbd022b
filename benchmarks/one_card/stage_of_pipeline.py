"""One real stage of K in avgpipe's own runtime: the other stages are lanes too, whose layers only take their time.

A delay is a kernel of one thread, so the GPU has room for the real stage, as if each other stage had a device of its
own. The host issues the actions of all K stages, more than a worker's: what it takes is an upper bound.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.one_card.networks import StageModel


@dataclass(frozen=True)
class Taken:
    """What a forward and a backward of an emulated stage take: seconds, and cycles of the device if it is a GPU."""

    forward_s: float
    backward_s: float
    cycles_per_s: float = 0.0

    def spend(self, seconds: float) -> None:
        if self.cycles_per_s:
            torch.cuda._sleep(int(seconds * self.cycles_per_s))
        else:
            time.sleep(seconds)


class Delay(nn.Module):
    """Returns its input after a stage's forward, and the gradient after its backward."""

    def __init__(self, taken: Taken) -> None:
        super().__init__()
        self.taken = taken
        self.weight = nn.Parameter(torch.zeros(1))  # so that the first stage has a backward as well

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _Delayed.apply(x, self.weight, self.taken)
        return made


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, taken: Taken) -> torch.Tensor:
        ctx.taken = taken
        taken.spend(taken.forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        ctx.taken.spend(ctx.taken.backward_s)
        return grad, grad.new_zeros(1, dtype=torch.float32), None


def stage_among_delays(
    model: StageModel, stage: int, stages: int, taken: Taken
) -> tuple[list[nn.Module], list[int]]:
    """Return the layers of all stages, and the first layer of each stage but the first."""
    torch.manual_seed(0)
    real = model.layers(model.dropout)
    sizes = [len(real) if k == stage else 1 for k in range(stages)]
    layers = [layer for k in range(stages) for layer in (real if k == stage else [Delay(taken)])]
    return layers, [sum(sizes[:k]) for k in range(1, stages)]


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that costs little; ``target`` only has one value for each sample."""
    return output.float().square().mean() + 0.0 * target.mean()
