"""A batch split into micro-batches, and the weight of each in the batch's loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import (
    TreeSpec,
    _broadcast_to_and_flatten,  # spreads vmap's in_dims; torch has no public function for it
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from torch.utils.weak import WeakTensorKeyDictionary

_log = logging.getLogger("avgpipe")
# Returned for output and target: a scalar tensor, or (scalar tensor, count); or one of these and a dict of
# metrics.
LossFn = Callable[[Any, Any], Any]


LABELS = "labels"


def pair(batch: Any) -> tuple[Any, Any]:
    """Return a loader's item as (inputs, targets).

    A mapping with a key "labels", as the collators of transformers make it, has its targets there, and
    everything else is inputs.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return plain(batch[0]), plain(batch[1])
    if isinstance(batch, Mapping) and LABELS in batch and len(batch) > 1:
        return {name: value for name, value in batch.items() if name != LABELS}, plain(batch[LABELS])
    got = (
        f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__
    )
    if isinstance(batch, Mapping):
        got += f" with the keys {', '.join(map(repr, batch))}" if batch else " without keys"
    raise TypeError(
        f"a loader must yield pairs (inputs, targets), or mappings of inputs with the targets as {LABELS!r}, not "
        f"{got}"
    )


def refuse_graphs(inputs: Any) -> None:
    """Raise ValueError for inputs that other modules computed with gradients."""
    if any(isinstance(t, torch.Tensor) and t.grad_fn is not None for t in _leaves(inputs)):
        raise ValueError(
            "the inputs of a batch have a grad_fn, so they have a graph, and each micro-batch would run its backward "
            "once more: make the module that computed them the first layer of the model, or detach() them"
        )


def _leaves(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, torch.Tensor) else tree_leaves(value)  # most values have one


def plain(value: Any) -> Any:
    """Turn a mapping that torch does not treat as a container, such as a tokenizer's output, into a dict."""
    return dict(value) if isinstance(value, Mapping) and not isinstance(value, dict) else value


@dataclass(frozen=True)
class BatchDims:
    """The dimension of a batch's tensors that the samples are along.

    Attributes:
        inputs: One number for all tensors, or tuples, lists and dicts like the inputs; None for values that
            are passed whole to every micro-batch.
        targets: Likewise.
        outputs: Dimension of the model's outputs.
    """

    inputs: Any = 0
    targets: Any = 0
    outputs: int = 0


SAMPLES_FIRST = BatchDims()


def dims_in(leaves: Sequence[Any], spec: TreeSpec, dims: Any) -> Sequence[int | None]:
    """Return for each leaf the dimension that it is split along, None if it is not a tensor or is passed whole."""
    if type(dims) is int:
        asked: list[Any] = [dims] * len(leaves)
    else:
        found = _broadcast_to_and_flatten(dims, spec)
        if found is None:
            raise ValueError(
                f"batch_dim={dims!r} has another structure than the batch: a batch has {_outline(leaves, spec)}"
            )
        asked = found
    cut: list[int | None] = []
    for leaf, dim in zip(leaves, asked):
        is_cut = dim is not None and isinstance(leaf, torch.Tensor) and leaf.dim() > 0
        if is_cut and leaf.dim() <= dim:
            raise ValueError(
                f"batch_dim says that samples are along dimension {dim}, but a tensor of the batch is "
                f"{list(leaf.shape)}: give a number for the inputs and one for the targets, or one for each tensor, "
                "None for those that go whole to every micro-batch"
            )
        cut.append(dim if is_cut else None)
    return cut


def _outline(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    shown = [list(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__ for t in leaves]
    return tree_unflatten(shown, spec)


def batch_size(value: Any, dims: Any = 0) -> int:
    """Count the samples in a pytree of tensors that all have the batch along a dimension, see :class:`BatchDims`.

    0-d tensors and plain values are ignored.
    """
    if dims == 0 and isinstance(value, torch.Tensor) and value.dim() > 0:  # the usual case
        return value.shape[0]
    leaves, spec = tree_flatten(value)
    cut = dims_in(leaves, spec, dims)
    sizes = {t.shape[dim] for t, dim in zip(leaves, cut) if dim is not None}
    if len(sizes) != 1:
        found = "no tensor with a batch dimension" if not sizes else f"sizes {sorted(sizes)}"
        where = "where batch_dim says" if dims != 0 else "as dimension 0"
        raise ValueError(
            f"every tensor of a batch must have the samples {where}, all alike; found {found}. Use "
            "Source(batch_dim=...) to name their dimension, and tensors that go whole to every micro-batch; a batch "
            "that is not split, with micro_batches=1 and one pipeline, may have any tensors"
        )
    return int(sizes.pop())


def sample_count(
    inputs: Any, targets: Any = None, is_whole: bool = False, dims: BatchDims = SAMPLES_FIRST
) -> int:
    """Count the samples in a batch, at least one; targets, if there are any, must have as many as the inputs.

    ``is_whole``: nothing is split, so dimension 0 may be anything; the result is that of the first target,
    else input.
    """
    _refuse_arrays(inputs, "inputs")
    _refuse_arrays(targets, "targets")
    if is_whole and dims == SAMPLES_FIRST:
        leaves = (*tree_leaves(targets), *tree_leaves(inputs))
        sizes = [t.shape[0] for t in leaves if isinstance(t, torch.Tensor) and t.dim() > 0]
        if sizes and sizes[0] > 0:
            return sizes[0]
    samples = batch_size(inputs, dims.inputs)
    if samples == 0:
        raise ValueError("a batch has no samples: leave it out, or give it at least one")
    if has_samples(targets, dims.targets) and (answers := batch_size(targets, dims.targets)) != samples:
        raise ValueError(
            f"the inputs have {samples} samples and the targets {answers}: both need one per sample"
        )
    return samples


def has_samples(value: Any, dims: Any = 0) -> bool:
    """Return whether there is a tensor that is split."""
    if dims == 0 and isinstance(value, torch.Tensor):  # the usual case
        return value.dim() > 0
    leaves, spec = tree_flatten(value)
    return any(dim is not None for dim in dims_in(leaves, spec, dims))


def _refuse_arrays(value: Any, what: str) -> None:
    """Refuse NumPy arrays, which layers would reject with unclear errors."""
    for leaf in _leaves(value):
        if not isinstance(leaf, torch.Tensor) and type(leaf).__module__ == "numpy":
            raise TypeError(
                f"the {what} of a batch have a numpy {type(leaf).__name__}: give tensors, as torch.from_numpy, "
                "torch.as_tensor or the default collation of a DataLoader makes them"
            )


def sizes_of(samples: int, parts: int) -> list[int]:
    """Return the sizes of the micro-batches that :func:`split` makes."""
    return [samples // parts + (m < samples % parts) for m in range(parts)]


def split(value: Any, parts: int, samples: int | None = None, dims: Any = 0) -> list[Any]:
    """Split every tensor into ``parts`` pieces whose sizes differ by at most one sample, see :class:`BatchDims`.

    Lists of plain values, or of tensors without a dimension, and tuples of strings, are also split if they
    are ``samples`` long.
    """
    if parts == 1:
        return [value]
    if dims == 0 and isinstance(value, torch.Tensor) and value.dim() > 0:  # the usual case
        return list(value.tensor_split(parts))
    leaves, spec = tree_flatten(value, is_leaf=partial(is_column, samples=samples))
    bounds = None if samples is None else list(accumulate(sizes_of(samples, parts), initial=0))
    pieces = [_cut(leaf, parts, bounds, dim) for leaf, dim in zip(leaves, dims_in(leaves, spec, dims))]
    return [tree_unflatten([p[m] for p in pieces], spec) for m in range(parts)]


def _cut(leaf: Any, parts: int, bounds: list[int] | None, dim: int | None) -> Sequence[Any]:
    if dim is not None:
        return list(leaf.tensor_split(parts, dim))
    if isinstance(leaf, list | tuple) and bounds is not None:
        return [leaf[a:b] for a, b in pairwise(bounds)]
    return (leaf,) * parts


_PLAIN = str | bytes | bool | int | float | None


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _is_plain_list(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(map(_is_plain, value))


def is_column(value: Any, samples: int | None) -> bool:
    """Return whether a value has an entry for each sample, as the default collation makes of strings."""
    if samples is None or not _is_plain_list(value) or len(value) != samples:
        return False
    return isinstance(value, list) or isinstance(value[0], str | bytes)


class Columns:
    """Checks that lists of plain values are treated equally in all batches: one value for each sample, or whole."""

    def __init__(self) -> None:
        self._first: list[bool] | None = None

    def check(self, batch: Any, samples: int) -> None:
        """Check a batch that is split. ValueError if a list would be split in one batch and not in another one."""
        if isinstance(batch, torch.Tensor) or all(isinstance(part, torch.Tensor) for part in batch):
            return
        lists = [leaf for leaf in tree_leaves(batch, is_leaf=_is_plain_list) if _is_plain_list(leaf)]
        now = [is_column(value, samples) for value in lists]
        if self._first is None:
            self._first = now
            for value in lists:
                if len(value) == samples and not is_column(value, samples):
                    _log.warning(
                        "a batch of %d samples has the tuple %s, which goes whole to every micro-batch: make it a list "
                        "if it has a value for each sample",
                        *(samples, _shown(value)),
                    )
        elif now != self._first:
            value = next(
                (v for v, a, b in zip(lists, now, self._first) if a != b), lists[-1] if lists else ()
            )
            raise ValueError(
                f"a batch of {samples} samples has the list {_shown(value)}, which was treated differently in the "
                "first batch: a list with a value for each sample is split as tensors are. Make it a tuple if it goes "
                "whole to every micro-batch, or give every batch as many values as samples"
            )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):  # the usual case; most are there already
        return value if value.device == device else value.to(device, non_blocking=True)
    return tree_map(lambda t: t.to(device, non_blocking=True) if isinstance(t, torch.Tensor) else t, value)


@dataclass(frozen=True)
class LossWeights:
    """Factors that make the batch's loss from micro-batch losses: ``sum_m factor_m loss_m`` is the batch's loss.

    A mean over samples weighs by samples; a mean over the elements that are not ignored (cross entropy with
    ``ignore_index`` or class weights) weighs by those; a sum is a sum.

    Attributes:
        factors: Factors of the micro-batches.
        total: Weight of the batch among others: samples, counted elements, or 1 for a sum.
        scale: Additional factor of the loss's gradient: for a share of a batch, its part of the batch's
            weight, so that layers get the same gradients as on one device.
        shares: Number of shares of the batch. Parameters' gradients are multiplied by it after all backwards,
            so that the mean over the shares' gradients is the gradient of the whole batch.
    """

    factors: list[float]
    total: float
    scale: float = 1.0
    shares: int = 1


def loss_weights(
    loss_fn: LossFn, targets: list[Any], sizes: list[int], weight_fn: Callable[[Any], Any] | None
) -> LossWeights:
    """Weigh micro-batches with ``targets`` and ``sizes`` samples; ``weight_fn(target)`` overrides the rule."""
    if weight_fn is None and getattr(loss_fn, "reduction", "mean") == "sum":
        return LossWeights([1.0] * len(sizes), 1.0)
    if weight_fn is not None:
        weights = [float(weight_fn(t)) for t in targets]
    elif isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss) and _has_class_targets(targets[0]):
        weights = [_counted(loss_fn, t) for t in targets]
    else:
        weights = [float(n) for n in sizes]
    total = sum(weights)
    # a batch with nothing to count has the loss 0/0 on one device, too
    return LossWeights([w / total if total else float("nan") for w in weights], total)


def share_out(weights: LossWeights, counts: Sequence[int], is_sum: bool) -> list[LossWeights]:
    """Return the weights of the shares of a batch: the first ``counts[0]`` micro-batches, and so on.

    Each share's loss is its own mean, or its sum if the loss is a sum.
    """
    shares = []
    bounds = list(accumulate(counts, initial=0))
    for first, end in pairwise(bounds):
        factors = weights.factors[first:end]
        whole = sum(factors)
        if is_sum:
            shares.append(LossWeights(factors, 1.0, shares=len(counts)))
        else:
            own = [f / whole if whole else whole for f in factors]
            shares.append(LossWeights(own, whole * weights.total, whole, len(counts)))
    return shares


def _has_class_targets(target: Any) -> bool:
    return isinstance(target, torch.Tensor) and not target.is_floating_point()


def _counted(loss_fn: nn.CrossEntropyLoss | nn.NLLLoss, target: torch.Tensor) -> float:
    kept = target[target != loss_fn.ignore_index]
    if loss_fn.weight is None:
        return float(kept.numel())
    return float(_beside(loss_fn.weight, kept)[kept].sum(dtype=torch.float64))


_copies: Any = WeakTensorKeyDictionary()  # for class weights: the copied version, and the copy


def _beside(weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return class weights on the targets' device, without a synchronization each time."""
    if weight.device == target.device:
        return weight
    copy: torch.Tensor
    version, copy = _copies.get(weight, (None, weight))
    if version != weight._version or copy.device != target.device:
        version, copy = weight._version, weight.to(target.device)
        _copies[weight] = version, copy
    return copy
