"""A batch as a lane has it in hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch

from avgpipe.runtime.batch import LossWeights
from avgpipe.runtime.split_backward import Deferred
from avgpipe.runtime.streams import Handed


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
    # Of micro-batches, with their factors.
    losses: list[tuple[torch.Tensor, float]] = field(default_factory=list)
    loss: torch.Tensor | None = None  # of the whole batch; float64, known after the last backward
    grads: list[torch.Tensor | None] = field(
        default_factory=list
    )  # of parameters, while they wait for the update
    norm: torch.Tensor | None = None  # of the gradients of all stages; float64, where somebody asks for it
    updated: bool = False

    def sum_losses(self) -> None:
        device = self.losses[0][0].device if self.losses else None
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        for loss, factor in self.losses:
            self.loss.add_(loss, alpha=factor)
