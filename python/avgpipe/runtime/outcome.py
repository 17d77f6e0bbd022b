"""The end of a batch: its loss and metrics, as sums, as messages to other stages, and as results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from avgpipe.device import on_accelerator
from avgpipe.errors import StageError
from avgpipe.runtime.loss import wide


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
        having = [
            share for share in counted if share.metrics or not is_sum
        ]  # an empty share of a sum has none
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
