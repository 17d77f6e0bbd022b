"""A batch cut into micro-batches, and how much each of them weighs in the batch's loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

# Of output and target: a scalar tensor, or (scalar tensor, count); or one of the two and a dict of metrics.
LossFn = Callable[[Any, Any], Any]


LABELS = "labels"


def pair(batch: Any) -> tuple[Any, Any]:
    """Return what a loader yielded as (inputs, targets).

    A mapping with a key "labels", as the collators of transformers make it, has its targets there, and all else is
    inputs.
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
        f"a loader must yield pairs (inputs, targets), or mappings of inputs that have the targets as {LABELS!r}, not "
        f"{got}"
    )


def plain(value: Any) -> Any:
    """Turn a mapping that torch does not know as a container, such as a tokenizer's output, into a dict."""
    return dict(value) if isinstance(value, Mapping) and not isinstance(value, dict) else value


def batch_size(value: Any) -> int:
    """Count the samples in a pytree of tensors that all have the batch as dimension 0.

    0-d tensors and plain values do not count.
    """
    sizes = {t.shape[0] for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor) and t.dim() > 0}
    if len(sizes) != 1:
        found = "no tensor with a batch dimension" if not sizes else f"sizes {sorted(sizes)}"
        raise ValueError(
            f"every tensor of a batch must have the samples as dimension 0, all alike; found {found}"
        )
    return sizes.pop()


def sample_count(inputs: Any, targets: Any = None) -> int:
    """Count the samples in a batch, at least one; targets, if there are any, must have as many as the inputs."""
    _refuse_arrays(inputs, "inputs")
    _refuse_arrays(targets, "targets")
    samples = batch_size(inputs)
    if samples == 0:
        raise ValueError("a batch has no samples: leave it out, or give it at least one")
    if (
        any(isinstance(t, torch.Tensor) and t.dim() > 0 for t in tree_leaves(targets))
        and batch_size(targets) != samples
    ):
        raise ValueError(
            f"the inputs have {samples} samples and the targets {batch_size(targets)}: both need one per sample"
        )
    return samples


def _refuse_arrays(value: Any, what: str) -> None:
    """Refuse arrays of NumPy, which layers would fail on in words of their own."""
    for leaf in tree_leaves(value):
        if not isinstance(leaf, torch.Tensor) and type(leaf).__module__ == "numpy":
            raise TypeError(
                f"the {what} of a batch have a numpy {type(leaf).__name__}: give tensors, as torch.from_numpy, "
                "torch.as_tensor or the default collation of a DataLoader makes them"
            )


def sizes_of(samples: int, parts: int) -> list[int]:
    """Return the sizes of the micro-batches that :func:`split` makes."""
    return [samples // parts + (m < samples % parts) for m in range(parts)]


def split(value: Any, parts: int) -> list[Any]:
    """Cut every tensor along dimension 0 into ``parts`` pieces whose sizes differ by at most one sample."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:  # most are
        return list(value.tensor_split(parts))
    leaves, spec = tree_flatten(value)
    pieces = [
        t.tensor_split(parts) if isinstance(t, torch.Tensor) and t.dim() > 0 else (t,) * parts for t in leaves
    ]
    return [tree_unflatten([p[m] for p in pieces], spec) for m in range(parts)]


def concatenate(values: list[Any]) -> Any:
    """Invert :func:`split` for outputs: join tensors along dimension 0, take plain values from the first."""
    leaves = [tree_flatten(v)[0] for v in values]
    joined = [
        torch.cat(column) if isinstance(column[0], torch.Tensor) and column[0].dim() > 0 else column[0]
        for column in zip(*leaves)
    ]
    return tree_unflatten(joined, tree_flatten(values[0])[1])


def to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):  # most are, and most are there already
        return value if value.device == device else value.to(device, non_blocking=True)
    return tree_map(lambda t: t.to(device, non_blocking=True) if isinstance(t, torch.Tensor) else t, value)


@dataclass(frozen=True)
class LossWeights:
    """How micro-batch losses make the batch's loss: ``sum_m factor_m loss_m``, equal to the loss of the whole batch.

    A mean over samples weighs by samples; a mean over the elements that are not ignored (cross entropy with
    ``ignore_index`` or class weights) weighs by those; a sum is a sum.

    Attributes:
        factors: of the micro-batches.
        total: weight of the batch among others: samples, counted elements, or 1 for a sum.
        scale: what gradients are multiplied with beside: of a share of a batch, how its weight stands to the mean of
            all shares, so that the mean over the shares' gradients is the gradient of the whole batch.
    """

    factors: list[float]
    total: float
    scale: float = 1.0


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
    # a batch with nothing to count has the loss 0/0 on one device too
    return LossWeights([w / total if total else float("nan") for w in weights], total)


def share_out(weights: LossWeights, counts: Sequence[int], is_sum: bool) -> list[LossWeights]:
    """Return the weights of the shares of a batch: the first ``counts[0]`` micro-batches, and so on.

    Each has its own mean as loss, or sum if that is what the loss is.
    """
    shares = []
    bounds = list(accumulate(counts, initial=0))
    for first, end in pairwise(bounds):
        factors = weights.factors[first:end]
        whole = sum(factors)
        if is_sum:
            shares.append(LossWeights(factors, 1.0, float(len(counts))))
        else:
            own = [f / whole if whole else whole for f in factors]
            shares.append(LossWeights(own, whole * weights.total, whole * len(counts)))
    return shares


def _has_class_targets(target: Any) -> bool:
    return isinstance(target, torch.Tensor) and not target.is_floating_point()


def _counted(loss_fn: nn.CrossEntropyLoss | nn.NLLLoss, target: torch.Tensor) -> float:
    kept = target[target != loss_fn.ignore_index]
    if loss_fn.weight is None:
        return float(kept.numel())
    return float(_beside(loss_fn.weight, kept)[kept].sum(dtype=torch.float64))


_copies: Any = WeakTensorKeyDictionary()  # of class weights: the version that was copied, and the copy


def _beside(weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return class weights where the targets are, without asking a device each time."""
    if weight.device == target.device:
        return weight
    copy: torch.Tensor
    version, copy = _copies.get(weight, (None, weight))
    if version != weight._version or copy.device != target.device:
        version, copy = weight._version, weight.to(target.device)
        _copies[weight] = version, copy
    return copy
