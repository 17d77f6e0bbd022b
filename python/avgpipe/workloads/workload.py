"""What a training run needs to know of a model and its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Batches(Protocol):
    """Batches ``(inputs, targets)`` with the samples as dimension 0, and how many there are."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[Any, Any]]: ...


class TrainBatches(Protocol):
    def __call__(self, epoch: int, start: int = 0) -> Batches:
        """The batches of an epoch (from 0) from batch ``start`` on; batch j is for pipeline j % N."""


@dataclass(frozen=True)
class Workload:
    """A model as layers, its data and how it is trained.

    Attributes:
        name, preset: what it was built from.
        layers: each gets exactly what the one before returned; initial weights depend on the seed alone.
        loss_fn: ``(output, targets)`` to a scalar, the mean over samples.
        optimizer: makes the optimizer of some parameters; its learning rate fits the number of pipelines.
        lr_scheduler: makes the scheduler of one of these optimizers, to step once after each of its steps; or
            None.
        clip_grad_norm: the largest norm of all gradients together, or None.
        train_batches: ``(epoch, start=0)`` to the epoch's batches.
        valid_batches, test_batches: for evaluation, in order, for one pipeline.
        metric_name, metric_from_loss: what is reported of an evaluation loss.
        lower_is_better: of the metric.
        batch_size: samples in one pipeline's batch.
        epochs: how many to train.
        layer_costs: relative computing cost of each layer.
        after_validation: to call with each optimizer and the loss after each validation; says whether it
            changed the optimizer. None: nothing to do.
        averaged: of an optimizer that keeps a running mean of its weights, a context in which the parameters
            hold it, or None while there is none yet. None: the weights themselves are evaluated.
    """

    name: str
    preset: str
    layers: list[nn.Module]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    lr_scheduler: Callable[[Optimizer], LRScheduler] | None
    clip_grad_norm: float | None
    train_batches: TrainBatches
    valid_batches: Callable[[], Batches]
    test_batches: Callable[[], Batches]
    metric_name: str
    metric_from_loss: Callable[[float], float]
    lower_is_better: bool
    batch_size: int
    epochs: int
    layer_costs: list[float]
    after_validation: Callable[[Optimizer, float], bool] | None = None
    averaged: Callable[[Optimizer], AbstractContextManager[None] | None] | None = None


@dataclass(frozen=True)
class WorkloadFacts:
    """What is known of a workload before its data is read."""

    name: str
    preset: str
    layers: int
    batch_size: int
    epochs: int
