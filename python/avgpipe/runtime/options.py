"""The training options that all lanes of a pipeline share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from avgpipe.model.batch import SAMPLES_FIRST, BatchDims, LossFn
from avgpipe.model.context import Modes
from avgpipe.runtime.loss import is_mean_by_kind

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from avgpipe.runtime.prepared import PrepareStage
    from avgpipe.runtime.session import Session
    from avgpipe.runtime.spec import Spec

# Of parameters, or of pairs (name, parameter).
OptimizerFn = Callable[[Iterable[Any]], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
SchedulerFn = Callable[[torch.optim.Optimizer], Any]


_SHARED = (
    *("link", "wire_dtype", "clip_grad_norm", "skip_nonfinite", "autocast", "loss_scale"),
    *("accumulate", "ema_decay", "verify_wire", "verify_every", "copies", "check", "batch_dims"),
)

Callers = Mapping[str, ref[torch.Tensor]]  # parameters of the model that was given, by name
CHECKS = "first-batch", "every", "full", "off"


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a Pipeline, beside its plan; see there.

    Attributes:
        loss_weight: returns the weight of a micro-batch from its targets.
        on_device: how many actions a device has at most at a time; None: all whose messages are announced.
        measures: whether one forward of each stage counts what it saves for its backward.
        accumulate: how many batches of a loader make an update.
        verify_wire: whether messages between processes carry checksums.
        verify_every: after how many batches copies are compared; None: never.
        compile: arguments of torch.compile for layers; None: they are not compiled.
        copies: the ``avgpipe.Copies`` by which processes keep copies of each other's state; None: they keep none.
        memory_limit_bytes: of a worker, for ``advance="auto"``.
        weights_from: the source of values of a model on the meta device.
        names_of: the model that names parameters; None: the one that was given.
        members: the group of the pipeline's ranks; None: the default one.
        prepare: lets the caller change a :class:`avgpipe.runtime.stage.Stage` before it is trained, and returns a
            :class:`avgpipe.runtime.prepared.Prepared`; None: it stays unchanged.
        check: how training is checked; see Pipeline.
        keeps_modes: whether modules in evaluation mode stay in it in training.
        loss_modes: of a loss function that is a module.
        batch_dims: the dimensions of the samples of a batch.
        callers: parameters of the caller's own model.
        groups: by name, the options that ``optimizer`` gives each parameter when it gets all of them at once;
            see :mod:`avgpipe.runtime.optimizers`.
        extensions: what else was given, see :class:`avgpipe.runtime.options.Extension`.
    """

    loss_fn: LossFn
    optimizer: OptimizerFn
    lr_scheduler: SchedulerFn | None = None
    clip_grad_norm: float | None = None
    autocast: torch.dtype | None = None
    recompute: str = "never"
    cuda_graphs: bool = False
    fuses_gradients: bool = False
    on_device: int | None = None
    skip_nonfinite: bool = False
    loss_weight: Callable[[Any], Any] | None = None
    loss_scale: float | str | None = None
    compile: dict[str, Any] | None = None
    link: str = "auto"
    wire_dtype: torch.dtype | None = None
    measures: bool = False
    accumulate: int = 1
    copies: Any = None
    memory_limit_bytes: int | None = None
    weights_from: Any = None
    names_of: nn.Module | None = None
    members: dist.ProcessGroup | None = None
    ema_decay: float | None = None
    verify_wire: bool = False
    verify_every: int | None = None
    prepare: Callable[[Any], Any] | None = None
    check: str = "first-batch"
    keeps_modes: bool = False
    loss_modes: Modes | None = None
    batch_dims: BatchDims = SAMPLES_FIRST
    callers: Callers = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    extensions: tuple[Extension, ...] = ()

    @property
    def needs_norm(self) -> bool:
        """Whether an option needs the norm of the gradients of all stages."""
        return self.clip_grad_norm is not None or self.skips

    @property
    def skips(self) -> bool:
        """Whether updates are left out if their gradients are not finite."""
        return self.skip_nonfinite or self.loss_scale is not None

    @property
    def loss_kind_is_unknown(self) -> bool:
        """Whether the loss function may return something else than the mean or sum that is assumed."""
        return self.loss_weight is None and not is_mean_by_kind(self.loss_fn)

    @property
    def scales_late(self) -> bool:
        """Whether factors of the gradients may be known only after the backwards."""
        return self.loss_scale is not None or self.loss_kind_is_unknown

    @property
    def sums_loss(self) -> bool:
        """Whether the loss function returns a sum that is not divided."""
        return self.loss_weight is None and getattr(self.loss_fn, "reduction", "mean") == "sum"

    def shared_text(self) -> tuple[str, str]:
        """Return the names of the options that must be the same on all ranks, and their values as text."""
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in _SHARED)
        return f"{', '.join(_SHARED[:-1])} or {_SHARED[-1]}", values


def callers(parameters: Mapping[str, torch.Tensor]) -> Callers:
    """Return weak references by which the caller's parameters are recognised."""
    return {name: ref(p) for name, p in parameters.items()}


WHOLE = "whole"  # the form of a parameter that is no DTensor


def preparing(hook: PrepareStage, mesh: DeviceMesh | None) -> Callable[[Any], Any]:
    """Return a function that lets ``hook`` prepare a stage; see Pipeline."""
    if not callable(hook):
        raise TypeError(f"prepare_stage must be a function of (module, stage, mesh), not {hook!r}")
    if mesh is None:
        raise ValueError(
            'prepare_stage needs a mesh with dimensions to be parallel over: pass mesh=device_mesh["pp"], the one '
            "along which the stages lie"
        )
    from avgpipe.ranks.met import whole_mesh
    from avgpipe.runtime.prepared import prepare  # only now: its imports are slow

    return partial(prepare, hook=hook, mesh=whole_mesh(mesh))


_NAMED = ("named_params", "named_parameters")  # torch's names for pairs (name, parameter)


def with_names(optimizer: OptimizerFn, names: Sequence[str]) -> OptimizerFn:
    """Return a function that makes the optimizer of parameters with these names, in their order.

    ``optimizer`` gets pairs (name, parameter) if its first parameter is called ``named_params`` or
    ``named_parameters``, else the parameters alone.
    """
    if _first_parameter(optimizer) not in _NAMED:
        return optimizer
    return lambda parameters: optimizer(list(zip(names, parameters)))


def _first_parameter(function: Callable[..., Any]) -> str | None:
    """Return the name of a function's first positional parameter; of a partial, of those that are left."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it has no signature
        return None
    ones = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return next((p.name for p in parameters if p.kind in ones), None)


# ---- extensions ------------------------------------------------------------------------------------------------------


class StepGradients(NamedTuple):
    """The gradients of one stage before its optimizer step: summed over replicas, scaled back and clipped.

    Attributes:
        batch, pipeline, stage: numbers of the step.
        gradients: by the parameter's name in the unsplit model; without those that have none.
    """

    batch: int
    pipeline: int
    stage: int
    gradients: Mapping[str, torch.Tensor]


class Extension:
    """Base class of what ``Pipeline(..., extensions=[...])`` takes. A method that is not overridden does nothing.

    Every rank gives the same extensions. An error in a method ends the run as an error in a layer does.
    """

    def configure(self, options: TrainingOptions) -> TrainingOptions:
        """Return the options of the Pipeline with this extension's; ValueError or TypeError for wrong values."""
        return options

    def check(self, spec: Spec) -> None:
        """Raise ValueError if the model, the plan or other options do not go with this, once the model is cut."""

    def opened(self, session: Session) -> None:
        """Called on each rank once all ranks have met, and again after a rank was replaced."""

    def before_step(self, step: StepGradients) -> None:
        """Called on each rank for each stage and pipeline it trains, before the optimizer step of a batch.

        Gradients may be read, or changed in place. Clone those that you keep, as the next batch may use their memory.
        On an accelerator they are computed on the current stream.
        """

    def closed(self) -> None:
        """Called when the Pipeline is closed."""
