"""How a preset is trained: sizes of batches, optimizer, and the course of its learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from avgpipe.workloads.options import LR_SCALINGS, BuildOptions


@dataclass(frozen=True)
class Training:
    """The numbers that one pipeline trains with.

    Attributes:
        batch_size: samples of one pipeline's batch.
        epochs: of all pipelines together.
        optimizer: which; SGD has ``momentum``, the others ``betas``.
        lr: of one pipeline, at its highest.
        lr_scaling: how lr grows with the number of pipelines, see :func:`scaled_lr`.
        weight_decay: of parameters of two and more dimensions; biases and the weights of norms have none.
        clip_grad_norm: the largest norm of all gradients together, or None.
        warmup: linear warm-up over this share of the steps.
        decay: what follows. "steps": a tenth at each of the ``milestones``, shares of the steps.
    """

    batch_size: int
    epochs: int
    optimizer: Literal["sgd", "adam", "adamw"]
    lr: float
    lr_scaling: Literal["none", "sqrt", "linear"] = "sqrt"
    weight_decay: float = 0.0
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    clip_grad_norm: float | None = None
    warmup: float = 0.0
    decay: Literal["none", "linear", "cosine", "steps"] = "linear"
    milestones: tuple[float, ...] = (0.5, 0.75)

    def asked(self, options: BuildOptions) -> Training:
        """With what the options override."""
        asked: dict[str, Any] = {
            "batch_size": options.batch_size,
            "epochs": options.epochs,
            "lr_scaling": options.lr_scaling,
        }
        return replace(self, **{name: value for name, value in asked.items() if value is not None})


def scaled_lr(lr: float, scaling: str, pipelines: int) -> float:
    """The learning rate of each of N pipelines: lr, lr sqrt(N) or lr N.

    The reference moves by the mean of N updates, so N pipelines want a learning rate like that of an N-fold batch.
    """
    if scaling not in LR_SCALINGS:
        raise ValueError(f"lr_scaling must be one of {', '.join(LR_SCALINGS)}, got {scaling!r}")
    return lr * {"none": 1.0, "sqrt": math.sqrt(pipelines), "linear": float(pipelines)}[scaling]


def optimizer_of(training: Training, pipelines: int) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """Makes the optimizer of some parameters of each of ``pipelines``."""
    return partial(_optimizer, training, scaled_lr(training.lr, training.lr_scaling, pipelines))


def lr_scheduler_of(
    training: Training, epoch_batches: int, options: BuildOptions
) -> Callable[[Optimizer], LRScheduler] | None:
    """Makes the scheduler of an optimizer, to step once after each of its steps; None: the rate stays as it is.

    epoch_batches: of all pipelines together. The course ends with the last epoch, or with ``options.max_batches``.
    """
    if training.warmup == 0 and training.decay == "none":
        return None
    batches = training.epochs * epoch_batches
    if options.max_batches is not None:
        batches = min(batches, options.max_batches)
    return partial(_scheduler, training, max(1, -(-batches // options.pipelines)))


def lr_factor(training: Training, steps: int, step: int) -> float:
    """What to multiply the learning rate with at ``step`` (from 0) of ``steps``."""
    warmup = math.ceil(training.warmup * steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if training.decay == "none":
        return 1.0
    if training.decay == "steps":
        return float(0.1 ** sum(step >= share * steps for share in training.milestones))
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 1 - done if training.decay == "linear" else (1 + math.cos(math.pi * done)) / 2


def _scheduler(training: Training, steps: int, optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, partial(lr_factor, training, steps))


def _optimizer(training: Training, lr: float, params: Iterable[nn.Parameter]) -> Optimizer:
    params = list(params)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": training.weight_decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    # Both even where one is empty: so every stage has the same groups, and a checkpoint fits any other cut.
    if training.optimizer == "sgd":
        return SGD(groups, lr=lr, momentum=training.momentum)
    kind = Adam if training.optimizer == "adam" else AdamW
    return kind(groups, lr=lr, betas=training.betas)
