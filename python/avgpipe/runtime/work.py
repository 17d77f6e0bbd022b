"""A batch as a lane has it in hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch

from avgpipe.device import Handed
from avgpipe.errors import StageError
from avgpipe.runtime.batch import LossWeights
from avgpipe.runtime.split_backward import Deferred


@dataclass
class Work:
    """A batch that a lane trains on. ``inputs`` matter on the first stage, ``targets`` and ``weights`` on the last.

    ``copied``: inputs and targets, if they are on their way to a device.
    """

    batch: int
    micro_batches: int
    inputs: Sequence[Any]
    targets: Sequence[Any]
    weights: LossWeights
    copied: Handed | None = None


class Saved(NamedTuple):
    """What a forward leaves for its backward: inputs that want gradients, and where those of the outputs go in.

    Not the outputs themselves: of those, autograd keeps what it needs. ``grads``: of the outputs, where this stage
    knows them, as the last one does. ``arrived``: inputs that came past other stages, by arrival; ``departed``: where
    the gradients of outputs that went past others go in, in the order of departures. See :mod:`avgpipe.runtime.skips`.
    """

    inputs: list[torch.Tensor]
    outputs: list[Any]
    grads: list[torch.Tensor] | None = None
    arrived: Sequence[list[torch.Tensor]] = ()
    departed: Sequence[Any] = ()

    @property
    def all_inputs(self) -> list[torch.Tensor]:
        return [*self.inputs, *chain.from_iterable(self.arrived)] if self.arrived else self.inputs


@dataclass
class Progress:
    """How far a batch is. ``version``: of the weights that it runs on."""

    work: Work
    version: int
    backwards_left: int
    saved: dict[int, Saved] = field(default_factory=dict)
    deferred: dict[int, Deferred] = field(default_factory=dict)  # of micro-batches, gradients of weights
    # Of micro-batches, with their factors; and what their losses are sums of, where the loss function says it.
    losses: list[tuple[torch.Tensor, float]] = field(default_factory=list)
    counts: list[torch.Tensor | float] = field(default_factory=list)
    without_loss: int = 0  # micro-batches whose loss is the mean over nothing
    loss_scale: float = 1.0  # what the losses' gradients are multiplied with until the update
    # Of the whole batch, known after the last backward: the loss; or, where gradients must be multiplied with something
    # before anybody looks at them, three numbers: the loss, that factor, and what the loss weighs. Float64.
    told: torch.Tensor | None = None
    part: torch.Tensor | None = None  # of the last stage, what this replica knows of that
    has_told: bool = False  # those who learn it by a message of its own
    is_scaled: bool = False  # whether the gradients have been multiplied with that factor
    grads: list[torch.Tensor | None] = field(
        default_factory=list
    )  # of parameters, while they wait for the update
    norm: torch.Tensor | None = None  # of the gradients of all stages; float64, where somebody asks for it
    updated: bool = False

    def sum_losses(self) -> torch.Tensor:
        """What this replica of the last stage knows of the loss, which adds up over all: the loss, or sum and count."""
        device = self.losses[0][0].device if self.losses else None
        total = torch.zeros((), dtype=torch.float64, device=device)
        if self.without_loss and not self.losses:
            total.fill_(math.nan)
        for loss, factor in self.losses:
            total.add_(loss, alpha=factor)
        if not self.counts:
            return total
        if len(self.counts) < len(self.losses):
            raise StageError("loss_fn returns (sum, count) for some micro-batches and one number for others")
        count = torch.zeros_like(total)
        for part in self.counts:
            count.add_(part)
        return torch.stack((total, count))

    def tell(self, part: torch.Tensor) -> None:
        """The sum of all parts is known."""
        weight = self.work.weights.total
        if part.dim():
            total, count = part.unbind()
            self.told = torch.stack((total / count, weight / (count * self.loss_scale), count))
        elif self.loss_scale != 1.0:
            rest = torch.tensor([1 / self.loss_scale, weight], dtype=part.dtype, device=part.device)
            self.told = torch.cat((part[None], rest))
        else:
            self.told = part
