"""``avgpipe.check`` trains some batches on one device without a pipeline and by a plan, and compares the results.

A plan may differ from one device by design: late averages, gradients of older weights, BatchNorm over micro-batches. So
two plans are trained. The first one is the plan without the parts that change the result. In float64 its results must
equal those of one device. The second one is the plan itself, in the model's own dtype: the report gives its losses, and
the reasons why they may differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from avgpipe.device import generators_of
from avgpipe.errors import PipelineError, check_count, reason
from avgpipe.model.batch import LossFn, pair, to_device
from avgpipe.model.compiled import copied
from avgpipe.model.context import (
    CallerGenerators,
    CallerModes,
    Modes,
    callers_generators,
    is_evaluated,
    seed_generators,
    set_generators,
)
from avgpipe.model.example import device_of
from avgpipe.model.layers import layers_of
from avgpipe.model.model import named_tensors
from avgpipe.model.proof import distance, size_of
from avgpipe.options import Precision, Ranks, precision_of
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.runtime.audit import whole_of
from avgpipe.runtime.loss import loss_of
from avgpipe.runtime.optimizers import maker_of, schedule_of
from avgpipe.runtime.options import Extension, OptimizerFn, SchedulerFn

_EXACT = 1e-8  # tolerance relative to the largest compared number, in float64, after all batches
_ROUNDED = 1e-3  # the same if float64 is not possible
_ONE_PIPELINE = {"pipelines": 1, "rule": None, "alpha": None, "staleness": 1, "period": 1}


@dataclass
class Trained:
    """The results of a training run.

    Attributes:
        losses: Losses of the batches.
        metrics: Metrics of the batches, by name.
        states: Weights and buffers after the first batch, and after the last one.
        draws: Whether the model drew random numbers from torch's generators; False for a pipeline.
    """

    losses: list[float] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    draws: bool = False


@dataclass(frozen=True)
class ComparedLine:
    """One comparison. ``apart``: the largest difference over the largest number; ``where``: the tensor that has it."""

    what: str
    apart: float
    where: str


@dataclass(frozen=True)
class Checked:
    """The result of :func:`check`.

    Attributes:
        plan: The given plan.
        strict: The plan without the parts that change the result; it must equal one device.
        plain: Losses of one device, in the model's own dtype.
        planned: Losses of the plan, likewise.
        lines: The comparisons of the strict plan with one device.
        tolerance: The largest ``apart`` that rounding explains.
        reasons: Why the plan itself may differ from one device.
        notes: Changes to both runs that make them comparable.
    """

    plan: Plan
    strict: Plan
    plain: Sequence[float]
    planned: Sequence[float]
    lines: Sequence[ComparedLine]
    tolerance: float
    reasons: Sequence[str]
    notes: Sequence[str]

    @property
    def is_equal(self) -> bool:
        """Return whether stages, micro-batches and pipelines train as one device does, except for the ``reasons``."""
        return all(line.apart <= self.tolerance for line in self.lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "equal": self.is_equal,
            "plan": json.loads(self.plan.to_json()),
            "strict": json.loads(self.strict.to_json()),
            "losses": {"one device": list(self.plain), "plan": list(self.planned)},
            "compared": [vars(line) for line in self.lines],
            "tolerance": self.tolerance,
            "reasons": list(self.reasons),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        width = max(len(line.what) for line in self.lines)
        dtype = "float64" if self.tolerance == _EXACT else "the model's dtype"
        verdict = "trains as one device does" if self.is_equal else "does NOT train as one device does"
        last = self.plain[-1], self.planned[-1]
        return "\n".join(
            [
                f"{len(self.plain)} batches in {dtype}: {_words(self.strict)} {verdict}",
                *(f"  {line.what:{width}}  {line.apart:7.1e}  {self._judged(line)}" for line in self.lines),
                f"the plan itself: loss {last[1]:.6g} at the end, one device {last[0]:.6g}",
                *(f"  differs by design: {reason}" for reason in self.reasons),
                *(f"note: {note}" for note in self.notes),
            ]
        )

    def _judged(self, line: ComparedLine) -> str:
        return "equal" if line.apart <= self.tolerance else f"DIFFERS, most in {line.where}"


def _words(plan: Plan) -> str:
    parts = f"{plan.stages} stages, {plan.pipelines} pipelines, {plan.micro_batches} micro-batches, {plan.schedule}"
    return f"{parts}, recompute {plan.recompute}" if plan.recompute != "never" else parts


def check(
    model: nn.Module | Sequence[nn.Module],
    plan: Plan,
    *,
    loss_fn: LossFn,
    optimizer: OptimizerFn,
    loader: Iterable[Any],
    batches: int = 20,
    lr_scheduler: SchedulerFn | None = None,
    clip_grad_norm: float | None = None,
    **options: Any,
) -> Checked:
    """Train some batches on one device without a pipeline, and by a plan, and compare the results.

    Run it before a long job. Without torchrun this process runs all stages; with a rank for each worker of the plan,
    every rank must call it. It trains copies; the model, the batches and the random generators stay as they are.

    Args:
        model: See ``Pipeline``.
        plan: See ``Pipeline``.
        loss_fn: See ``Pipeline``.
        optimizer: See ``Pipeline``.
        loader: Batches as ``Pipeline.train`` takes them, the same on all ranks.
        batches: The most batches to train on.
        lr_scheduler: See ``Pipeline``.
        clip_grad_norm: See ``Pipeline``.
        options: Further options of ``Pipeline``.

    Returns:
        The comparisons; ``print`` shows them as a table, and ``is_equal`` is the verdict.

    Raises:
        ValueError: For a loader without batches, and any error of ``Pipeline``.
    """
    check_count("batches", batches)
    if options.get("accumulate", 1) != 1:
        raise ValueError("check() compares batch by batch: leave accumulate out")
    given = [pair(batch) for batch in islice(loader, batches)]
    if not given:
        raise ValueError("check() needs at least one batch: the loader is empty")
    both = _Both(model, loss_fn, optimizer, lr_scheduler, clip_grad_norm, options, given)
    both, notes = both.without_dropout()
    strict, reasons = _strict(plan, both)
    plain, planned = both.plainly(), both.by(plan)
    try:
        wide = both.wide()
        expected, found, tolerance = wide.expected(strict, plain.draws), wide.by(strict), _EXACT
    except (RuntimeError, TypeError, PipelineError) as error:  # of the caller's code, or torch's
        notes = [*notes, f"this cannot be compared in float64: {reason(error)}"]
        exact = both.exactly()
        expected, found, tolerance = exact.expected(strict, plain.draws), exact.by(strict), _ROUNDED
    if plain.draws:
        notes = [
            *notes,
            "layers draw random numbers: one stage with the same micro-batches replaces one device",
        ]
    lines = _compared(expected, found)
    return Checked(plan, strict, plain.losses, planned.losses, lines, tolerance, reasons, notes)


# ---- differences by design -------------------------------------------------------------------------------------------


def _strict(plan: Plan, both: _Both) -> tuple[Plan, list[str]]:
    """Return the plan without the parts that change the result, and the reasons why they do."""
    reasons, changes = list[str](), dict[str, Any]()
    if plan.pipelines > 1 and (plan.batch, plan.staleness, plan.rule) != ("global", 0, "mean-gradient"):
        reasons.append(
            f"{plan.pipelines} pipelines are averaged by the rule {plan.rule} with staleness {plan.staleness}, batch "
            f"{plan.batch!r} and period {plan.period}"
        )
        changes |= {"batch": "global", "staleness": 0, "rule": "mean-gradient", "alpha": None, "period": 1}
        changes |= {"micro_batches": max(plan.micro_batches, plan.pipelines)}
    if plan.weights != "flush":
        reasons.append(
            f"gradients are of weights up to {max(plan.delays)} updates old (schedule {plan.schedule!r})"
        )
        changes |= {"schedule": "1f1b", "weights": None, "correction": None, "advance": None}
    if plan.micro_batches > 1 and both.normalises:
        reasons.append(
            f"BatchNorm normalises by the statistics of each of {plan.micro_batches} micro-batches"
        )
        changes |= {"micro_batches": 1, "replication": None, "spread": False, "isolate": False}
        changes |= {**_ONE_PIPELINE, "batch": "global"}
    if both.precision.wire_dtype is not None:
        reasons.append("activations and gradients are sent in 16 bits (wire_dtype)")
    if both.clip is not None and plan.shares > 1 and (plan.spread or plan.isolate):
        reasons.append("clip_grad_norm limits the gradient of each pipeline's share of a batch")
        changes |= _ONE_PIPELINE
    return (replace(plan, system="avgpipe", warmup_rounds=0, **changes) if changes else plan), reasons


# ---- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Both:
    """Trains copies of a model in both ways. ``options``: further options of a Pipeline."""

    model: Any
    loss_fn: Any
    optimizer: OptimizerFn
    lr_scheduler: SchedulerFn | None
    clip: float | None
    options: Mapping[str, Any]
    given: Sequence[tuple[Any, Any]]

    @property
    def normalises(self) -> bool:
        """Return whether a layer normalises by the statistics of all its samples."""
        return any(isinstance(m, _BatchNorm) and m.training for m in _modules_of(self.model))

    def without_dropout(self) -> tuple[_Both, list[str]]:
        """Return the same with layers that draw no random numbers, and a note about it."""
        model = _copy(self.model)
        drops = [m for m in _modules_of(model) if isinstance(m, _DropoutNd) and m.p > 0]
        for module in drops:
            module.p = 0.0
        note = (
            "dropout is off on both sides, as micro-batches draw different random numbers than whole batches"
        )
        return replace(self, model=model), [note] * bool(drops)

    def exactly(self) -> _Both:
        """Return the same without options that make numbers less exact."""
        return self._with(lambda e: isinstance(e, Precision))

    def _with(self, leaves_out: Callable[[Extension], bool], *more: Extension) -> _Both:
        """Return the same with other extensions."""
        kept = [e for e in self.extensions if not leaves_out(e)]
        return replace(self, options={**self.options, "extensions": [*kept, *more]})

    @property
    def extensions(self) -> Sequence[Extension]:
        given: Sequence[Extension] = self.options.get("extensions", ())
        return given

    @property
    def precision(self) -> Precision:
        return precision_of(self.extensions)

    def wide(self) -> _Both:
        """Return the same in float64."""
        model, loss_fn = _copy(self.model), self.loss_fn
        for module in [model] if isinstance(model, nn.Module) else model:
            module.double()
        if isinstance(loss_fn, nn.Module):
            loss_fn = _copy(loss_fn).double()
        given = [pytree.tree_map_only(torch.Tensor, _wide, batch) for batch in self.given]
        return replace(self.exactly(), model=model, loss_fn=loss_fn, given=given)

    def by(self, plan: Plan) -> Trained:
        """Train by a plan."""
        training = Trained()
        with Pipeline(
            _copy(self.model),
            plan,
            loss_fn=self.loss_fn,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            clip_grad_norm=self.clip,
            **self.options,
        ) as pipeline:
            for given in (self.given[:1], self.given[1:]):
                for result in pipeline.train(given):
                    training.losses.append(result.loss)
                    training.metrics.append(result.metrics)
                training.states.append(pipeline.state_dict())
        return training

    def expected(self, plan: Plan, draws: bool) -> Trained:
        """Train as a plan without such parts must. ``draws``: layers draw per micro-batch, as one stage does."""
        return self._alone().by(Plan(micro_batches=plan.micro_batches)) if draws else self.plainly()

    def _alone(self) -> _Both:
        """Return the same for pipelines of this process alone, without other ranks."""
        if not dist.is_initialized():
            return self
        own = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        return self._with(lambda e: isinstance(e, Ranks), Ranks(group=own))

    def plainly(self) -> Trained:
        """Train without a pipeline."""
        given = _copy(self.model)
        model, call = whole_of(given, layers_of(given, self.options.get("example_inputs")))
        device, training = device_of(model), Trained()
        Modes(model, not is_evaluated([model])).train()
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = maker_of(self.optimizer, list(named))(list(named.values()))
        schedule = None if self.lr_scheduler is None else schedule_of(self.lr_scheduler, optimizer, optimizer)
        drawn = callers_generators()
        with CallerModes(), CallerGenerators(device):
            seed_generators(device, self.options.get("seed", 0))
            states = [generator.get_state() for generator in generators_of(device)]
            for inputs, targets in self.given:
                optimizer.zero_grad()
                self._learn(
                    partial(call, model, to_device(inputs, device)),
                    to_device(targets, device),
                    device,
                    training,
                )
                if self.clip is not None:
                    nn.utils.clip_grad_norm_(list(named.values()), self.clip)
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                if len(training.losses) in (1, len(self.given)):
                    training.states.append({name: t.clone() for name, t in named_tensors(model).items()})
            after = [generator.get_state() for generator in generators_of(device)]
            training.draws = not all(map(torch.equal, states, after))
        set_generators(drawn)
        return training

    def _learn(self, output: Callable[[], Any], target: Any, device: torch.device, training: Trained) -> None:
        autocast = self.precision.autocast
        with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
            loss = loss_of(self.loss_fn, output(), target)
        value = loss.value if loss.divisor is None else loss.value / loss.divisor
        torch.autograd.backward(value)
        divisor = 1.0 if loss.divisor is None else float(loss.divisor)
        training.losses.append(float(value.detach()))
        training.metrics.append({name: float(v) / divisor for name, v in (loss.metrics or {}).items()})


def _copy(model: Any) -> Any:
    return copied(model, {}) if isinstance(model, nn.Module) else list(copied(nn.ModuleList(model), {}))


def _modules_of(model: Any) -> Iterator[nn.Module]:
    return (model if isinstance(model, nn.Module) else nn.ModuleList(model)).modules()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


# ---- comparing -------------------------------------------------------------------------------------------------------


def _compared(expected: Trained, found: Trained) -> list[ComparedLine]:
    lines = [_line("losses", _numbered(expected.losses), _numbered(found.losses))]
    for name in dict.fromkeys(name for of_batch in expected.metrics for name in of_batch):
        mine, other = (_numbered([m.get(name, math.nan) for m in of.metrics]) for of in (expected, found))
        lines.append(_line(f"metric {name!r}", mine, other))
    for what, mine, other in zip(
        ("first", "last"), (expected.states[0], expected.states[-1]), (found.states[0], found.states[-1])
    ):
        lines.append(_line(f"weights and buffers after the {what} batch", mine, other))
    return lines


def _numbered(values: Sequence[float]) -> dict[str, torch.Tensor]:
    return {f"batch {n}": torch.tensor(value, dtype=torch.float64) for n, value in enumerate(values)}


def _line(what: str, expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> ComparedLine:
    if lost := sorted(expected.keys() ^ found.keys()):
        return ComparedLine(what, math.inf, f"{lost[0]} is on one side only")
    largest = max((size_of(t) for t in expected.values() if t.numel()), default=0.0)
    apart = {name: distance(t, found[name].to(t.device)) for name, t in expected.items() if t.numel()}
    where = max(apart, key=lambda name: apart[name], default="")
    return ComparedLine(what, apart[where] / max(largest, 1e-30) if where else 0.0, where)
