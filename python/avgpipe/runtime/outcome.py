"""How a batch has ended: its loss and metrics as they are added up, as others learn them, and as a result has them."""

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
    """What a loss function tells beside its losses: names, and values that are added up as the losses, float64 [n].

    ``parts``: of how many micro-batches they are sums.
    """

    names: tuple[str, ...]
    values: torch.Tensor
    parts: int = 1

    @classmethod
    def of(cls, given: Mapping[str, Any], factor: float, device: torch.device) -> Metrics:
        """Return those of one micro-batch, whose loss has this factor."""
        values = torch.stack([wide(value, device) for value in given.values()])
        return cls(tuple(given), values.mul_(factor))

    def plus(self, other: Metrics) -> Metrics:
        if self.names != other.names:
            raise StageError(
                f"loss_fn returns the metrics {', '.join(self.names)} for some micro-batches and "
                f"{', '.join(other.names)} for others: return the same ones, in the same order"
            )
        return Metrics(self.names, self.values + other.values, self.parts + other.parts)


def encode_outcome(outcome: torch.Tensor | None, metrics: Metrics | None) -> list[Any]:
    """Return what others learn: the 1 or 3 numbers of the outcome, then the metrics and their names."""
    # Numbers by themselves, which no narrow wire rounds.
    numbers = outcome.unbind() if outcome is not None and outcome.dim() else [outcome]
    return [*numbers] if metrics is None else [*numbers, *metrics.values.unbind(), *metrics.names]


def decode_outcome(message: Sequence[Any]) -> tuple[Any, Metrics | None]:
    """Invert :func:`encode_outcome`."""
    if len(message) == 1:  # mostly
        return message[0], None
    names = tuple(name for name in message if isinstance(name, str))
    end = len(message) - len(names)
    numbers, values = message[: end - len(names)], message[end - len(names) : end]
    outcome = numbers[0] if len(numbers) == 1 else torch.stack(list(numbers))
    return outcome, Metrics(names, torch.stack(list(values))) if names else None


class BatchEnd(NamedTuple):
    """How a batch has ended for a pipeline, as numbers of the host.

    Attributes:
        weight: of the loss among others.
        grad_norm: None where nobody asked for it.
        lr: None where there is no optimizer.
    """

    loss: float
    weight: float
    metrics: dict[str, float]
    grad_norm: float | None
    lr: float | None

    @classmethod
    def of(cls, outcome: Any, metrics: Metrics | None, norm: Any, lr: Any, weight: float) -> BatchEnd:
        """Read what is known of a batch; see :class:`avgpipe.runtime.compute.BatchState`.

        ``weight``: of the loss, unless its loss function says it.
        """
        if not outcome.dim() and metrics is None and norm is None and not isinstance(lr, torch.Tensor):
            return cls(float(outcome), weight, {}, None, lr)  # mostly
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
        """Read what :func:`end_message` gave elsewhere."""
        norm, lr, *rest = message
        return cls.of(*decode_outcome(rest), norm, lr, weight)

    @classmethod
    def whole(cls, shares: Sequence[BatchEnd], is_sum: bool) -> BatchEnd:
        """Return how a batch has ended from the ends of its shares. ``is_sum``: its loss is a sum."""
        if len(shares) == 1:
            return shares[0]
        counted = [share for share in shares if share.weight]  # one with nothing to count has any loss
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
        ]  # of a sum an empty share has none
        return cls(
            mean(share.loss for share in counted),
            weight,
            {name: mean(share.metrics.get(name, math.nan) for share in having) for name in names},
            sum(norms) / len(norms) if norms else None,
            shares[0].lr,
        )


def _read(*tensors: torch.Tensor | None) -> list[list[float]]:
    """Return the numbers of each tensor, none of what is None; the host waits for a device once at most."""
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
    """Return what a process learns of a batch that it has no part in."""
    rate = None if lr is None else wide(lr, outcome.device)
    return [norm, rate, *encode_outcome(outcome, metrics)]
