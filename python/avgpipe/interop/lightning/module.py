"""A LightningModule that owns a Pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from avgpipe.errors import library
from avgpipe.interop.stepwise import check_plan
from avgpipe.model.batch import pair, plain
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.runtime.feed import BatchResult

# untyped on purpose: types would be checked against whichever release is installed
_lightning: Any = library("lightning.pytorch", "avgpipe.interop.lightning", "lightning")


class PipelineModule(_lightning.LightningModule):  # type: ignore[misc]  # as its base is untyped here
    """A LightningModule whose model is trained as pipelines of stages.

    A subclass has ``configure_optimizers``, as usual. It is called for each stage of the model, and there
    ``self.parameters()`` and ``self.named_parameters()`` are that stage's own. Learning-rate schedules must
    have the interval "step".

    ``training_step`` trains on a batch, logs "train_loss", and returns the loss; ``validation_step`` and
    ``test_step`` log "val_loss" and "test_loss"; ``predict_step`` returns the model's output. Each may be
    overridden and use ``self.pipeline``. Every update ends before the next begins, so between batches
    Lightning gets exactly the weights of ``trainer.global_step`` updates.

    Use ``clip_grad_norm=`` to clip gradients, and
    ``extensions=[avgpipe.Precision(autocast=...)]`` for 16 bits, not the Trainer's arguments.

    Args:
        model: See :class:`avgpipe.Pipeline`. ``self.model`` has the trained weights when they are saved and
            after training; meanwhile ``state_dict()`` returns older ones.
        plan: Cut, schedule and averaging, with a schedule that flushes. Several pipelines share each batch.
        loss_fn: See :class:`avgpipe.Pipeline`.
        pipeline_options: Further arguments of :class:`avgpipe.Pipeline`, such as ``seed`` or
            ``clip_grad_norm``.
    """

    def __init__(self, model: nn.Module, plan: Plan, loss_fn: Any, **pipeline_options: Any) -> None:
        super().__init__()
        check_plan(plan)
        if "accumulate" in pipeline_options:
            raise TypeError(
                "a PipelineModule makes an update of every batch: leave accumulate out, and use larger batches and "
                "more micro_batches in the plan"
            )
        self.automatic_optimization = False  # the pipeline makes the steps
        self.model, self.plan, self.loss_fn = model, plan, loss_fn
        self._pipeline_options = pipeline_options
        self._pipeline: Pipeline | None = None
        # The stage whose optimizer is being configured.
        self._stage: Sequence[tuple[str, nn.Parameter]] | None = None

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that trains, from the start of ``fit``, ``validate``, ``test`` or ``predict`` to its end."""
        if self._pipeline is None:
            raise RuntimeError(
                "the pipeline exists while a Trainer runs: use lightning.Trainer(strategy=PipelineStrategy(), ...)"
            )
        return self._pipeline

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return parameters as ``nn.Module`` does; in ``configure_optimizers``, those of one stage."""
        if self._stage is None:
            return super().named_parameters(prefix, recurse, remove_duplicate)  # type: ignore[no-any-return]
        return iter([(f"{prefix}model.{name}", p) for name, p in self._stage])

    # ---- steps ---------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = self.train_on(batch)
        self._log("train_loss", result.loss, result.samples)
        return torch.tensor(result.loss)

    def train_on(self, batch: Any) -> BatchResult:
        """Make an update of a batch, a pair (inputs, targets) or a mapping with "labels", and return its result."""
        (result,) = self.pipeline.train([batch])
        self.optimizers().step()  # counts the step
        return result

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, "val_loss")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, "test_loss")

    def _evaluate(self, batch: Any, name: str) -> None:
        with torch.inference_mode(False):
            found = self.pipeline.evaluate([_plain_tensors(batch)])
        self._log(name, found.loss, found.samples)

    def _log(self, name: str, loss: float, samples: int) -> None:
        # "synchronised", as all ranks have the same value; otherwise Lightning would warn
        self.log(name, loss, prog_bar=True, batch_size=samples, sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the output for a batch as in training, or for inputs only."""
        try:
            inputs, _ = pair(batch)
        except TypeError:
            inputs = plain(batch)
        with torch.inference_mode(False):
            return self.pipeline.predict(_plain_tensors(inputs))

    # ---- for the strategy ----------------------------------------------------------------------------------------

    def open_pipeline(self, device: torch.device, trains: bool) -> Pipeline:
        """Make the pipeline of ``self.model``. ``trains``: whether it needs optimizers."""
        configured = Configured(self._ask if trains else _resting)
        self._pipeline = Pipeline(
            self.model,
            self.plan,
            loss_fn=self.loss_fn,
            **{
                "device": device,
                "optimizer": configured.optimizer,
                "lr_scheduler": configured.lr_scheduler,
                **self._pipeline_options,
            },
        )
        return self._pipeline

    def _ask(self, named_params: Any) -> Any:
        self._stage = named_params
        try:
            return self.configure_optimizers()
        finally:
            self._stage = None

    def take_weights(self) -> None:
        """Give ``self.model`` the trained weights, on every rank; all call it."""
        self.model.load_state_dict(self.pipeline.state_dict())

    def close_pipeline(self) -> None:
        """Close the pipeline, if it is open."""
        if self._pipeline is not None:
            self._pipeline.close()
        self._pipeline = None


def _plain_tensors(batch: Any) -> Any:
    """Copy tensors of inference mode, which Lightning evaluates in; a pipeline, which also trains, refuses them."""
    return tree_map_only(torch.Tensor, lambda t: t.clone() if t.is_inference() else t, batch)


def _resting(named_params: Any) -> torch.optim.Optimizer:
    """Make an optimizer that is never stepped."""
    return torch.optim.SGD(named_params, lr=0.0)


# ---- configured optimizers -------------------------------------------------------------------------------------------


_FORMS = (
    "an optimizer, a list of optimizers, two lists of optimizers and schedules, or a dict with 'optimizer' and "
    "'lr_scheduler'"
)


class Configured:
    """Optimizers and schedules of stages, made by one function, for a Pipeline that requests one after the other.

    Args:
        configure: Maps a stage's named parameters to the result of ``configure_optimizers`` for them.
    """

    def __init__(self, configure: Callable[[Sequence[tuple[str, torch.Tensor]]], Any]) -> None:
        self._configure = configure
        self._schedules: dict[int, Any] = {}  # by the first parameter of their optimizer

    def optimizer(self, named_params: Sequence[tuple[str, torch.Tensor]]) -> list[torch.optim.Optimizer]:
        """Return a stage's optimizers."""
        pairs = _pairs(self._configure(named_params))
        own = {id(p) for _, p in named_params}
        for optimizer, schedule in pairs:
            if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
                raise ValueError(
                    "configure_optimizers gave an optimizer other parameters than its stage's: take them from "
                    "self.parameters() or self.named_parameters(), not from self.model"
                )
            if schedule is not None:
                self._schedules[_first(optimizer)] = _of_steps(schedule)
        return [optimizer for optimizer, _ in pairs]

    def lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the schedule that was made with an optimizer."""
        return self._schedules.pop(_first(optimizer), None) or _Constant()


class _Constant:
    """A schedule that keeps learning rates constant."""

    def step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _first(optimizer: torch.optim.Optimizer) -> int:
    return id(next(p for group in optimizer.param_groups for p in group["params"]))


def _pairs(found: Any) -> list[tuple[torch.optim.Optimizer, Any]]:
    """Return each optimizer with its schedule or None."""
    if isinstance(found, torch.optim.Optimizer):
        return [(found, None)]
    if isinstance(found, Mapping) and isinstance(found.get("optimizer"), torch.optim.Optimizer):
        return [(found["optimizer"], found.get("lr_scheduler"))]
    if isinstance(found, list | tuple) and found:
        if len(found) == 2 and all(isinstance(part, list | tuple) for part in found):
            optimizers, schedules = found
            if len(schedules) in (0, len(optimizers)):
                return [*zip(optimizers, schedules or [None] * len(optimizers))]
        elif all(isinstance(one, torch.optim.Optimizer | Mapping) for one in found):
            return [pair for one in found for pair in _pairs(one)]
    raise TypeError(f"configure_optimizers must return {_FORMS}, not {type(found).__name__}")


def _of_steps(schedule: Any) -> Any:
    """Return a schedule, which must have a step after every batch."""
    settings = schedule if isinstance(schedule, Mapping) else {"scheduler": schedule}
    interval, frequency = settings.get("interval", "epoch"), settings.get("frequency", 1)
    if interval != "step" or frequency != 1:
        raise ValueError(
            f"a schedule with interval {interval!r} and frequency {frequency} is not possible, as stages step theirs "
            'after every batch: return {"scheduler": schedule, "interval": "step"}'
        )
    return settings["scheduler"]
