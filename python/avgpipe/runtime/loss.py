"""The loss of a micro-batch: what a loss function may return, and whether a scalar is the mean it is taken for."""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from avgpipe.errors import StageError
from avgpipe.links.message import tensors_of
from avgpipe.runtime.batch import LossFn, concatenate, split

_log = logging.getLogger("avgpipe")
_LOOKED_AT = 8  # samples of a micro-batch, at most
_TOLERANCE = 1e-2  # of the loss; what is no mean is further off in some micro-batch


class Loss(NamedTuple):
    """A scalar, a mean or a sum. With ``divisor``, a sum, and what to divide it by over the whole batch."""

    value: torch.Tensor
    divisor: torch.Tensor | float | None = None


def loss_of(loss_fn: LossFn, output: Any, target: Any) -> Loss:
    """The loss of a micro-batch, refused unless it is a scalar tensor, or that and a count."""
    loss = loss_fn(output, target)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return Loss(loss)
    if isinstance(loss, tuple) and len(loss) == 2 and _is_scalar(loss[0]):
        value, count = loss
        if _is_scalar(count):
            return Loss(value, count.detach())
        if isinstance(count, int | float) and not isinstance(count, bool):
            return Loss(value, float(count))
    got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise StageError(
        f"loss_fn returned {got}; it must return a scalar tensor, the mean or sum over the samples, or a tuple "
        "(sum, count) of a scalar tensor and what to divide it by"
    )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def is_mean_by_kind(loss_fn: LossFn) -> bool:
    """Whether it is known without a look that micro-batches of this loss are weighed rightly: torch's own modules, and
    what says by ``reduction`` that it is a sum.
    """
    return getattr(loss_fn, "reduction", None) == "sum" or (
        isinstance(loss_fn, nn.Module) and type(loss_fn).__module__.startswith("torch.nn.")
    )


class MeanCheck:
    """Looks whether a loss of unknown kind is a mean over samples, in the micro-batches of the first batch.

    Each is evaluated whole and sample by sample. What finds nothing says nothing: where outputs do not have their
    samples in dimension 0 there is no telling.
    """

    def __init__(self, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn
        self._batch: int | None = None  # the one that is looked at
        self._parts: list[tuple[Any, Any]] = []  # of too few samples, until there are two
        self.done = False
        self._warned_of_nan = False

    @torch.no_grad()
    def look(self, batch: int, output: Any, target: Any) -> None:
        """At a micro-batch; warns, once, of a loss that is no mean."""
        if self._batch is None:
            self._batch = batch
        elif batch != self._batch:
            self.done, self._parts = True, []
            return
        self._parts.append(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (output, target)))
        samples = sum(map(_samples, self._parts))
        if samples < 2:
            return
        parts, self._parts = self._parts, []
        output, target = parts[0] if len(parts) == 1 else map(concatenate, map(list, zip(*parts)))
        try:
            whole, each = self._evaluate(output, target, samples)
        except Exception:
            return  # a function of the caller's that was not made for values of these shapes
        if whole is None or _near(whole, sum(each) / len(each), each):
            return
        self.done = True
        if _near(whole, sum(each), each):
            _log.warning(
                "loss_fn returns the sum over the samples and is taken for their mean: give it an attribute "
                'reduction = "sum", or let it return (sum, count)'
            )
            return
        _log.warning(
            "loss_fn is no mean over the samples: %d of them have the loss %.6g, and the mean of their own losses is "
            "%.6g. Micro-batches are weighed by their samples, so training differs from that with whole batches: let "
            "loss_fn return (sum, count), or give loss_weight; a loss that compares samples with each other needs "
            "micro_batches=1",
            *(len(each), whole, sum(each) / len(each)),
        )

    def _evaluate(self, output: Any, target: Any, samples: int) -> tuple[float | None, list[float]]:
        """The loss of some samples, None if that cannot be said, and the losses of each."""
        tensors = [t for t in tensors_of((output, target)) if t.dim() > 0]
        if any(t.shape[0] % samples for t in tensors):
            return None, []
        each = list(zip(split(output, samples), split(target, samples)))[:_LOOKED_AT]
        some = (concatenate(list(values)) for values in zip(*each))
        whole = self._loss_fn(*some)
        if not math.isfinite(float(whole)):
            return None, []
        return float(whole), [float(self._loss_fn(x, y)) for x, y in each]

    def counts_nothing(self, output: Any) -> bool:
        """Whether a loss that is NaN is one of finite outputs: a mean over nothing, as where all targets are hidden."""
        if not all(bool(t.isfinite().all()) for t in tensors_of(output)):
            return False
        if not self._warned_of_nan:
            self._warned_of_nan = True
            _log.warning(
                "loss_fn is NaN for a micro-batch whose outputs are finite, as the mean over no target is: it counts "
                "for nothing. Let loss_fn return (sum, count), and whole batches have the right loss"
            )
        return True


def _samples(part: tuple[Any, Any]) -> int:
    """Of output and target. The target has its samples in dimension 0."""
    return next((t.shape[0] for t in tensors_of(part[1]) + tensors_of(part[0]) if t.dim() > 0), 1)


def _near(a: float, b: float, parts: list[float]) -> bool:
    """Within what rounding may do, in 16 bits too. False for NaN."""
    return abs(a - b) <= _TOLERANCE * max(abs(a), abs(b), sum(map(abs, parts)) / len(parts))
