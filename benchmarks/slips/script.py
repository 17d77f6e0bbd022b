"""A training script as a value: what a user writes, before and after a slip."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

SAMPLES, BATCHES = 8, 6


@dataclass
class User:
    """What the body of a script's loop has at hand.

    Attributes:
        model: the one that the script has made.
        optimizers: of a plain loop its own, else ``pipeline.optimizers``.
        step: how many batches were trained on.
        loss: of the last one.
    """

    model: Any
    optimizers: Sequence[torch.optim.Optimizer]
    step: int = 0
    loss: float = 0.0


@dataclass
class Script:
    """A training script.

    Attributes:
        model: what trains.
        batches: pairs (inputs, targets), as tensors.
        loss_fn: of an output and targets, the mean over samples unless a slip has made it another.
        blocks: names of modules that take a floating-point tensor and return one of its shape.
        input_is_float: whether the inputs are one tensor of floating-point numbers.
        output_is_tensor: whether the model returns one tensor.
        loader: what the loop goes over, made once; None: ``batches``.
        optimizer: of parameters, or of pairs (name, parameter) if its argument is called ``named_params``.
        lr_scheduler: of an optimizer.
        clip: limit of the gradient's norm.
        around: what the script is inside of while it trains.
        body: called after each batch.
        epochs: how often the loop goes over the loader.
        stop: the batch after which the loop is left.
        draws: whether layers draw random numbers from torch's generators.
        value: what a plain loop makes of what the loss function returns.
        extras: tensors that the script is after beside the model.
        prepared: given to a Pipeline beside these.
    """

    model: Any
    batches: list[tuple[Any, Any]]
    loss_fn: Any
    blocks: list[str]
    input_is_float: bool = True
    output_is_tensor: bool = True
    loader: Iterable[Any] | None = None
    optimizer: Callable[..., Any] = field(
        default=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)
    )
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    clip: float | None = None
    around: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    body: list[Callable[[User], None]] = field(default_factory=list)
    epochs: int = 1
    stop: int | None = None
    draws: bool = False
    value: Callable[[Any], Any] = field(default=lambda loss: loss)
    extras: Callable[[], dict[str, torch.Tensor]] | None = None
    prepared: dict[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> Iterable[Any]:
        return self.batches if self.loader is None else self.loader

    def call(self, model: nn.Module, inputs: Any) -> Any:
        """Call a model as its script does: tuples and lists spread over arguments, dictionaries over keywords."""
        if isinstance(inputs, dict):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)

    def block(self, n: int) -> nn.Module:
        return self.model.get_submodule(self.blocks[n % len(self.blocks)])

    def replace(self, n: int, make: Callable[[nn.Module], nn.Module]) -> None:
        """Put ``make(block)`` in the place of a block."""
        name = self.blocks[n % len(self.blocks)]
        parent, _, key = name.rpartition(".")
        holder: Any = self.model.get_submodule(parent)
        made = make(self.model.get_submodule(name))
        if isinstance(holder, nn.Sequential | nn.ModuleList):
            holder[int(key)] = made
        else:
            setattr(holder, key, made)

    def change_inputs(self, change: Callable[[Any], Any]) -> None:
        self.batches = [(change(inputs), targets) for inputs, targets in self.batches]

    def change_targets(self, change: Callable[[Any], Any]) -> None:
        self.batches = [(inputs, change(targets)) for inputs, targets in self.batches]


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets as the loop of a script takes them apart."""
    if isinstance(batch, dict):
        return {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
    inputs, targets = batch
    return inputs, targets
