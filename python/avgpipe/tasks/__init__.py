"""The workloads of ``avgpipe train``: models of the papers with their data, by name, and tasks of users' scripts.

torch is imported only when a workload is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from avgpipe import plugins
from avgpipe.errors import check_count, check_name

if TYPE_CHECKING:
    import torch
    from torch import nn


DEFAULT_PRESET = "tiny"
LR_SCALINGS = ("none", "sqrt", "linear")
OPTIMIZERS = ("sgd", "adam", "adamw", "muon")

Predict = Callable[[Any], Any]


class DataNotFound(FileNotFoundError, ValueError):
    """The data of a workload are missing. The message names the folder and what is missing."""


@dataclass(frozen=True)
class BuildOptions:
    """Options of a workload. None means the preset's value, or that of the script's function.

    Attributes:
        preset: the size; None: ``DEFAULT_PRESET``.
        data: the data folder; None: the workload's default data.
        pretrained: a folder of initial weights, for workloads that can load them.
        pipelines: the number of pipelines that train side by side.
        batch: whether pipelines share each batch, "global", or train on batches in turn, "per-pipeline"; see
            ``avgpipe.Plan``.
        rule: the averaging rule, see ``avgpipe.Plan``.
        batch_size: samples in a batch of the loader.
        seed: seed of the initial weights and of all other random numbers.
        epochs: the number of epochs to train.
        max_batches: the most batches to train on, over all pipelines, if the run ends before its epochs; a
            decaying learning rate reaches its end there.
        optimizer: one of ``OPTIMIZERS``, with the preset's momentum, betas and weight decay.
        lr: peak learning rate of a single pipeline.
        lr_scaling: how the learning rate grows with the pipelines, one of ``LR_SCALINGS``.
        loader_workers: processes that prepare batches in advance.
    """

    preset: str | None = None
    data: Path | None = None
    pretrained: Path | None = None
    pipelines: int = 1
    batch: str = "global"
    rule: str = "mean-gradient"
    batch_size: int | None = None
    seed: int = 0
    epochs: int | None = None
    max_batches: int | None = None
    optimizer: str | None = None
    lr: float | None = None
    lr_scaling: str | None = None
    loader_workers: int = 0

    @property
    def batches_per_round(self) -> int:
        """Return the number of batches in which every pipeline makes an update."""
        return 1 if self.batch == "global" else self.pipelines

    def __post_init__(self) -> None:
        for name in ("pipelines", "batch_size", "epochs", "max_batches"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in ("seed", "loader_workers"):
            check_count(name, getattr(self, name), least=0)
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be a finite number above 0, got {self.lr}")
        for name, known in (("optimizer", OPTIMIZERS), ("lr_scaling", LR_SCALINGS)):
            if getattr(self, name) is not None:
                check_name(name, getattr(self, name), known)


class BatchLoader(Protocol):
    """Batches ``(inputs, targets)`` with the samples as dimension 0, and the most that there can be.

    A script's loader may not have a length, and then raises TypeError for it.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[Any, Any]]: ...


@runtime_checkable
class AveragingOptimizer(Protocol):
    """An optimizer whose averages of weights are what is validated, once it has begun to average.

    Attributes:
        triggered: Whether it averages.
    """

    @property
    def triggered(self) -> bool: ...

    def averages(self) -> AbstractContextManager[Any]:
        """Put the averages in the weights' place within a block."""

    def observe(self, loss: float) -> None:
        """Take note of an epoch's validation loss, before the checkpoint that holds the optimizer's state."""


@dataclass(frozen=True)
class Workload:
    """A model as layers, its data and its training.

    Attributes:
        name, preset: what it was built from; "" for the preset of a script's function.
        layers: each gets exactly the output of the layer before, and may have a ``compute_cost``; initial
            weights depend on the seed only. Or a model that the runtime splits into such layers itself.
        loss_fn: ``(output, targets)`` to a scalar, the mean over samples or over the items that ``loss_weight`` counts.
        optimizer: makes the optimizer of some parameters, or of pairs (name, parameter) if its argument is
            called ``named_params``, or several in a list; its learning rate is for this number of pipelines.
        lr_scheduler: makes the scheduler of one of these optimizers, with a step after each of the
            optimizer's; or None.
        clip_grad_norm: the largest norm of all gradients together, or None.
        train_batches: maps ``(epoch, start=0)`` to the batches of an epoch (from 0) from batch ``start`` on;
            if pipelines train on batches in turn, batch j is for pipeline j % N.
        valid_batches: for evaluation, in order; None: there is no validation.
        metrics: makes the metrics of an evaluation, by name, from its mean loss and the means per sample of
            the values of ``metric_fn``; ``metric_name`` is among them unless ``decode`` makes it. Shares are
            in percent.
        metric_name, lower_is_better: the metric by which runs are judged.
        batch_size: samples in a batch of the loader.
        epochs: the number of epochs to train.
        loss_weight: maps targets to the number of items that the loss is the mean of; None: the samples.
        metric_fn: maps ``(output, targets)`` to means over samples, by name; None: the loss is enough.
        decode: makes further metrics, by name, by translating or generating with its argument ``predict``; or
            None.
        autocast: by device type, the dtype of ``torch.autocast`` that makes training faster there.
        trivial: the best answer that ignores the input, and its ``metric_name`` on the validation data; None:
            it has no score.
        title: describes what is learnt from which data, if that depends on the data; or "".
    """

    name: str
    preset: str
    layers: list[nn.Module] | nn.Module
    loss_fn: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[..., torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
    lr_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None
    clip_grad_norm: float | None
    train_batches: Callable[..., BatchLoader]
    valid_batches: Callable[[], BatchLoader] | None
    metrics: Callable[[float, dict[str, float]], dict[str, float]]
    metric_name: str
    batch_size: int
    epochs: int
    lower_is_better: bool = False
    loss_weight: Callable[[Any], float] | None = None
    metric_fn: Callable[[Any, Any], dict[str, Any]] | None = None
    decode: Callable[[Predict], dict[str, float]] | None = None
    autocast: Mapping[str, torch.dtype] = field(default_factory=dict)
    trivial: tuple[str, float] | None = None
    title: str = ""

    @property
    def label(self) -> str:
        """Return name and preset."""
        return f"{self.name} {self.preset}".rstrip()


@dataclass(frozen=True)
class WorkloadFacts:
    """Facts about a workload before training, for a built-in one before its data is read.

    Attributes:
        name, preset, batch_size, epochs: see ``Workload``.
        layers: the number of layers, which is the most stages.
        settled: all options, given ones or the preset's.
        counts_batches: whether the number of batches in an epoch is known.
        target: where training ends by default, or None.
    """

    name: str
    preset: str
    layers: int
    batch_size: int
    epochs: int
    settled: Mapping[str, Any] = field(default_factory=dict)
    counts_batches: bool = True
    target: float | str | None = None


class WorkloadSource(Protocol):
    """The source of a workload: a name, or a script's function."""

    @property
    def name(self) -> str:
        """Return the name of the workload, for titles and folders."""

    @property
    def reference(self) -> str:
        """Return a name that is valid in any folder."""

    def check(self, options: BuildOptions) -> WorkloadFacts:
        """Refuse options that :meth:`build` would refuse."""

    def build(self, options: BuildOptions) -> Workload:
        """Make the model, the data and the rest."""


def workload_names() -> tuple[str, ...]:
    """Return the names of the workloads that installed packages add, see ``avgpipe.plugins``."""
    return plugins.names(plugins.WORKLOADS)


def is_script(workload: str) -> bool:
    """Return whether this names a function of a script, as ``path/to/script.py:make`` or ``package.module:make``."""
    return ":" in workload or workload.endswith(".py")


def find_workload(workload: str) -> WorkloadSource:
    """Find a workload by its name, or the script of a function. ValueError where there is none."""
    if is_script(workload):
        from avgpipe.tasks.script import Script

        return Script.parse(workload)
    names = workload_names()
    if not names:
        raise ValueError(
            f"unknown workload {workload!r}: avgpipe_lab, which has those of the papers, is not installed here; give a "
            "function of a script as path/to/script.py:make"
        )
    check_name("workload", workload, names)
    source: WorkloadSource = plugins.load(plugins.WORKLOADS, workload)
    return source


def check_workload(name: str, options: BuildOptions | None = None, **asked: Any) -> WorkloadFacts:
    """Refuse what :func:`build_workload` would refuse, reading no data of a built-in workload.

    Args:
        name: one of :func:`workload_names`, or a script's function, see :func:`is_script`.
        options: None: the defaults.
        asked: fields of ``BuildOptions``, which override ``options``.

    Raises:
        ValueError: an unknown name or preset, or a number out of range.
        DataNotFound: a ValueError that names the folder and the missing files.
        LibraryNotFound: a ValueError that names a library that is not installed.
        ScriptError: a ValueError that names file and line of the error in a script.
    """
    return find_workload(name).check(replace(options or BuildOptions(), **asked))


def build_workload(name: str, options: BuildOptions | None = None, **asked: Any) -> Workload:
    """Read the data and make the model with its initial weights, the same on every rank.

    The caller's random state is unchanged. Arguments and errors are those of :func:`check_workload`;
    ValueError is also raised for invalid data.
    """
    return find_workload(name).build(replace(options or BuildOptions(), **asked))
