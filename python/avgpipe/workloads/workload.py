"""What a training run needs to know of a model and its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Predict = Callable[[Any], Any]


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
        layers: each gets exactly what the one before returned; initial weights depend on the seed alone. Or a model
            that the runtime splits into such layers itself.
        loss_fn: ``(output, targets)`` to a scalar, the mean over samples or over what ``loss_weight`` counts.
        optimizer: makes the optimizer of some parameters; its learning rate fits the number of pipelines.
        lr_scheduler: makes the scheduler of one of these optimizers, to step once after each of its steps; or
            None.
        clip_grad_norm: the largest norm of all gradients together, or None.
        train_batches: ``(epoch, start=0)`` to the epoch's batches.
        valid_batches, test_batches: for evaluation, in order, for one pipeline.
        metrics: what is reported of an evaluation, by name, from its mean loss and the means per sample of what
            ``metric_fn`` returned; ``metric_name`` among them unless ``decode`` makes it. Shares are in percent.
        metric_name, lower_is_better: the metric by which runs are judged.
        batch_size: samples in one pipeline's batch.
        epochs: how many to train.
        layer_costs: relative computing cost of each layer; None: estimated from the weights.
        loss_weight: of targets, how many things the loss is the mean of; None: the samples.
        metric_fn: ``(output, targets)`` to means over samples, by name; None: the loss says all.
        decode: further metrics, by name, from translating or generating with the ``predict`` it is given; None:
            there are none.
        autocast: of a device type, the dtype of ``torch.autocast`` that makes training there faster.
        trivial: the best answer that looks at no input, and what it scores on the validation data, by ``metric_name``;
            None: such an answer scores nothing.
        title: what is learnt from which data, where that depends on the data; or "".
        after_validation: to call with each optimizer and the loss after each validation; says whether it
            changed the optimizer. None: nothing to do.
        averaged: of an optimizer that keeps a running mean of its weights, a context in which the parameters
            hold it, or None while there is none yet. None: the weights themselves are evaluated.
    """

    name: str
    preset: str
    layers: list[nn.Module] | nn.Module
    loss_fn: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    lr_scheduler: Callable[[Optimizer], LRScheduler] | None
    clip_grad_norm: float | None
    train_batches: TrainBatches
    valid_batches: Callable[[], Batches]
    test_batches: Callable[[], Batches]
    metrics: Callable[[float, dict[str, float]], dict[str, float]]
    metric_name: str
    lower_is_better: bool
    batch_size: int
    epochs: int
    layer_costs: list[float] | None = None
    loss_weight: Callable[[Any], float] | None = None
    metric_fn: Callable[[Any, Any], dict[str, Any]] | None = None
    decode: Callable[[Predict], dict[str, float]] | None = None
    autocast: Mapping[str, torch.dtype] = field(default_factory=dict)
    trivial: tuple[str, float] | None = None
    title: str = ""
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
