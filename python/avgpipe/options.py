"""Options of a Pipeline beyond its arguments: objects for ``Pipeline(..., extensions=[...])``, each given once.

They are loaded when a script names them, with the code that they need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from avgpipe.errors import check_count, nearest
from avgpipe.model.batch import BatchDims
from avgpipe.model.compiler import compile_options
from avgpipe.plan import Plan
from avgpipe.runtime.options import CHECKS, Extension, TrainingOptions, preparing
from avgpipe.runtime.spec import Spec
from avgpipe.schedule import Kind

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from avgpipe.runtime.prepared import PrepareStage


@dataclass(frozen=True, kw_only=True)
class Precision(Extension):
    """Number formats of training, and what happens to updates that are not finite.

    Args:
        autocast: dtype for ``torch.autocast`` in training; evaluation and prediction are in the dtype of the weights.
        loss_scale: the factor on losses for the backward, so that small gradients in float16 are not lost:
            "dynamic", by the rule and the defaults of ``torch.amp.GradScaler``, for each pipeline; a number; None:
            "dynamic" under ``autocast=torch.float16``, else none. An update is left out if scaled gradients
            overflow on any stage, and ``skipped_updates`` counts it.
        wire_dtype: torch.bfloat16 or torch.float16: the dtype of messages, for half the bytes and less exact
            values; None sends all in their own dtype. It casts float32 and float64 tensors of training: the
            activations and gradients that go between workers (gradients of tied weights only to bfloat16),
            and the updates of isolated pipelines that go between hosts, with their sums. Sums are computed in
            the tensors' own dtype. Updates within a host, weights, norms and evaluations are not cast.
        skip_nonfinite: a batch whose gradients have infinities or NaN, on any stage, changes neither weights
            nor statistics, and ``skipped_updates`` counts it. An accelerator decides this by itself, as with
            ``loss_scale``, for elastic pipelines with SGD, Adam or AdamW, and for a lone pipeline whose
            optimizer has ``fused=True``; else the host waits for the device at every update.
    """

    autocast: torch.dtype | None = None
    loss_scale: float | str | None = None
    wire_dtype: torch.dtype | None = None
    skip_nonfinite: bool = False

    def configure(self, options: TrainingOptions) -> TrainingOptions:
        scale = self.loss_scale
        is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if scale not in (None, "dynamic") and not (is_number and 0 < float(scale) < math.inf):
            raise ValueError(f"loss_scale must be None, 'dynamic' or a number above 0, not {scale!r}")
        if self.wire_dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(
                f"wire_dtype must be None, torch.bfloat16 or torch.float16, not {self.wire_dtype}"
            )
        if scale is None and self.autocast is torch.float16:
            scale = "dynamic"
        return replace(
            options,
            autocast=self.autocast,
            loss_scale=scale,
            wire_dtype=self.wire_dtype,
            skip_nonfinite=self.skip_nonfinite,
        )

    def check(self, spec: Spec) -> None:
        """Refuse trained weights in the other 16-bit dtype than that of autocast."""
        halves = {torch.bfloat16, torch.float16}
        for layer in spec.layers if self.autocast in halves else ():
            for name, p in layer.named_parameters():
                if p.requires_grad and p.dtype in halves - {self.autocast}:
                    raise ValueError(
                        f"Precision(autocast={self.autocast}) with weights in {p.dtype} ({name!r} of "
                        f"{type(layer).__name__}): use autocast={p.dtype}, or weights in torch.float32"
                    )


def check_names(layers: Sequence[nn.Module], names_of: nn.Module) -> None:
    """Refuse layers that hold tensors of no name in the model: a checkpoint could not name them."""
    known = {id(t) for t in names_of.state_dict(keep_vars=True).values()}
    for n, layer in enumerate(layers):
        parameters = dict(layer.named_parameters(remove_duplicate=False))
        for name, tensor in (layer.state_dict(keep_vars=True) | parameters).items():
            if isinstance(tensor, torch.Tensor) and id(tensor) not in known:
                is_buffer = name not in parameters
                raise ValueError(
                    f"{'buffer' if is_buffer else 'parameter'} {name!r} of layer {n} ({type(layer).__name__}) is none "
                    f"of {type(names_of).__name__}'s, which Source(names_of) names tensors by: make the layers of the "
                    "model's own modules"
                    + (", or register the buffer with persistent=False" if is_buffer else "")
                )


def precision_of(extensions: Sequence[Extension]) -> Precision:
    """Return the precision among some extensions, or the default."""
    return next((e for e in extensions if isinstance(e, Precision)), Precision())


@dataclass(frozen=True, kw_only=True)
class Ranks(Extension):
    """Which ranks a pipeline has, where it has not all, and how a stage is made parallel over others.

    Args:
        mesh: the dimension of a device mesh along which the stages lie, such as ``device_mesh["pp"]``: its ranks are
            this pipeline's, and the other ranks of the whole mesh form pipelines of their own, of the same model.
        group: likewise the torch.distributed group of this pipeline's ranks; messages name ranks by their numbers in
            it.
        prepare_stage: ``prepare_stage(module, stage, mesh)`` makes a stage of this rank parallel over the other
            dimensions of ``mesh``, which is the whole mesh here: by ``fully_shard`` or ``parallelize_module``
            on ``module``, whose ``layers`` are the stage's, or by returning ``DistributedDataParallel(module,
            ...)``. It changes the pipeline's copy, before the optimizer is made. Needs ``mesh``. All
            pipelines must train on batches of equally many samples; a batch's loss is that of the pipeline's
            own. Ranks with different data should have different ``seed`` values, ranks that share layers the
            same one.
    """

    mesh: DeviceMesh | None = None
    group: dist.ProcessGroup | None = None
    prepare_stage: PrepareStage | None = None

    def configure(self, options: TrainingOptions) -> TrainingOptions:
        from avgpipe.ranks.met import members_of

        members = None
        if self.mesh is not None or self.group is not None:
            members = members_of(self.mesh, self.group)
        prepare = None if self.prepare_stage is None else preparing(self.prepare_stage, self.mesh)
        return replace(options, members=members, prepare=prepare)


@dataclass(frozen=True, kw_only=True)
class Source(Extension):
    """What names and batches mean.

    Args:
        names_of: the model that a list of layers is made from: names of parameters are this model's.
        loss_weight: ``loss_weight(target)``, the weight of a micro-batch in its batch's mean loss; by default
            its number of samples, or of the elements that ``nn.CrossEntropyLoss`` and ``nn.NLLLoss`` count.
        batch_dim: the dimension of tensors along which the samples of a batch are: a number for all of them,
            such as 1 for layers that take [length, batch, ...]; or one for the inputs and one for the
            targets, ``(1, 0)``, and optionally a third for the model's outputs, 0 otherwise. If tensors
            differ, tuples, lists and dicts with the structure of a batch replace a number, with None for
            tensors that every micro-batch gets whole, such as a mask that all samples share: ``({"x": 0,
            "mask": None}, 0)``.
    """

    names_of: nn.Module | None = None
    loss_weight: Callable[[Any], Any] | None = None
    batch_dim: Any = 0

    def configure(self, options: TrainingOptions) -> TrainingOptions:
        return replace(
            options,
            names_of=self.names_of,
            loss_weight=self.loss_weight,
            batch_dims=_dims_of(self.batch_dim),
        )


@dataclass(frozen=True)
class WeightsFrom(Extension):
    """The values of a model on the meta device.

    Args:
        source: a folder or file of safetensors; a mapping from names to tensors, of which each rank reads those of its
            stages; or a function that fills the modules of a stage, as by ``module.apply(...)``. Each rank allocates
            its own stages only, so a model may be larger than a host's memory. Names in a folder that
            ``save_pretrained`` wrote may have, or lack, the prefix of the model's body.
    """

    source: Any

    def configure(self, options: TrainingOptions) -> TrainingOptions:
        return replace(options, weights_from=self.source)


@dataclass(frozen=True)
class Copies(Extension):
    """Copies of each process's state in its neighbour's memory, so that a killed process is replaced without a disk.

    For ranks that ``avgpipe run --spares`` has started. Each process holds two copies of its own state (weights,
    optimizer states, reference) and two of its neighbour's, and the inputs and targets since. The script of the new
    process runs from its beginning, reads its position from ``batches``, and gives ``train`` a loader that begins
    there. A loader that is an iterator cannot be evaluated again.

    Args:
        every_s: at most about this many seconds of work are lost: the next copy, taken between two batches, begins
            after three quarters of them, as a copy counts only once it has arrived.
    """

    every_s: float

    def configure(self, options: TrainingOptions) -> TrainingOptions:
        if not (isinstance(self.every_s, int | float) and 0 < self.every_s < math.inf):
            raise ValueError(f"Copies(every_s) must be seconds above 0, not {self.every_s!r}")
        return replace(options, copies=self)

    def give(self, batches: int) -> Any:
        """Return what a process that replaces a lost one must know of this one's loop, as JSON.

        For subclasses. Called on each of the other ranks, in the midst of ``train`` or of another call, when all
        have gone back to the state after ``batches`` batches.
        """

    def take(self, given: Any) -> None:
        """Take, on a new rank, what the first of the others has given that gave anything."""


@dataclass(frozen=True, kw_only=True)
class BitChecks(Extension):
    """Checks for bits that were flipped in transit or in memory.

    Args:
        every: after this many batches, or a few more to complete a round of all pipelines, finish the
            batches in flight and compare bit for bit what must be equal: copies of tied weights, replicas of
            a stage, the references of dedicated pipelines; and two runs of one micro-batch on each stage, on
            an accelerator only with ``torch.use_deterministic_algorithms(True)``. A difference ends the run
            with an error that names it, and its place. Otherwise training continues unchanged. None: never.
        wire: give each message between processes a checksum, which the receiver checks: a bit that was flipped
            in transit ends the run with an error that names both processes, and the message. On devices, for
            links through host memory. Sums and broadcasts of torch.distributed are not checked.
    """

    every: int | None = None
    wire: bool = False

    def configure(self, options: TrainingOptions) -> TrainingOptions:
        if self.every is not None:
            check_count("BitChecks(every)", self.every)
        return replace(options, verify_every=self.every, verify_wire=self.wire)


@dataclass(frozen=True)
class MovingAverage(Extension):
    """An exponential moving average of the reference, or of a lone pipeline's weights, taken after each update.

    ``average = decay average + (1 - decay) weights``, with the first update's weights as its first value. Each stage
    keeps its own, in one more copy of the weights, for ``weights="ema"`` in ``evaluate``, ``predict`` and
    ``state_dict``; checkpoints have it. Buffers are not averaged over time.

    Args:
        decay: from 0 to below 1, such as 0.999.
    """

    decay: float

    def configure(self, options: TrainingOptions) -> TrainingOptions:
        if isinstance(self.decay, bool) or not 0 <= self.decay < 1:
            raise ValueError(f"decay must be from 0 to below 1, such as 0.999, not {self.decay!r}")
        return replace(options, ema_decay=self.decay)


@dataclass(frozen=True)
class CudaGraphs(Extension):
    """On CUDA, launch all forwards and backwards of a batch as one graph.

    A batch is several graphs where it waits for messages of other processes. For plans that flush, and stages whose
    layers launch the same kernels every time, without waiting for the device. The first two batches of each shape
    run without graphs, and so do shapes beyond the first four. Dropout and ``Carry`` are as without, in every bit.
    Once a batch is captured, Python code of layers and hooks does not run: StageError, if a forward draws from a
    generator of the host, or assigns attributes; or if a gradient is sparse. Gradients have the same memory in each
    batch: an optimizer of your own that keeps one, as for a difference to the next, must clone it.
    """

    def configure(self, options: TrainingOptions) -> TrainingOptions:
        return replace(options, cuda_graphs=True)


@dataclass(frozen=True)
class FusedGradients(Extension):
    """Have the products that make the gradients of linear layers' weights add them up over micro-batches.

    Then no gradient of a micro-batch is written, read and added, and under autocast a weight is cast once for
    each batch. Sums are rounded less often than those of autograd, so trained weights differ in their last bits.
    It applies to modules that are exactly an ``nn.Linear``; all others train as before. Where a stage has
    replicas, sums over them begin after the last backward, and not during it. Meant for accelerators, whose
    memory these passes fill; a CPU gains nothing.
    """

    def configure(self, options: TrainingOptions) -> TrainingOptions:
        return replace(options, fuses_gradients=True)

    def check(self, spec: Spec) -> None:
        """Refuse schedules that split backwards: both parts would add the same gradient."""
        kinds = {action.kind for row in spec.running.build_schedule().rows for action in row}
        if Kind.BACKWARD_WEIGHT in kinds:
            raise ValueError(
                f"FusedGradients() cannot have schedule={spec.plan.schedule!r}: use one whose backwards are whole"
            )


@dataclass(frozen=True)
class InTurn(Extension):
    """On a device, issue an action once its messages are there, and only while few others are on the device.

    By default streams of several pipelines share the device. Where kernels fill it, pipelines then stay in phase and
    wait in the same bubbles; in turn, one computes while another waits. By a model of four stages with kernels that
    fill the device, two pipelines gain nothing by sharing, and 1.7 in turn. Where kernels leave room on the device,
    sharing uses it. Not measured on a GPU yet. A CPU does so anyway.

    Args:
        actions: on the device at a time: one that runs, and the others behind it, so that it does not wait for the
            host; 1 or more.
    """

    actions: int = 2

    def configure(self, options: TrainingOptions) -> TrainingOptions:
        if isinstance(self.actions, bool) or not isinstance(self.actions, int) or self.actions < 1:
            raise ValueError(f"actions must be an int of at least 1, such as 2, not {self.actions!r}")
        return replace(options, on_device=self.actions)


class Compile(Extension):
    """Compile every layer separately by ``torch.compile``: let a layer be a whole block.

    Modules compiled before, by ``compile()`` or ``torch.compile``, stay so in any case, with their own options. Dropout
    draws the same for any number of stages, but with the default backend not what plain layers draw, unless
    ``torch._inductor.config.fallback_random`` is set. The first batches wait for the compiler, which ``timeout_s`` must
    allow for.

    Args:
        options: keyword arguments of ``torch.compile``. With recomputation the default is ``dynamic=False``.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __repr__(self) -> str:
        return f"Compile({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"

    def configure(self, options: TrainingOptions) -> TrainingOptions:
        return replace(options, compile=compile_options(self.options, options.recompute))


@dataclass(frozen=True)
class Audit(Extension):
    """How training is compared with what was asked for. Without it: ``Audit("first-batch")``.

    Args:
        when: "first-batch": before the first batch trains, check that training does what was requested, and
            raise or warn if it does not. Ranks must have the same batches, of which some are compared, and
            loaders must end after the same one. The first rank runs the model as it was given and as its
            stages run it, on samples of the batch: outputs, gradients and buffers must be equal, also in
            evaluation and with recomputation. That takes the time of some batches, and memory for a copy of
            the whole model and for its gradients, twice; its code and hooks run a few times more, on copies
            of its modules. A warning reports a model that computes something else of a batch in micro-batches
            than of the whole one, because its layers mix samples or count forwards. Another names parameters
            without a gradient. An optimizer must give the parameters the same options for the whole model as
            stage by stage; one of the caller's own class tries steps on small tensors. A loss function is
            called a few times more, to check that it is a mean if it is used as one. "every": also compare
            stages with the model in every hundredth batch, on the weights that it was given with; "full": in
            all batches, on all samples; "off": no checks.
    """

    when: str = "first-batch"

    def configure(self, options: TrainingOptions) -> TrainingOptions:
        if self.when not in CHECKS:
            raise ValueError(f"unknown Audit({self.when!r}): {nearest(str(self.when), CHECKS)}")
        return replace(options, check=self.when)


@dataclass(frozen=True)
class MemoryLimit(Extension):
    """The memory that ``Plan(advance="auto")`` may use on a worker.

    Args:
        bytes: per worker, for the weights of all pipelines and the activations in flight.
    """

    bytes: int

    def configure(self, options: TrainingOptions) -> TrainingOptions:
        if not (options.measures and isinstance(self.bytes, int) and self.bytes > 0):
            raise ValueError(
                f'MemoryLimit({self.bytes!r}) must be bytes above 0, for Plan(advance="auto"): leave it out elsewhere'
            )
        return replace(options, memory_limit_bytes=self.bytes)


# ---- what does not go together ---------------------------------------------------------------------------------------


class Conflict(NamedTuple):
    """An option that cannot be had with another one.

    Attributes:
        option: as the user writes it, a key of ``_GIVEN``.
        other: the other one, likewise.
        way_out: what to do.
    """

    option: str
    other: str
    way_out: str


_PREPARED, _COPIES, _GRAPHS = "Ranks(prepare_stage)", "Copies", "CudaGraphs()"
_FUSED = "FusedGradients()"
_RECOMPUTE, _WEIGHTS = "recompute={plan.recompute!r}", "weights={plan.weights!r}"
_REPLICATION, _PIPELINES = "replication={plan.replication}", "pipelines={plan.pipelines}"
_AUTO, _CHECKS = 'advance="auto"', "BitChecks(every={options.verify_every})"
_AVERAGE, _GROUP = "MovingAverage({options.ema_decay})", "Ranks(mesh or group)"

# Whether an option was given.
_GIVEN: Mapping[str, Callable[[TrainingOptions, Plan], Any]] = {
    _PREPARED: lambda o, p: o.prepare,
    _COPIES: lambda o, p: o.copies,
    _GRAPHS: lambda o, p: o.cuda_graphs,
    _FUSED: lambda o, p: o.fuses_gradients,
    _RECOMPUTE: lambda o, p: p.recompute != "never",
    _WEIGHTS: lambda o, p: p.weights != "flush",
    _REPLICATION: lambda o, p: p.replication,
    _PIPELINES: lambda o, p: p.pipelines > 1,
    _AUTO: lambda o, p: o.measures,
    _CHECKS: lambda o, p: o.verify_every is not None,
    _AVERAGE: lambda o, p: o.ema_decay is not None,
    _GROUP: lambda o, p: o.members is not None,
    "isolate=True": lambda o, p: p.isolate,
    "spread=True": lambda o, p: p.spread,
    "Compile()": lambda o, p: o.compile is not None,
}
CONFLICTS: Sequence[Conflict] = (
    Conflict(_GRAPHS, _WEIGHTS, "a graph reads one version: use a schedule that flushes, or leave it out"),
    Conflict(_FUSED, _RECOMPUTE, "leave one of the two out"),
    Conflict(_FUSED, _CHECKS, "BitChecks runs a micro-batch again without it: leave one of the two out"),
    Conflict(_FUSED, "Compile()", "compiled layers have backwards of their own: leave one of the two out"),
    Conflict(_PREPARED, _FUSED, "leave it out"),
    Conflict(_COPIES, "isolate=True", "pipelines in processes of their own replace each other"),
    Conflict(_COPIES, "spread=True", "use isolate=True, with which the other pipelines go on at once"),
    Conflict(_COPIES, _REPLICATION, "leave it out"),
    Conflict(_COPIES, _WEIGHTS, "use a schedule that flushes"),
    Conflict(_COPIES, _AUTO, "give numbers"),
    Conflict(_COPIES, _CHECKS, "leave one of the two out"),
    Conflict(_COPIES, _GROUP, "the pipeline must have all ranks"),
    Conflict(_PREPARED, _PIPELINES, "use one, as other ranks hold parts of the weights"),
    Conflict(_PREPARED, _WEIGHTS, "use a schedule that flushes"),
    Conflict(_PREPARED, _REPLICATION, "leave it out, and replicate stages over the mesh"),
    Conflict(_PREPARED, _AUTO, "ranks may choose differently: use the number that one has chosen"),
    Conflict(_PREPARED, _GRAPHS, "leave it out"),
    Conflict(_PREPARED, _CHECKS, "leave it out"),
    Conflict(_PREPARED, _AVERAGE, "leave it out"),
    Conflict(_PREPARED, "Compile()", "leave it out, and have prepare_stage call layer.compile()"),
)


def configured(options: TrainingOptions, plan: Plan) -> TrainingOptions:
    """Return the options with those of all extensions; ValueError or TypeError for what cannot be."""
    extensions = options.extensions
    for n, extension in enumerate(extensions):
        if not isinstance(extension, Extension):
            if isinstance(extension, type) and issubclass(extension, Extension):
                raise TypeError(
                    f"extensions[{n}] is a class: give an object of it, such as {extension.__name__}(...)"
                )
            raise TypeError(
                f"extensions[{n}] is {extension!r}: give objects of avgpipe, such as avgpipe.Compile(), or of a class "
                "of yours that is an avgpipe.Extension"
            )
        if any(type(other) is type(extension) for other in extensions[:n]):
            raise ValueError(f"extensions has two of {type(extension).__name__}: give each once")
        options = extension.configure(options)
    for row in CONFLICTS:
        if _GIVEN[row.option](options, plan) and _GIVEN[row.other](options, plan):
            other = row.other.format(options=options, plan=plan)
            raise ValueError(f"{row.option} cannot have {other}: {row.way_out}")
    return options


def _dims_of(asked: Any) -> BatchDims:
    """Parse the user's value: a number for everything, or (inputs, targets), or (inputs, targets, outputs)."""
    if type(asked) is int:
        asked = (asked, asked, asked)
    if not (isinstance(asked, tuple) and len(asked) in (2, 3)):
        raise TypeError(
            "batch_dim must be a number, or a tuple (of the inputs, of the targets) or (of the inputs, of the "
            f"targets, of the outputs), not {asked!r}"
        )
    found = BatchDims(*asked)
    wrong = [d for d in tree_leaves(asked) if d is not None and (type(d) is not int or d < 0)]
    if wrong or type(found.outputs) is not int:
        raise TypeError(
            f"batch_dim has {wrong[0] if wrong else found.outputs!r}: give the number of a dimension from 0 on, or "
            "None for inputs or targets that go whole to every micro-batch"
        )
    return found
