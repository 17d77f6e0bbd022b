"""Checks, on outputs and targets of the run, that a loss function is a mean, a sum or a sum with a count.

A micro-batch's loss is weighted by its samples, or divided by a count, as if it were a mean over them, or a
sum. And it is called once for each micro-batch, on the outputs of a copy of the caller's model.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from avgpipe.errors import StageError
from avgpipe.links.link import tensors_of, wanting_gradients
from avgpipe.model.batch import SAMPLES_FIRST, BatchDims, LossFn, batch_size, dims_in, split
from avgpipe.model.context import generators, moved, set_generators
from avgpipe.model.outside import leaves_of
from avgpipe.runtime.loss import Loss, loss_of
from avgpipe.runtime.options import Callers

_log = logging.getLogger("avgpipe")
_LOOKED_AT = 8  # samples of a micro-batch, at most
# Batches that are checked, and later every hundredth: all micro-batches of the first one, one of the others.
_FIRST, _EVERY = 3, 100
_NEWS = 20  # batches that are checked because their targets are new, at most
# Of the loss, by its dtype: rounding errors are smaller, and errors of a loss that is no mean are larger.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_TOLERANCE_16 = 1e-2

_Part = tuple[Any, Any]  # output and target


class _Looked(NamedTuple):
    """Results for some samples: the loss of all, that of each, and the tolerance for rounding."""

    whole: Loss
    each: list[Loss]
    tolerance: float


class _Again:
    """Calls a loss function with the same random numbers, and its own copy of buffers, each time."""

    def __init__(self, loss_fn: LossFn, device: torch.device) -> None:
        self._loss_fn = loss_fn
        if isinstance(loss_fn, nn.Module):  # the caller's module keeps its state unchanged
            with suppress(Exception):
                self._loss_fn = copy.deepcopy(loss_fn)
        self._device, self._begun = device, generators(device)

    def __call__(self, output: Any, target: Any) -> Loss:
        set_generators(self._begun)
        outputs = pytree.tree_map_only(torch.Tensor, _wanting, output)
        with torch.enable_grad():
            loss = loss_of(self._loss_fn, outputs, pytree.tree_map_only(torch.Tensor, torch.clone, target))
        return loss._replace(value=loss.value.detach())

    @property
    def has_drawn(self) -> bool:
        """Whether the last call has drawn random numbers."""
        return bool(moved(self._begun, generators(self._device)))

    def put_back(self) -> None:
        set_generators(self._begun)


class LossCheck:
    """Checks a loss function in the first batches, and in some later ones.

    Args:
        weighs: whether a scalar counts as a mean over samples.
        callers: parameters of the caller's own model.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        dims: BatchDims = SAMPLES_FIRST,
        weighs: bool = True,
        callers: Callers | None = None,
    ) -> None:
        self._loss_fn, self._dims, self.weighs = loss_fn, dims, weighs
        self._callers = {id(of()): (name, of) for name, of in (callers or {}).items()}
        self._first: int | None = None  # batch
        self._batch: int | None = None  # that ``_parts`` are from
        self._is_looked_at = False
        self._parts: list[_Part] = []  # with too few samples, until there are two
        self._extremes: list[float] = []  # of targets
        self._news = 0
        self.has_called = False
        self.done = False
        self._warned_of_nan = False

    # ---- the first call ----------------------------------------------------------------------------------------------

    def call(self, output: Any, target: Any) -> Loss:
        """Return the loss of a first micro-batch; StageError if loss_fn does what a Pipeline forbids."""
        self.has_called = True
        tensors, ran = wanting_gradients(output), list[int]()
        ends = {t.grad_fn for t in tensors}
        watched: list[Any] = tensors
        hooks = [t.register_hook(lambda grad: ran.append(0)) for t in watched]
        loss = loss_of(self._loss_fn, output, target)
        for hook in hooks:
            hook.remove()
        if ran:
            raise StageError(
                "loss_fn has called backward() itself, which reaches the last stage alone, once for each micro-batch: "
                "let it return the whole loss, whose backward the pipeline runs"
            )
        if (name := self._caller_in(loss.value, ends)) is not None:
            raise StageError(
                f"loss_fn uses {name!r} of the model that was given, of which a Pipeline trains a copy: its gradient "
                "would reach nothing that is trained. Let the model return what the loss needs of it, or use an "
                "option of the optimizer, such as weight_decay, for a penalty on weights"
            )
        self._callers = {}
        return loss

    def _caller_in(self, loss: torch.Tensor, ends: set[Any]) -> str | None:
        """Return the name of a parameter of the caller's model that the loss depends on directly, or None."""
        for variable in leaves_of([loss], ends):
            name, of = self._callers.get(id(variable), ("", lambda: None))
            if of() is variable:
                return name
        return None

    # ---- means, sums and counts --------------------------------------------------------------------------------------

    def look(self, batch: int, output: Any, target: Any, counts: bool) -> None:
        """Check a micro-batch, and warn, once. ``counts``: whether the loss function has returned a count.

        Samples are evaluated together and one by one, in float64, on outputs that differ more than a new
        model's: a new model gives all targets the same probability, so a masked target would make no
        difference. No warning is given without a finding: if outputs do not have their samples in dimension
        0, nothing can be said.
        """
        if self.done or not (self.weighs or counts) or not self._is_due(batch, target):
            return
        if batch != self._batch:
            self._batch, self._parts, self._is_looked_at = batch, [], False
        # A loss function may write to its arguments.
        part = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (output, target))
        self._parts.append(part)
        samples = sum(map(self._samples, self._parts))
        if samples < 2:
            return
        parts, self._parts, self._is_looked_at = self._parts, [], True
        output, target = self._joined(parts)
        other = _small if self._tries(_spread, output, target, samples) else lambda *part: part
        if not self.done:
            self._tries(other, output, target, samples)

    def _is_due(self, batch: int, target: Any) -> bool:
        self._first = batch if self._first is None else self._first
        # The first masked target may be in a late batch, as padding is.
        has_news = self._news < _NEWS and self._has_news(target)
        if batch == self._batch:
            return batch == self._first or not self._is_looked_at
        return has_news or batch - self._first < _FIRST or not batch % _EVERY

    def _has_news(self, target: Any) -> bool:
        """Whether integer targets, on the CPU, are smaller or larger than all before."""
        before = self._extremes
        words = [t for t in tensors_of(target) if t.device.type == "cpu" and not _is_real(t)]
        if not words:
            self._news = _NEWS  # later targets have none, either
        for t in words:
            if t.numel() > 1:
                low, high = (float(x) for x in torch.aminmax(t))
                known = self._extremes
                self._extremes = [min([low, *known[:1]]), max([high, *known[1:]])]
        self._news += self._extremes != before
        return self._extremes != before

    def _tries(self, spread: Callable[[Any, Any], _Part], output: Any, target: Any, samples: int) -> bool:
        """Evaluate, and warn of a finding; return whether the evaluation was possible."""
        call = _Again(self._loss_fn, _device_of(output))
        try:
            looked = self._evaluate(call, *spread(output, target), samples)
        except Exception:  # of any kind: the function may not support such shapes or dtypes
            return False
        finally:
            call.put_back()
        return looked is not None

    def _evaluate(self, call: _Again, output: Any, target: Any, samples: int) -> bool | None:
        """Evaluate samples together and one by one; warn of a finding; None if nothing can be concluded."""
        dims = self._dims
        if dims == SAMPLES_FIRST and any(
            t.shape[0] % samples for t in tensors_of((output, target)) if t.dim() > 0
        ):
            return None
        outputs, targets = (
            split(v, samples, samples, d) for v, d in ((output, dims.outputs), (target, dims.targets))
        )
        each = list(zip(outputs, targets))[:_LOOKED_AT]
        some = self._joined(each)
        whole, again = call(*some), call(*some)
        value = float(whole.value)
        if not math.isfinite(value):
            return None
        if value != float(again.value):
            return self._warn(
                "loss_fn gives another value for the same outputs, targets and random numbers when it is called again: "
                "it counts its calls, or keeps state from them, and is called once for each micro-batch. Keep what "
                "changes outside, as in the body of the training loop"
            )
        if call.has_drawn and whole.divisor is None:  # draws for each sample differ from those for all
            return None
        tolerance = _TOLERANCES.get(whole.value.dtype, _TOLERANCE_16)
        looked = _Looked(whole, [call(x, y) for x, y in each], tolerance)
        return self._check_counts(looked) if whole.divisor is not None else self._check_means(looked)

    def _warn(self, *message: Any) -> bool:
        self.done = True
        _log.warning(*message)
        return True

    def _check_counts(self, looked: _Looked) -> bool:
        counts = [float(of.divisor) for of in looked.each if of.divisor is not None]
        whole = float(looked.whole.divisor or 0.0)
        # A count may be clamped to at least 1, when nothing counts.
        spare = sum(float(of.value) == 0 for of in looked.each)
        slack = looked.tolerance * max(map(abs, (whole, *counts)))
        if whole - slack <= sum(counts) <= whole + spare + slack:
            return False
        return self._warn(
            "loss_fn returns two numbers, which are taken for a sum over the samples and the count that divides it, "
            "and the second is no count: of %d samples it is %.6g, and theirs add up to %.6g. If it is a metric beside "
            'the loss, return (loss, {"name": metric})',
            *(len(looked.each), whole, sum(counts)),
        )

    def _check_means(self, looked: _Looked) -> bool:
        whole, each = float(looked.whole.value), [float(of.value) for of in looked.each]
        if _near(whole, sum(each) / len(each), each, looked.tolerance):
            return False
        if _near(whole, sum(each), each, looked.tolerance):
            return self._warn(
                "loss_fn returns the sum over the samples and is taken for their mean: give it an attribute "
                'reduction = "sum", or let it return (sum, count)'
            )
        return self._warn(
            "loss_fn is no mean over the samples: on outputs that differ from each other, %d samples have the loss "
            "%.6g, and the mean of their own losses is %.6g. Micro-batches are weighted by their samples, so training "
            "differs from that with whole batches: let loss_fn return (sum, count), with the count of targets that are "
            "not ignored, or give Source(loss_weight); a loss that compares samples with each other needs "
            "micro_batches=1",
            *(len(each), whole, sum(each) / len(each)),
        )

    def _samples(self, part: _Part) -> int:
        if self._dims == SAMPLES_FIRST:
            return _samples(part)
        return batch_size(part[0], self._dims.outputs)

    def _joined(self, parts: Sequence[_Part]) -> _Part:
        """Join outputs, and targets; leaves without a dimension of samples are taken from the first."""
        if len(parts) == 1:
            return parts[0]
        outputs, targets = zip(*parts)
        return _join(outputs, self._dims.outputs), _join(targets, self._dims.targets)

    def counts_nothing(self, loss: torch.Tensor, output: Any) -> bool:
        """Whether a loss is NaN of finite outputs: a mean over nothing, such as with all targets masked."""
        if not self.weighs or not math.isnan(loss.item()):
            return False
        if not all(bool(t.isfinite().all()) for t in tensors_of(output)):
            return False
        if not self._warned_of_nan:
            self._warned_of_nan = True
            _log.warning(
                "loss_fn is NaN for a micro-batch whose outputs are finite, as the mean over no target is: the "
                "micro-batch is left out. Let loss_fn return (sum, count), and whole batches have the right loss"
            )
        return True


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _samples(part: _Part) -> int:
    """Count the samples of output and target. The target has them in dimension 0."""
    return next((t.shape[0] for t in tensors_of(part[1]) + tensors_of(part[0]) if t.dim() > 0), 1)


def _device_of(value: Any) -> torch.device:
    return next((t.device for t in tensors_of(value)), torch.device("cpu"))


def _wanting(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that requires a gradient, like an output, and is no leaf, so it can be written to."""
    if not tensor.is_floating_point():
        return tensor.clone()
    return tensor.detach().requires_grad_(True).clone()


def _spread(output: Any, target: Any) -> _Part:
    """Return output and target in float64, each element of the output moved towards zero by a random factor.

    So probabilities stay probabilities, and their logarithms stay below zero.
    """
    draw = torch.Generator().manual_seed(0)

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        parts = torch.rand(tensor.shape, generator=draw, dtype=torch.float64).to(tensor.device)
        return parts * tensor.double() if bool(tensor.any()) else parts

    wide = pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, target)
    return pytree.tree_map_only(torch.Tensor, spread, output), wide


def _small(output: Any, target: Any) -> _Part:
    """Do as :func:`_spread`, with samples of norm 1 at most: products of large ones saturate a softmax."""

    def small(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or not tensor.dim():
            return tensor
        norms = torch.linalg.vector_norm(tensor.reshape(len(tensor), -1), dim=1)
        scaled: torch.Tensor = tensor / norms.max().clamp(min=1.0)
        return scaled

    output, target = _spread(output, target)
    return pytree.tree_map_only(torch.Tensor, small, output), target


def _join(values: Sequence[Any], dims: Any) -> Any:
    leaves, spec = pytree.tree_flatten(values[0])
    columns = zip(*map(pytree.tree_leaves, values))
    return pytree.tree_unflatten(
        [c[0] if dim is None else torch.cat(c, dim) for c, dim in zip(columns, dims_in(leaves, spec, dims))],
        spec,
    )


def _near(a: float, b: float, parts: list[float], tolerance: float) -> bool:
    """Whether two losses differ by no more than rounding allows. False for NaN."""
    return abs(a - b) <= tolerance * max(abs(a), abs(b), sum(map(abs, parts)) / len(parts))
