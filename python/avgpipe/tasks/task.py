"""The result of a function of a user's script, and the workload that the commands make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from avgpipe.errors import check_count
from avgpipe.model.batch import LossFn, sample_count
from avgpipe.model.context import mix
from avgpipe.runtime.evaluate import MetricFn
from avgpipe.runtime.options import OptimizerFn, SchedulerFn
from avgpipe.tasks import BuildOptions, Workload
from avgpipe.tasks.loaders import HELD_OUT, Loader, LoaderBatches, first_batch, training_batches

_DEVICES = ("cpu", "cuda", "xpu")
_LOSS, _METRIC = "loss", "metric"
_FUNCTIONS = ("loss_fn", "optimizer", "metric_fn", "lr_scheduler", "loss_weight")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data, its loss and its optimizer: returned by a function for ``avgpipe.compare`` and the commands.

    ``avgpipe train path/to/script.py:make`` calls ``make()`` in every worker, after ``torch.manual_seed``, so
    it must make the same model and the same batches each time. The global generators of torch, Python and
    NumPy are seeded by seed and epoch for the loaders, so ``DataLoader(..., shuffle=True)`` is fine.

    Attributes:
        model: See ``Pipeline``.
        loader: Batches to train on, pairs (inputs, targets), iterated once an epoch; or a function that makes
            those of an epoch (from 0). A loader without a length needs ``--max-batches``.
        loss_fn: See ``Pipeline``.
        optimizer: See ``Pipeline``.
        held_out: Batches to validate on; None: there is no validation.
        metric_fn: ``metric_fn(output, target)``, the mean over the samples it is given: a number, which is then called
            ``metric_name``, or a dict of numbers by name.
        metric_name: The metric by which runs are judged, "loss" or one of ``metric_fn``'s.
        lower_is_better: Whether low metrics are good; None: true for the loss.
        lr_scheduler: See ``Pipeline``; it has a step after each batch.
        loss_weight: See ``avgpipe.Source``.
        clip_grad_norm: See ``Pipeline``.
        autocast: See ``avgpipe.Precision``; ``--autocast`` overrides it.
        batch_size: Samples in a batch; None: those of the first batch, which is loaded before training.
        epochs: Number of epochs, without ``--epochs``.
        target: Where training ends without ``--target``: a metric, or a loss as "loss=2.1".
    """

    model: nn.Module | Sequence[nn.Module]
    loader: Loader
    loss_fn: LossFn
    optimizer: OptimizerFn
    held_out: Iterable[Any] | None = None
    metric_fn: MetricFn | None = None
    metric_name: str = _LOSS
    lower_is_better: bool | None = None
    lr_scheduler: SchedulerFn | None = None
    loss_weight: Callable[[Any], Any] | None = None
    clip_grad_norm: float | None = None
    autocast: torch.dtype | None = None
    batch_size: int | None = None
    epochs: int = 1
    target: float | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module | list | tuple):
            raise TypeError(f"model={self.model!r}: must be a torch.nn.Module, or a list of them")
        _check_batches("loader", self.loader, callable(self.loader))
        _check_batches("held_out", self.held_out, self.held_out is None)
        for name in _FUNCTIONS:
            value = getattr(self, name)
            if not callable(value) and (value is not None or name in ("loss_fn", "optimizer")):
                raise TypeError(f"{name}={value!r}: must be a function")
        check_count("epochs", self.epochs)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)


def _check_batches(name: str, batches: object, is_fine: bool) -> None:
    if isinstance(batches, Iterator):
        raise TypeError(f"{name} can be iterated only once: give a DataLoader, a list or the like")
    if not isinstance(batches, Iterable) and not is_fine:
        raise TypeError(f"{name}={batches!r}: must be an iterable of batches, such as a DataLoader or a list")


def workload_of(task: Task, name: str, options: BuildOptions) -> Workload:
    """Make a task's workload: its epochs and batches, and its model, loss, optimizer and metric."""
    held_out = task.held_out
    return Workload(
        name=name,
        preset="",
        layers=task.model if isinstance(task.model, nn.Module) else list(task.model),
        loss_fn=task.loss_fn,
        optimizer=task.optimizer,
        lr_scheduler=task.lr_scheduler,
        clip_grad_norm=task.clip_grad_norm,
        train_batches=partial(training_batches, task.loader, options.seed, options.max_batches),
        valid_batches=None
        if held_out is None
        else partial(LoaderBatches, held_out, mix(options.seed, HELD_OUT)),
        metrics=partial(_metrics, task.metric_name),
        metric_name=task.metric_name,
        batch_size=task.batch_size or sample_count(*first_batch(task.loader, options.seed)),
        epochs=options.epochs or task.epochs,
        lower_is_better=task.metric_name == _LOSS if task.lower_is_better is None else task.lower_is_better,
        loss_weight=task.loss_weight,
        metric_fn=None if task.metric_fn is None else partial(_named, task.metric_fn, task.metric_name),
        autocast={} if task.autocast is None else dict.fromkeys(_DEVICES, task.autocast),
    )


def _named(metric_fn: MetricFn, name: str, output: Any, target: Any) -> dict[str, Any]:
    found = metric_fn(output, target)
    return found if isinstance(found, dict) else {_METRIC if name == _LOSS else name: found}


def _metrics(name: str, loss: float, means: dict[str, float]) -> dict[str, float]:
    found = {_LOSS: loss, **means}
    if name not in found:
        raise ValueError(
            f"metric_name={name!r}: metric_fn returned {', '.join(means) or 'nothing'}: name one of them"
        )
    return found
