"""A batch in flight on a stage: its work, what forwards leave for backwards, and what is known of its loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import GradientEdge

from avgpipe.device import ReadyOnEvent
from avgpipe.elastic import Version
from avgpipe.errors import StageError
from avgpipe.runtime.batch import LossWeights
from avgpipe.runtime.context import Position
from avgpipe.runtime.loss import wide
from avgpipe.runtime.split_backward import Deferred


class Collector(Protocol):
    """What the last stage does with an evaluated batch."""

    def add(self, output: Any, target: Any, samples: int, given: Any) -> None:
        """See the output of a micro-batch. ``given``: the target as it came, which may still be on the host."""

    def result(self) -> Any:
        """Return what every rank gets."""


@dataclass
class Work:
    """A batch that a stage trains on, or evaluates.

    Attributes:
        micro_batches: how many the pipeline has of the batch; none where others have all.
        inputs: of micro-batches; they matter on the first stage.
        targets: of micro-batches; they and ``weights`` matter on the last stage.
        copied: inputs and targets, if they are on their way to a device.
        collector: takes an evaluation's outputs, on the last stage.
        draws: the place that the first micro-batch has for random numbers; None: as they are numbered here.
    """

    batch: int
    micro_batches: int
    inputs: Sequence[Any]
    targets: Sequence[Any]
    weights: LossWeights | None = None
    copied: ReadyOnEvent | None = None
    trains: bool = True
    collector: Collector | None = None
    draws: Position | None = None

    def place(self, pipeline: int, micro_batch: int) -> Position:
        """Return where a micro-batch of a ``pipeline`` stands in the run."""
        if self.draws is None:
            return Position(pipeline, self.batch, micro_batch)
        return self.draws._replace(micro_batch=self.draws.micro_batch + micro_batch)


class SavedForward(NamedTuple):
    """What a forward leaves for its backward.

    Not the outputs themselves: of those, autograd keeps what it needs.

    Attributes:
        inputs: inputs that want gradients.
        outputs: where the gradients of the outputs go in.
        grads: of the outputs, where this stage knows them, as the last one does.
        arrived: inputs that skipped stages, by arrival; see :class:`avgpipe.runtime.model.Skips`.
        departed: where the gradients of outputs that skip stages go in, in the order of departures.
    """

    inputs: list[torch.Tensor]
    outputs: list[GradientEdge]
    grads: list[torch.Tensor] | None = None
    arrived: Sequence[list[torch.Tensor]] = ()
    departed: Sequence[GradientEdge] = ()


class Metrics(NamedTuple):
    """What a loss function tells beside its losses: names, and values that are added up as the losses, float64 [n].

    ``parts``: of how many micro-batches they are sums.
    """

    names: tuple[str, ...]
    values: torch.Tensor
    parts: int = 1

    def plus(self, other: Metrics) -> Metrics:
        if self.names != other.names:
            raise StageError(
                f"loss_fn returns the metrics {', '.join(self.names)} for some micro-batches and "
                f"{', '.join(other.names)} for others: return the same ones, in the same order"
            )
        return Metrics(self.names, self.values + other.values, self.parts + other.parts)


@dataclass
class BatchState:
    """How far an in-flight batch is on one stage.

    Attributes:
        version: of the weights that the batch runs on.
        backwards_left: micro-batches whose backward has not run.
        computing_left: forwards and backwards, or parts of these, that have not run.
        losses: of micro-batches, with their factors.
        counts: what the losses are sums of, where the loss function says it.
        without_loss: micro-batches whose loss is the mean over nothing.
        loss_scale: what the losses' gradients are multiplied with until the update.
        part: what this replica of the last stage knows of the loss.
        outcome: of the whole batch, float64, known after the last backward: the loss; or, where gradients must be
            multiplied with something before anybody looks at them, three numbers: the loss, that factor, and what the
            loss weighs.
        metrics: of the micro-batches here that have been computed, then of the whole batch, as ``outcome`` is.
        grads: of parameters, while they wait for the update.
        norm: of the gradients of all stages, float64, where somebody asks for it.
        lr: the learning rate of the update.
        issued: the event that a device has done all steps, once they are issued.
    """

    work: Work
    version: Version
    backwards_left: int
    computing_left: int
    saved: dict[int, SavedForward] = field(default_factory=dict)
    deferred: dict[int, Deferred] = field(default_factory=dict)
    losses: list[tuple[torch.Tensor, float]] = field(default_factory=list)
    counts: list[torch.Tensor | float] = field(default_factory=list)
    without_loss: int = 0
    loss_scale: float = 1.0
    part: torch.Tensor | None = None
    outcome: torch.Tensor | None = None
    outcome_is_sent: bool = False
    metrics: Metrics | None = None
    grads: list[torch.Tensor | None] = field(default_factory=list)
    grads_are_scaled: bool = False
    norm: torch.Tensor | None = None
    lr: Any = None
    updated: bool = False
    issued: Any = None

    @property
    def has_ended(self) -> bool:
        """Whether all steps of the batch have been performed here."""
        if not self.work.trains:
            return self.computing_left == 0
        return self.updated and self.outcome is not None

    def add_metrics(self, given: Mapping[str, Any], factor: float) -> None:
        """Take in the metrics of a micro-batch whose loss has this factor."""
        device = self.losses[0][0].device
        values = torch.stack([wide(value, device) for value in given.values()]).mul_(factor)
        own = Metrics(tuple(given), values)
        self.metrics = own if self.metrics is None else self.metrics.plus(own)

    def sum_losses(self) -> torch.Tensor:
        """Return what this replica of the last stage adds to the loss: the loss, or sum and count."""
        if self.metrics is not None and self.metrics.parts < len(self.losses):
            raise StageError("loss_fn returns metrics for some micro-batches and none for others")
        device = self.losses[0][0].device if self.losses else None
        total = torch.zeros((), dtype=torch.float64, device=device)
        if self.without_loss and not self.losses:
            total.fill_(math.nan)
        for loss, factor in self.losses:
            total.add_(loss, alpha=factor)
        if not self.counts:
            return total
        if len(self.counts) < len(self.losses):
            raise StageError("loss_fn returns (sum, count) for some micro-batches and one number for others")
        count = torch.zeros_like(total)
        for of_one in self.counts:
            count.add_(of_one)
        return torch.stack((total, count))

    def set_outcome(self, part: torch.Tensor) -> None:
        """Take the sum of all replicas' parts of the loss."""
        assert self.work.weights is not None
        weight = self.work.weights.total
        if part.dim():
            total, count = part.unbind()
            if self.metrics is not None:
                self.metrics = self.metrics._replace(values=self.metrics.values / count)
            self.outcome = torch.stack((total / count, weight / (count * self.loss_scale), count))
        elif self.loss_scale != 1.0:
            rest = torch.tensor([1 / self.loss_scale, weight], dtype=part.dtype, device=part.device)
            self.outcome = torch.cat((part[None], rest))
        else:
            self.outcome = part

    def told(self) -> list[Any]:
        """Return what others learn of the outcome: 1 or 3 numbers, then the metrics and their names."""
        # Numbers by themselves, which no narrow wire rounds.
        numbers = self.outcome.unbind() if self.outcome is not None and self.outcome.dim() else [self.outcome]
        if self.metrics is None:
            return [*numbers]
        return [*numbers, *self.metrics.values.unbind(), *self.metrics.names]

    def learn(self, told: Sequence[Any]) -> None:
        """Take over what :meth:`told` gave elsewhere."""
        self.outcome, self.metrics = _parsed(told)


def _parsed(told: Sequence[Any]) -> tuple[Any, Metrics | None]:
    """Return outcome and metrics from what :meth:`BatchState.told` gave."""
    names = tuple(name for name in told if isinstance(name, str))
    end = len(told) - len(names)
    numbers, values = told[: end - len(names)], told[end - len(names) : end]
    outcome = numbers[0] if len(numbers) == 1 else torch.stack(list(numbers))
    return outcome, Metrics(names, torch.stack(list(values))) if names else None


class BatchEnd(NamedTuple):
    """How a batch has ended for a pipeline, as numbers of the host.

    Attributes:
        weight: of the loss, where its loss function says it.
        grad_norm: None where nobody asked for it.
        lr: None where there is no optimizer.
    """

    loss: float
    weight: float | None
    metrics: dict[str, float]
    grad_norm: float | None
    lr: float | None

    @classmethod
    def of(cls, states: Sequence[BatchState]) -> BatchEnd:
        """Read what is known of a batch that has ended on some stages here: all of them know the loss and the norm."""
        lr = next((state.lr for state in states if state.lr is not None), None)
        return cls._read(states[-1].outcome, states[-1].metrics, states[-1].norm, lr)

    @staticmethod
    def message(state: BatchState) -> list[Any]:
        """Return what a process learns that has no part in the batch."""
        assert state.outcome is not None
        lr = None if state.lr is None else wide(state.lr, state.outcome.device)
        return [state.norm, lr, *state.told()]

    @classmethod
    def received(cls, message: Sequence[Any]) -> BatchEnd:
        """Read what :meth:`message` gave elsewhere."""
        norm, lr, *told = message
        return cls._read(*_parsed(told), norm, lr)

    @classmethod
    def _read(cls, outcome: Any, metrics: Metrics | None, norm: Any, lr: Any) -> BatchEnd:
        numbers = outcome.reshape(-1).tolist()
        return cls(
            numbers[0],
            numbers[2] if len(numbers) > 1 else None,
            {} if metrics is None else dict(zip(metrics.names, metrics.values.tolist())),
            None if norm is None else float(norm),
            None if lr is None else float(lr),
        )
