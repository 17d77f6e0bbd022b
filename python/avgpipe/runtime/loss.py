"""The loss of a micro-batch and of a batch: its sum with metrics, its messages, and a warning of NaN."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from avgpipe.device import on_accelerator
from avgpipe.errors import StageError
from avgpipe.model.batch import LossFn
from avgpipe.ranks.world import World
from avgpipe.runtime.placement import Placement

_log = logging.getLogger("avgpipe")


class Loss(NamedTuple):
    """A scalar, a mean or a sum. With ``divisor``, a sum, and its divisor, summed over the whole batch.

    ``metrics``: by name, values that are averaged, or divided, as the scalar is.
    """

    value: torch.Tensor
    divisor: torch.Tensor | float | None = None
    metrics: Mapping[str, Any] | None = None


def loss_of(loss_fn: LossFn, output: Any, target: Any) -> Loss:
    """Return the loss of a micro-batch; refuse other values than those that ``LossFn`` may return."""
    loss, metrics = loss_fn(output, target), None
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return Loss(loss)
    if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], Mapping):
        loss, metrics = loss[0], _checked(loss[1])
    if _is_scalar(loss):
        return Loss(loss, None, metrics)
    if isinstance(loss, tuple) and len(loss) == 2 and _is_scalar(loss[0]):
        value, count = loss
        if _is_scalar(count):
            return Loss(value, count.detach(), metrics)
        if _is_number(count):
            return Loss(value, float(count), metrics)
    raise StageError(
        f"loss_fn returned {_got(loss)}; it must return a scalar tensor, the mean or sum over the samples, or a tuple "
        "(sum, count) of a scalar tensor and the number to divide it by; either may have metrics, as (loss, dict)"
    )


def wide(value: Any, device: torch.device) -> torch.Tensor:
    """Return a number, or a tensor of one element, as a float64 [] on ``device``, to be summed there."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, torch.float64).reshape(())
    return torch.full((), float(value), dtype=torch.float64, device=device)  # filled there, without a copy


def _checked(metrics: Mapping[Any, Any]) -> Mapping[str, Any]:
    for name, value in metrics.items():
        if not isinstance(name, str) or not (_is_scalar(value) or _is_number(value)):
            raise StageError(
                f"loss_fn returned the metric {name!r} as {_got(value)}; metrics are a dict of numbers, or tensors "
                "without a dimension, by name"
            )
    return metrics


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _got(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def is_mean_by_kind(loss_fn: LossFn) -> bool:
    """Whether the weights of micro-batches are known to be right for this loss, without a check.

    True for torch's own modules, and for a sum declared by ``reduction``.
    """
    return getattr(loss_fn, "reduction", None) == "sum" or (
        isinstance(loss_fn, nn.Module) and type(loss_fn).__module__.startswith("torch.nn.")
    )


# ---- the end of a batch ---------------------------------------------------------------------------------------------


class Metrics(NamedTuple):
    """What a loss function returns beside the loss: names, and values that add up like losses, float64 [n].

    ``parts``: the number of micro-batches that the values are sums over.
    """

    names: tuple[str, ...]
    values: torch.Tensor
    parts: int = 1

    @classmethod
    def of(cls, given: Mapping[str, Any], factor: float, device: torch.device) -> Metrics:
        """Return the metrics of one micro-batch, whose loss has this factor."""
        values = torch.stack([wide(value, device) for value in given.values()])
        return cls(tuple(given), values.mul_(factor))

    def plus(self, other: Metrics) -> Metrics:
        if self.names != other.names:
            raise StageError(
                f"loss_fn returns the metrics {', '.join(self.names)} for some micro-batches and "
                f"{', '.join(other.names)} for others: return the same ones, in the same order"
            )
        return Metrics(self.names, self.values + other.values, self.parts + other.parts)


def to_message(outcome: torch.Tensor | None, metrics: Metrics | None) -> list[Any]:
    """Return a message: the 1 or 3 numbers of the outcome, then the metrics and their names."""
    # As separate numbers, which a narrow wire dtype does not round.
    numbers = outcome.unbind() if outcome is not None and outcome.dim() else [outcome]
    return [*numbers] if metrics is None else [*numbers, *metrics.values.unbind(), *metrics.names]


def from_message(message: Sequence[Any]) -> tuple[Any, Metrics | None]:
    """Invert :func:`to_message`."""
    if len(message) == 1:  # the usual case
        return message[0], None
    names = tuple(name for name in message if isinstance(name, str))
    end = len(message) - len(names)
    numbers, values = message[: end - len(names)], message[end - len(names) : end]
    outcome = numbers[0] if len(numbers) == 1 else torch.stack(list(numbers))
    return outcome, Metrics(names, torch.stack(list(values))) if names else None


class BatchEnd(NamedTuple):
    """The end of a batch for a pipeline, as numbers on the host.

    Attributes:
        weight: of the loss in a mean over batches or shares.
        grad_norm: None if no option needs it.
        lr: None without an optimizer.
    """

    loss: float
    weight: float
    metrics: dict[str, float]
    grad_norm: float | None
    lr: float | None

    @classmethod
    def of(cls, outcome: Any, metrics: Metrics | None, norm: Any, lr: Any, weight: float) -> BatchEnd:
        """Read the values of a batch from its device; see :class:`avgpipe.runtime.compute.BatchState`.

        ``weight``: of the loss, unless the loss function returns it.
        """
        if not outcome.dim() and metrics is None and norm is None and not isinstance(lr, torch.Tensor):
            return cls(float(outcome), weight, {}, None, lr)  # the usual case
        rate = lr if isinstance(lr, torch.Tensor) else None
        values = None if metrics is None else metrics.values
        loss, norms, rates, found = _read(outcome, norm, rate, values)
        return cls(
            loss[0],
            loss[2] if len(loss) > 1 else weight,
            {} if metrics is None else dict(zip(metrics.names, found)),
            norms[0] if norms else None,
            rates[0] if rates else lr,
        )

    @classmethod
    def received(cls, message: Sequence[Any], weight: float) -> BatchEnd:
        """Read a message that :func:`end_message` made in another process."""
        norm, lr, *rest = message
        return cls.of(*from_message(rest), norm, lr, weight)

    @classmethod
    def whole(cls, shares: Sequence[BatchEnd], is_sum: bool) -> BatchEnd:
        """Return the end of a batch from the ends of its shares. ``is_sum``: whether its loss is a sum."""
        if len(shares) == 1:
            return shares[0]
        counted = [share for share in shares if share.weight]  # a share without targets to count has any loss
        weight = 1.0 if is_sum else sum(share.weight for share in shares)

        def mean(values: Iterable[float]) -> float:
            if is_sum:
                return sum(values)
            weighed = sum(value * share.weight for value, share in zip(values, counted))
            return weighed / weight if weight else math.nan

        norms = [share.grad_norm for share in counted or shares if share.grad_norm is not None]
        names = next((share.metrics for share in counted if share.metrics), {})
        # An empty share of a sum has none.
        having = [share for share in counted if share.metrics or not is_sum]
        return cls(
            mean(share.loss for share in counted),
            weight,
            {name: mean(share.metrics.get(name, math.nan) for share in having) for name in names},
            sum(norms) / len(norms) if norms else None,
            shares[0].lr,
        )


def _read(*tensors: torch.Tensor | None) -> list[list[float]]:
    """Return the numbers of each tensor, none for None; the host waits for a device once at most."""
    there = [t.reshape(-1) for t in tensors if t is not None]
    if len(there) == 1:
        numbers = iter(there[0].tolist())
    else:
        device = next((t.device for t in there if on_accelerator(t)), there[0].device)
        numbers = iter(torch.cat([t.to(device, torch.float64) for t in there]).tolist())
    return [[] if t is None else list(islice(numbers, t.numel())) for t in tensors]


def end_message(
    outcome: torch.Tensor, metrics: Metrics | None, norm: torch.Tensor | None, lr: Any
) -> list[Any]:
    """Return the message to a process that has no part in the batch."""
    rate = None if lr is None else wide(lr, outcome.device)
    return [norm, rate, *to_message(outcome, metrics)]


# ---- infinities and NaN ---------------------------------------------------------------------------------------------


_FEW = 16  # numbers that are read faster one by one than stacked
_REMEDY = (
    "training goes on with the resulting weights. To leave such batches out, train with "
    "Precision(skip_nonfinite=True); else lower the learning rate, or limit gradients by clip_grad_norm. The option of "
    "avgpipe train is --skip-nonfinite. This is reported once"
)


class NonfiniteNotice:
    """Warns of infinities and NaN where they first occur: once in a run, by one rank.

    Attributes:
        watches: False if another option, such as ``skip_nonfinite``, handles them.
    """

    def __init__(self, world: World, placement: Placement, watches: bool) -> None:
        self._world, self._placement = world, placement
        self.watches = watches

    def loss(self, loss: float, batch: int, pipeline: int) -> None:
        """Check the loss of a whole batch, on every rank."""
        if self.watches and not math.isfinite(loss):
            replica = self._placement.first_replicas(pipeline)[-1]
            if self._placement.rank_of(replica) == self._world.rank:
                self._warn(f"the loss on {self._placement.name(replica)} is {loss}", batch, pipeline)

    def gradients(
        self,
        grads: Sequence[torch.Tensor],
        outcome: torch.Tensor | None,
        replica: int,
        batch: int,
        pipeline: int,
    ) -> None:
        """Check a stage's gradients, on the CPU. ``outcome``: the batch's loss, if known, may explain it."""
        if _are_finite(grads):
            return
        if outcome is not None:
            self.loss(float(outcome.reshape(-1)[0]), batch, pipeline)
        if self.watches:
            what = f"gradients on {self._placement.name(replica)} have infinities or NaN"
            self._warn(what, batch, pipeline)

    def _warn(self, what: str, batch: int, pipeline: int) -> None:
        self.watches = False
        rank = self._world.rank
        if self._world.is_first("nonfinite"):
            _log.warning("rank %d: %s, in batch %d of pipeline %d; %s", rank, what, batch, pipeline, _REMEDY)


def _are_finite(grads: Sequence[torch.Tensor]) -> bool:
    grads = [grad._values() if grad.is_sparse else grad for grad in grads]
    if not grads:
        return True
    # A number that is finite if all are; if it is not, an exact check.
    norms = torch._foreach_norm(grads)
    total = sum(map(float, norms)) if len(norms) <= _FEW else float(torch.stack(norms).sum())
    return math.isfinite(total) or all(bool(grad.isfinite().all()) for grad in grads)
