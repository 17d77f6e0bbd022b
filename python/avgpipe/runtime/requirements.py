"""Requirements on a model, an optimizer, a learning-rate schedule and options. Errors give a remedy."""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from avgpipe.device import has_graphs
from avgpipe.errors import nearest
from avgpipe.links import NAMES as LINKS
from avgpipe.links import refuse_elsewhere, refuse_unverified
from avgpipe.model.context import Carry
from avgpipe.plan import Plan
from avgpipe.runtime.options import TrainingOptions

_log = logging.getLogger("avgpipe")

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
# By name: their packages are slow to import.
_SHARDING = ("FSDPModule", "FullyShardedDataParallel")
_SHARDED = "DTensor"


def check_model(model: nn.Module | Sequence[nn.Module], may_be_meta: bool = False) -> None:
    """Refuse modules that communicate themselves, and tensors without values, unless it ``may_be_meta``."""
    whole = (
        model if isinstance(model, nn.Module) else nn.ModuleList(m for m in model if isinstance(m, nn.Module))
    )
    for name, module in whole.named_modules():
        where = f"module {name!r} of the model" if name else "the model"
        if isinstance(module, _WRAPPERS):
            raise ValueError(
                f"{where} is a {type(module).__name__}, which would wait for ranks that hold other stages: pass "
                "the module inside it (.module), and wrap each stage by Ranks(prepare_stage=...), give a stage "
                "several workers by Plan(replication=...), or the whole model by "
                'Plan.for_system("data-parallel")'
            )
        if isinstance(module, nn.SyncBatchNorm) and _ranks() > 1:
            raise ValueError(
                f"{where} is a SyncBatchNorm, which would wait for ranks that hold other stages: use nn.BatchNorm1d, "
                "2d or 3d, whose running statistics are those of the whole batch here"
            )
        if any(kind.__name__ in _SHARDING for kind in type(module).__mro__):
            raise ValueError(
                f"{where} is sharded by FSDP before it is cut into stages: pass the model as it was before, and call "
                "fully_shard on each stage by Ranks(prepare_stage=...)"
            )
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"{name!r} of a lazy module has no shape yet: run the model once on a batch, as "
                "model(next(iter(loader))[0]), before it is cut into stages"
            )
        if type(tensor).__name__ == _SHARDED:
            raise ValueError(
                f"{name!r} is a DTensor before the model is cut into stages: pass the model as it was before, and "
                "parallelize each stage by Ranks(prepare_stage=...)"
            )
        if tensor.is_meta and not may_be_meta:
            raise ValueError(
                f"{name!r} is on the meta device and has no values: give their source by WeightsFrom(source), such "
                "as a folder of safetensors, or give the model some first, by to_empty(device=...) and its "
                "initialisation"
            )
    for name, parameter in whole.named_parameters():
        if parameter.requires_grad and type(parameter.data) is not torch.Tensor:
            # It would keep training in its own memory, and flat buffers would keep its first values.
            raise ValueError(
                f"parameter {name!r} trains, and its values are a {type(parameter.data).__name__}, a tensor made of "
                "others, which cannot lie in flat memory: leave it plain. Layers for fp8 with "
                "enable_fsdp_float8_all_gather are made in Ranks(prepare_stage=...), before fully_shard"
            )
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter {name!r} has a hook that runs after gradients are accumulated; a Pipeline accumulates "
                "them over micro-batches, on a copy: remove it (register_hook sees the gradient of the whole batch)"
            )


def check_memory(model: nn.Module | Sequence[nn.Module]) -> None:
    """Refuse trainable parameters that overlap in memory with each other, or with a buffer."""
    whole = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    placed: list[_Placed] = []
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
        if is_plain and not tensor.is_meta and tensor.numel():
            extent = 1 + sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride()))
            begin = tensor.data_ptr()
            end = begin + extent * tensor.element_size()
            placed.append(_Placed(str(tensor.device), begin, end, name, tensor))
    before: list[_Placed] = []  # those that may reach into the next one
    for one in sorted(placed, key=lambda row: row[:3]):
        before = [other for other in before if other.device == one.device and other.end > one.begin]
        for other in before:
            learns = one.tensor.requires_grad or other.tensor.requires_grad
            if learns and not _may_interleave(one.tensor, other.tensor):
                raise ValueError(
                    f"{other.name!r} and {one.name!r} are two tensors in the same memory, which a Pipeline would "
                    "split, as it copies each of them: let both be one parameter (a.weight = b.weight, not "
                    "a.weight.data = b.weight.data)"
                )
        before.append(one)


class _Placed(NamedTuple):
    device: str
    begin: int
    end: int
    name: str
    tensor: torch.Tensor


def _may_interleave(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of overlapping extents may have no element in common, like columns of a matrix."""
    return not (a.is_contiguous() and b.is_contiguous())


def warn_of_hooks(plan: Plan, parameters: Mapping[str, torch.Tensor]) -> None:
    """Warn of hooks of parameters that get the gradient of a share of a batch."""
    hooked = [name for name, p in parameters.items() if p._backward_hooks]
    if hooked and plan.shares > 1:
        _log.warning(
            "%r has a hook, which each of the %d pipelines that share a batch calls with the gradient of its own "
            "share, times %d, and not with the batch's: what it limits or counts differs from one device. Train with "
            'one pipeline, or with Plan(batch="per-pipeline")',
            *(hooked[0], plan.pipelines, plan.pipelines),
        )


def check_options(options: TrainingOptions) -> None:
    """Refuse values that are wrong for every model and device."""
    _check_functions(options)
    limit = options.clip_grad_norm
    if limit is not None and not (isinstance(limit, int | float) and limit > 0):
        raise ValueError(f"clip_grad_norm must be a number above 0, not {limit!r}")
    if not (type(options.accumulate) is int and options.accumulate >= 1):
        raise ValueError(f"accumulate must be a number of batches of at least 1, not {options.accumulate!r}")
    if options.link not in LINKS:
        raise ValueError(f"unknown link {options.link!r}: {nearest(str(options.link), LINKS)}")


def _check_functions(options: TrainingOptions) -> None:
    """Refuse a value that is no function, such as what the function would return."""
    for name, value, example in (
        ("loss_fn", options.loss_fn, "nn.CrossEntropyLoss(), or lambda output, target: ..."),
        ("optimizer", options.optimizer, "lambda params: torch.optim.AdamW(params, lr=1e-3)"),
        (
            "lr_scheduler",
            options.lr_scheduler,
            "lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)",
        ),
        ("loss_weight", options.loss_weight, "lambda target: (target != 0).sum()"),
    ):
        is_optional = name in ("lr_scheduler", "loss_weight") and value is None
        if not is_optional and not callable(value):
            why = (
                "; each stage makes its own, of its own parameters"
                if isinstance(value, torch.optim.Optimizer) or hasattr(value, "step")
                else ""
            )
            raise TypeError(f"{name} must be a function, such as {example}, not {_an(value)}{why}")
    if isinstance(options.loss_fn, nn.Module):
        training = [name for name, p in options.loss_fn.named_parameters() if p.requires_grad]
        if training:
            raise ValueError(
                f"loss_fn has parameters that require gradients, such as {training[0]!r}, and optimizers get those of "
                "the model alone, so it would never be trained: let the model own it, whose last layer returns it "
                "beside the output, or freeze it by loss_fn.requires_grad_(False)"
            )


def check_carries(options: TrainingOptions, layers: Sequence[nn.Module]) -> None:
    """Refuse layers that carry values between batches if several batches are accumulated."""
    if options.accumulate > 1 and any(isinstance(m, Carry) for layer in layers for m in layer.modules()):
        raise ValueError(
            f"accumulate={options.accumulate} trains on several batches as one, and the model has a Carry, which goes "
            "from each batch to the next: use accumulate=1 and larger batches"
        )


def check_device(options: TrainingOptions, device: torch.device) -> None:
    """Refuse options that ``device`` does not support."""
    refuse_elsewhere(options.link, device.type)
    if options.verify_wire:
        refuse_unverified(options.link, device.type)
    if options.cuda_graphs and not has_graphs(device):
        raise ValueError(f"CudaGraphs() needs CUDA, not device {str(device)!r}: leave it out")


def warn_of_waits(options: TrainingOptions, plan: Plan, shares: bool) -> None:
    """Warn if forwards wait for updates, and these for other stages. ``shares``: if stages share weights."""
    if plan.weights in ("stash", "predicted") and plan.stages > 1 and (options.needs_norm or shares):
        _log.warning(
            "weights=%r with %s: a stage's next forward waits for the first stage's backward; "
            "weights='vertical-sync' does not wait",
            plan.weights,
            "the norm of all gradients" if options.needs_norm else "parameters that stages share",
        )
    is_limited = options.clip_grad_norm is not None and options.clip_grad_norm < math.inf
    if is_limited and plan.shares > 1 and (plan.spread or plan.isolate):
        _log.warning(
            "clip_grad_norm limits the gradient of each pipeline's share of a batch, as pipelines with workers of "
            "their own do not wait for each other: it is larger than the batch's, so the limit clips more than on "
            "one device"
        )


def checked_optimizer(made: Any) -> torch.optim.Optimizer:
    """Return ``made``, which the caller's function returned; refuse optimizers that a Pipeline cannot use."""
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "optimizer must return a torch.optim.Optimizer, or a list of them for different parameters, not "
            f"{_kind(made)}"
        )
    # the class's own: a schedule replaces the object's, and its signature has self
    if _required(type(made).step.__get__(made)):
        raise TypeError(
            f"{type(made).__name__} evaluates the loss again in each step (step needs a closure), which a pipeline "
            "cannot: use an optimizer whose step() only uses existing gradients"
        )
    return made


def check_modes(made: Sequence[Any], *, alone: bool, corrected: bool, has_ema: bool) -> None:
    """Refuse options that schedule-free optimizers do not support: these have other weights for evaluation.

    Args:
        made: the schedule-free optimizers of a stage.
        alone: whether there is one pipeline, so that nothing else changes the weights.
        corrected: whether the plan corrects late gradients.
        has_ema: whether an average of the weights is kept.
    """
    if not made:
        return
    name = type(made[0]).__name__
    for wrong, what, way_out in (
        (
            not alone,
            "averaging would mix them with the weights that each pipeline trains on",
            "use pipelines=1",
        ),
        (
            corrected,
            "a correction of its steps would change one of the two alone",
            "leave the plan's correction out",
        ),
        (has_ema, "it averages the weights itself", "leave MovingAverage out"),
    ):
        if wrong:
            raise ValueError(
                f"{name} keeps other weights for evaluation than for training (its train() and eval() swap them), and "
                f"{what}: {way_out}, or use an optimizer without such modes"
            )


def check_dense(made: Sequence[Any], *, alone: bool) -> None:
    """Refuse an optimizer for sparse gradients if pipelines average theirs, which makes them dense."""
    if not alone and any(isinstance(one, torch.optim.SparseAdam) for one in made):
        raise ValueError(
            "SparseAdam takes sparse gradients alone, and those of several pipelines are averaged as dense ones: use "
            "pipelines=1, or Adam, SGD or Adagrad for the embedding"
        )


def checked_schedule(made: Any) -> Any:
    """Return ``made``, which the caller's function returned; refuse a schedule whose step needs arguments."""
    if not callable(getattr(made, "step", None)):
        raise TypeError(
            f"lr_scheduler must return something with a method step, not {_kind(made)}; for several schedules return "
            "a torch.optim.lr_scheduler.ChainedScheduler"
        )
    if isinstance(made, ReduceLROnPlateau) or _required(made.step):
        raise TypeError(
            f"{type(made).__name__}.step needs a metric, which a batch does not have: leave lr_scheduler out, make one "
            "for each of pipeline.optimizers, and step these with what evaluate() returns"
        )
    return made


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def _required(method: Any) -> bool:
    """Whether a method has required arguments."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # it has no signature
        return False
    ones = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in ones and p.default is inspect.Parameter.empty for p in parameters)


def _an(value: Any) -> str:
    kind = type(value).__name__
    return f"{value!r}" if isinstance(value, str | int | float) else f"a {kind}"


def _kind(value: Any) -> str:
    return (
        f"{type(value).__name__} of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__
    )
