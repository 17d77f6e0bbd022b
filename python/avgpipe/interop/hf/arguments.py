"""Conversion of transformers' TrainingArguments to options of a pipeline, and refusal of those without one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from avgpipe.options import Compile, Precision
from avgpipe.runtime.extension import Extension

# untyped on purpose: types would be checked against whichever release is installed
_optimization: Any = importlib.import_module("transformers.optimization")

# Alternatives to arguments that must not be set.
_REFUSED: Mapping[str, str] = {
    "fsdp": "stages already divide the weights: leave it out",
    "deepspeed": "stages already divide the weights: leave it out",
    "parallelism_config": "the plan defines how ranks work together: leave it out",
    "activation_checkpointing": "use Plan(recompute='always')",
    "gradient_checkpointing": "use Plan(recompute='always')",
    "auto_find_batch_size": "raise the plan's micro_batches, which reduces memory for the same batch",
    "fp16_full_eval": "evaluation is in the dtype of the weights: leave it out",
    "bf16_full_eval": "evaluation is in the dtype of the weights: leave it out",
    "neftune_noise_alpha": "a hook on the model adds its noise, and stages hold copies of the model: leave it out",
    "use_liger_kernel": "it makes the loss inside the model: leave it out",
}
_NEEDS_METRIC = ("reduce_lr_on_plateau", "greedy")


def check_arguments(args: Any) -> None:
    """Raise ValueError for arguments that a pipeline cannot follow."""
    for name, way_out in _REFUSED.items():
        if value := getattr(args, name, None):
            raise ValueError(f"TrainingArguments({name}={value!r}) cannot train stages: {way_out}")
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if kind in _NEEDS_METRIC:
        raise ValueError(
            f"TrainingArguments(lr_scheduler_type={kind!r}) needs metrics, and stages step their schedules after "
            "every update: use another schedule, such as 'cosine'"
        )
    if args.label_names not in (None, ["labels"]):
        raise ValueError(
            f"TrainingArguments(label_names={args.label_names!r}): a pipeline's batches have their targets as 'labels'"
        )


def pipeline_options_of(args: Any) -> dict[str, Any]:
    """Return the keyword arguments of a Pipeline that correspond to ``args``."""
    options: dict[str, Any] = {
        "device": "cpu" if args.device.type == "cpu" else args.device,
        "seed": args.seed,
        "timeout_s": args.ddp_timeout,
        "clip_grad_norm": args.max_grad_norm if args.max_grad_norm > 0 else None,
        "accumulate": args.gradient_accumulation_steps,
    }
    extensions: list[Extension] = []
    if args.bf16 or args.fp16:
        extensions.append(Precision(autocast=torch.bfloat16 if args.bf16 else torch.float16))
    if args.torch_compile:
        asked = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
        extensions.append(Compile(**{name: value for name, value in asked.items() if value is not None}))
    return {**options, "extensions": extensions}


def scheduler_of(args: Any, steps: int) -> Callable[[torch.optim.Optimizer], Any]:
    """Return a function that makes the learning-rate schedule of a stage's optimizer, for ``steps`` updates."""
    return partial(
        _optimization.get_scheduler,
        args.lr_scheduler_type,
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
