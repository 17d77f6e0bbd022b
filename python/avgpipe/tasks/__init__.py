"""What ``avgpipe train`` trains: models of the papers with their data, by name, and tasks that a user's script makes.

torch is imported when one is built.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from avgpipe import plugins
from avgpipe.errors import nearest

if TYPE_CHECKING:
    import torch
    from torch import nn


DEFAULT_PRESET = "tiny"
LR_SCALINGS = ("none", "sqrt", "linear")
OPTIMIZERS = ("sgd", "adam", "adamw", "muon")

Predict = Callable[[Any], Any]


class DataNotFound(FileNotFoundError, ValueError):
    """The data that a workload should read is not there. The message names the folder and what is missing."""


@dataclass(frozen=True)
class BuildOptions:
    """What can be asked of a workload. None stands for the preset's value, or that of the script's function.

    Attributes:
        preset: the size; None: ``DEFAULT_PRESET``.
        data: the data folder; None: what the workload reads without one.
        pretrained: a folder of weights to begin with, for workloads that can.
        pipelines: how many train side by side.
        batch: whether they share each batch, "global", or take turns, "per-pipeline"; as of ``avgpipe.Plan``.
        rule: by which they are averaged, as of ``avgpipe.Plan``.
        batch_size: samples in a batch of the loader.
        seed: seed of the initial weights and of everything else that is drawn.
        epochs: how many to train.
        max_batches: how many batches all pipelines together train at most, when the run ends before its epochs do; a
            learning rate that decays reaches its end there.
        optimizer: one of ``OPTIMIZERS``, with the preset's momentum, betas and weight decay.
        lr: learning rate of a single pipeline, at its highest.
        lr_scaling: how the learning rate grows with the pipelines, one of ``LR_SCALINGS``.
        loader_workers: processes that make batches ahead.
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
        """The batches from which every pipeline makes an update."""
        return 1 if self.batch == "global" else self.pipelines

    def __post_init__(self) -> None:
        for name in ("pipelines", "batch_size", "epochs", "max_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("seed", "loader_workers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be a finite number above 0, got {self.lr}")
        for name, known in (("optimizer", OPTIMIZERS), ("lr_scaling", LR_SCALINGS)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


class BatchLoader(Protocol):
    """Batches ``(inputs, targets)`` with the samples as dimension 0, and how many there are, at most.

    A script's loader may not know: to ask for its length is a TypeError then.
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
    """A model as layers, its data and how it is trained.

    Attributes:
        name, preset: what it was built from; a script's function has no presets, "".
        layers: each gets exactly what the one before returned, and may state its ``compute_cost``; initial weights
            depend on the seed alone. Or a model that the runtime splits into such layers itself.
        loss_fn: ``(output, targets)`` to a scalar, the mean over samples or over what ``loss_weight`` counts.
        optimizer: makes the optimizer of some parameters, or of pairs (name, parameter) where its argument is called
            ``named_params``, or several in a list; its learning rate fits the number of pipelines.
        lr_scheduler: makes the scheduler of one of these optimizers, to step once after each of its steps; or None.
        clip_grad_norm: the largest norm of all gradients together, or None.
        train_batches: ``(epoch, start=0)`` to the batches of an epoch (from 0) from batch ``start`` on; where pipelines
            take turns, batch j is for pipeline j % N.
        valid_batches: for evaluation, in order; None: there is nothing to validate on.
        metrics: what is reported of an evaluation, by name, from its mean loss and the means per sample of what
            ``metric_fn`` returned; ``metric_name`` is among them unless ``decode`` makes it. Shares are in percent.
        metric_name, lower_is_better: the metric by which runs are judged.
        batch_size: samples in a batch of the loader.
        epochs: how many to train.
        loss_weight: of targets, how many things the loss is the mean of; None: the samples.
        metric_fn: ``(output, targets)`` to means over samples, by name; None: the loss says all.
        decode: further metrics, by name, from translating or generating with the ``predict`` it is given, or None.
        autocast: by device type, the dtype of ``torch.autocast`` that makes training there faster.
        trivial: the best answer that looks at no input, and its ``metric_name`` on the validation data; None: it
            scores nothing.
        title: what is learnt from which data, where that depends on the data; or "".
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
        """Name and preset."""
        return f"{self.name} {self.preset}".rstrip()


@dataclass(frozen=True)
class WorkloadFacts:
    """What is known of a workload before it is trained, of a built-in one before its data is read.

    Attributes:
        name, preset, batch_size, epochs: as of ``Workload``.
        layers: how many, so how many stages there can be.
        settled: the options that were left open, or were given, as the preset has them.
        counts_batches: whether the number of batches in an epoch is known.
        target: where training ends unless something else is asked for, or None.
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
    """Where a workload comes from: a name, or a script's function."""

    @property
    def name(self) -> str:
        """What the workload is called, in titles and folders."""

    @property
    def reference(self) -> str:
        """What names it from any folder."""

    def check(self, options: BuildOptions) -> WorkloadFacts:
        """Refuse what :meth:`build` would refuse."""

    def build(self, options: BuildOptions) -> Workload:
        """Make the model, the data and the rest."""


def workload_names() -> tuple[str, ...]:
    """Return the names of the workloads that installed packages add, see ``avgpipe.plugins``."""
    return plugins.names(plugins.WORKLOADS)


def is_script(workload: str) -> bool:
    """Whether this means a function of a script, as ``path/to/script.py:make`` or ``package.module:make``."""
    return ":" in workload or workload.endswith(".py")


def find_workload(workload: str) -> WorkloadSource:
    """Find a workload by its name, or the script of a function. ValueError where there is none."""
    if is_script(workload):
        script = importlib.import_module("avgpipe.tasks.script")
        found: WorkloadSource = script.Script.parse(workload)
        return found
    names = workload_names()
    if not names:
        raise ValueError(
            f"unknown workload {workload!r}: avgpipe_lab, which has those of the papers, is not installed here; give a "
            "function of a script as path/to/script.py:make"
        )
    if workload not in names:
        raise ValueError(f"unknown workload {workload!r}: {nearest(workload, names)}")
    source: WorkloadSource = plugins.load(plugins.WORKLOADS, workload)
    return source


def check_workload(name: str, options: BuildOptions | None = None, **asked: Any) -> WorkloadFacts:
    """Refuse what :func:`build_workload` would refuse, reading no data of a built-in workload.

    Args:
        name: one of :func:`workload_names`, or a script's function, see :func:`is_script`.
        options: None: the defaults.
        asked: fields of ``BuildOptions``, over those of ``options``.

    Raises:
        ValueError: an unknown name or preset, or a number out of range.
        DataNotFound: a ValueError that names the folder and the missing files.
        LibraryNotFound: a ValueError that names a library that is not installed.
        ScriptError: a ValueError that names file and line of what is wrong with a script.
    """
    return find_workload(name).check(_with(options, asked))


def build_workload(name: str, options: BuildOptions | None = None, **asked: Any) -> Workload:
    """Read the data and make the model with its initial weights, the same on every rank.

    The caller's random state stays as it is. Arguments and errors are those of :func:`check_workload`; ValueError is
    raised for data that are not what they should be, too.
    """
    return find_workload(name).build(_with(options, asked))


def _with(options: BuildOptions | None, asked: dict[str, Any]) -> BuildOptions:
    folders = {key: Path(asked[key]) for key in ("data", "pretrained") if asked.get(key) is not None}
    return replace(options or BuildOptions(), **{**asked, **folders})
