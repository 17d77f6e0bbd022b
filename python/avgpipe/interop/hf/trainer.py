"""A transformers Trainer whose steps are made by a Pipeline."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from avgpipe.errors import library
from avgpipe.interop.hf.loss import TrainerLoss, counted, counted_behind_first, trainer_loss
from avgpipe.interop.stepwise import StageOptimizers, check_plan, resume
from avgpipe.options import Compile, Precision
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.runtime.feed import BatchResult
from avgpipe.runtime.options import Extension

# untyped on purpose: types would be checked against whichever release is installed
_transformers: Any = importlib.import_module("transformers")
_accelerate: Any = library("accelerate.utils", "avgpipe.interop.hf", "transformers accelerate")

_LABELS = "labels"
_STATE = "pipeline"  # folder in a checkpoint for the state that the model's own files lack


class PipelineTrainer(_transformers.Trainer):  # type: ignore[misc]  # as its base is untyped here
    """transformers' Trainer, whose model is trained as pipelines of stages.

    It takes the arguments of ``transformers.Trainer``, all but ``model`` and ``args`` by name, and trains to
    the same losses and weights. Forward, backward, clipping, the optimizer's step and the schedule's run
    inside the stages, so callbacks such as ``on_pre_optimizer_step`` run after the step. Every update ends
    before the next begins: evaluation, callbacks and checkpoints get exactly the weights of
    ``state.global_step`` updates.

    Every rank has the whole of each batch and the same data loader. From then on accelerate treats each rank
    as the only process, except that only rank 0 logs and saves. ``model`` holds the trained weights, on every
    rank, after :meth:`train` and each save.

    Args:
        model: See Trainer; a PeftModel trains and saves its adapters only. It stays on its device: stages are
            copies on the devices of the ranks. A model on the meta device needs ``avgpipe.WeightsFrom`` among
            the extensions in ``pipeline_options``, and gets values when it is saved and at the end.
        args: See Trainer. Arguments that a pipeline cannot follow are refused.
        plan: Cut, schedule and averaging, with a schedule that flushes. Several pipelines share each batch.
        optimizers: Two functions as for :class:`avgpipe.Pipeline`, ``optimizer(params)`` or
            ``optimizer(named_params)``, and ``lr_scheduler(optimizer)``; None: those of ``args``.
        pipeline_options: Further arguments of :class:`avgpipe.Pipeline`, such as ``extensions``. They
            override those that follow from ``args``, an extension those of its class.
        compute_loss_func (Callable): See Trainer. ``num_items_in_batch`` is 1, and the result is divided by the number
            of labels of the batch that count; a function that does not divide by it is treated as a mean over
            samples.

    Raises:
        ValueError: For arguments that a pipeline cannot follow, and for a model whose loss is unknown.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        plan: Plan,
        optimizers: tuple[Callable[..., Any] | None, Callable[..., Any] | None] = (None, None),
        pipeline_options: Mapping[str, Any] | None = None,
        **trainer_arguments: Any,
    ) -> None:
        check_plan(plan)
        _check_functions(optimizers)
        args = args or _transformers.TrainingArguments(output_dir="tmp_trainer")
        check_arguments(args)
        _work_alone(args)
        self.plan = plan
        self._functions, self._pipeline_options = optimizers, dict(pipeline_options or {})
        self._pipeline: Pipeline | None = None
        self._loss: TrainerLoss | None = None
        self._parts: list[Any] = []  # batches collected for the next update
        self._result: BatchResult | None = None
        self._all_have_rates = True  # whether no rank has frozen parameters only
        super().__init__(model, args, **trainer_arguments)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                "accelerate was started with FSDP or DeepSpeed, but stages already divide the weights: run accelerate "
                "config without them"
            )
        # Stages move their inputs to their devices, and the model itself is never called.
        self.accelerator.device_placement = False
        self.accelerator.prepare_model = _as_it_is

    # ---- the pipeline --------------------------------------------------------------------------------------------

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that trains; all ranks make it together at first use, and again in every :meth:`train`."""
        return self._pipeline or self._open(1)

    def close(self) -> None:
        """Close the pipeline; weights that ``model`` does not have are lost."""
        if self._pipeline is not None:
            self._pipeline.close()
        self._pipeline = None

    def end(self) -> None:
        self.close()
        super().end()

    def _open(self, steps: int) -> Pipeline:
        """Make a pipeline that trains ``model`` for ``steps`` updates."""
        self.close()
        # the Trainer's own rule, so that losses are divided by the same
        shifts = getattr(self, "_loss_shifts_labels", None)
        count = None if shifts is None else counted_behind_first if shifts else counted
        self._loss = trainer_loss(self.model, self.compute_loss_func, self.label_smoother, count)
        optimizer, lr_scheduler = self._functions
        options: dict[str, Any] = {
            **pipeline_options_of(self.args),
            "optimizer": optimizer or self._optimizer_function(),
            "lr_scheduler": lr_scheduler or scheduler_of(self.args, steps),
            **self._pipeline_options,
        }
        options["extensions"] = self._extensions()
        self._pipeline = Pipeline(self.model, self.plan, loss_fn=self._loss, **options)
        return self._pipeline

    def _extensions(self) -> list[Extension]:
        own = list(self._pipeline_options.get("extensions", ()))
        kinds = tuple(map(type, own))
        return [*own, *(e for e in pipeline_options_of(self.args)["extensions"] if type(e) not in kinds)]

    def _optimizer_function(self) -> Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer]:
        """Return a function that makes a stage's optimizer from ``args``, with the Trainer's rule for weight decay."""
        kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
            self.args, self.model
        )
        whole = {"params", "model", "optimizer_dict"} & options.keys()
        if whole or not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise ValueError(
                f"optim={str(getattr(self.args.optim, 'value', self.args.optim))!r} needs the whole model, and a stage "
                "has only a part of it: use another one, or optimizers=(function, None), whose function gets a "
                "stage's named_params"
            )
        decaying = set(self.get_decay_parameter_names(self.model))
        decay = self.args.weight_decay

        def optimizer(named_params: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
            groups = [
                {"params": [p for name, p in named_params if name in decaying], "weight_decay": decay},
                {"params": [p for name, p in named_params if name not in decaying], "weight_decay": 0.0},
            ]
            made: torch.optim.Optimizer = kind(groups, **options)
            return made

        return optimizer

    def _take_weights(self) -> None:
        """Give ``model`` the trained weights, on every rank."""
        if self._pipeline is None:
            return
        on_meta = any(p.is_meta for p in self.model.parameters())
        self.model.load_state_dict(self._pipeline.state_dict(), assign=on_meta)
        if on_meta and hasattr(self.model, "tie_weights"):
            self.model.tie_weights()

    # ---- training ------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, see Trainer; ``model`` has the weights afterwards. A second call begins with new optimizers."""
        output = super().train(*args, **kwargs)
        self._take_weights()
        return output

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        pipeline = self._open(max_steps)
        self._all_have_rates = all(pipeline.world.gather(bool(pipeline.optimizers)))
        if resume_from_checkpoint is not None:
            resume(pipeline, Path(resume_from_checkpoint, _STATE))
        self.optimizer = StageOptimizers(pipeline.optimizers)
        self.lr_scheduler = _StageSchedules(self.optimizer)
        self.model_wrapped = self.model
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def _wrap_model(self, model: Any, *_: Any, **__: Any) -> Any:
        return model

    def _move_model_to_device(self, *_: Any) -> None:
        pass

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self._parts = []  # drop leftover batches, too few for an update, of a loader without a length
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Train on the collected batches at the last one of an update; return their loss, and 0 before."""
        self._parts.append(inputs)
        loss = 0.0
        if self.accelerator.sync_gradients:
            for result in self.pipeline.train(self._parts):
                self._result, loss = result, result.loss
        return torch.tensor(loss, device=self.args.device)

    def _clip_grad_norm(self, model: Any) -> float | None:
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float | None:
        return None if self._result is None else self._result.grad_norm

    def _get_learning_rate(self) -> float | None:
        if self._result is None or self._all_have_rates:
            return None if self._result is None else self._result.lr
        rates: list[float | None] = self.pipeline.world.gather(self._result.lr)
        return next((rate for rate in rates if rate is not None), None)

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def prediction_step(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Return loss, logits and labels of a batch, on every rank."""
        labels = inputs.get(_LABELS)
        if prediction_loss_only and labels is not None:
            return torch.tensor(self.pipeline.evaluate([inputs]).loss, device=self.args.device), None, None
        output = self.pipeline.predict({name: value for name, value in inputs.items() if name != _LABELS})
        loss: torch.Tensor | None = None
        if labels is not None and self._loss is not None:
            labels = labels.to(self.args.device)
            loss = self._loss.mean(output, labels).detach()
        if prediction_loss_only:
            return loss, None, None
        if isinstance(output, Mapping):
            config = getattr(self.model, "config", None)
            ignored = ignore_keys or getattr(config, "keys_to_ignore_at_inference", [])
            kept = tuple(value for name, value in output.items() if name not in ignored)
            output = kept[0] if len(kept) == 1 else kept
        return loss, output, labels

    # ---- saving --------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or a PeftModel's adapters, as ``save_pretrained`` does; all ranks call it."""
        self._take_weights()
        super().save_model(output_dir, _internal_call)
        if self._pipeline is not None:
            self._pipeline.world.barrier()  # after it, every rank finds the files

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.pipeline.save(Path(output_dir, _STATE))

    def _save_scaler(self, output_dir: str) -> None:
        pass  # the pipeline's checkpoint has the loss scale

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # all ranks draw the same numbers, so one file is enough
            super()._save_rng_state(output_dir)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.pipeline.load_state_dict(self.model.state_dict())


class _StageSchedules:
    """Placeholder for the learning-rate schedule: stages step their own."""

    def __init__(self, optimizer: StageOptimizers) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        pass

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]


def _as_it_is(model: Any, *_: Any, **__: Any) -> Any:
    return model


def _check_functions(optimizers: Any) -> None:
    if not (
        isinstance(optimizers, tuple | list)
        and len(optimizers) == 2
        and all(o is None or callable(o) for o in optimizers)
    ):
        raise TypeError(
            "optimizers must be two functions, optimizer(named_params) and lr_scheduler(optimizer), or None for those "
            "of args: stages have their own parameters, which an optimizer of the model's does not step"
        )


def _work_alone(args: Any) -> None:
    """Keep accelerate from dividing batches over the ranks and from wrapping the model: ranks have whole batches."""
    state = args.distributed_state  # made by the arguments; there is one in a process
    state.distributed_type, state.num_processes = _accelerate.DistributedType.NO, 1
    args._n_gpu = min(args.n_gpu, 1)  # nor from dividing them over the GPUs of a process


# ---- arguments -------------------------------------------------------------------------------------------------------


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
        _transformers.get_scheduler,
        args.lr_scheduler_type,
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
