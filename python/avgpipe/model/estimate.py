"""Estimates of each layer's cost before anything is measured, and of the bytes that cross each boundary.

With an example of a batch's inputs, the operations of a forward and a backward are counted. Without one, a
layer's cost is its number of weights, which is right for layers that use each weight once per sample.
Convolutions do not, so a model with convolutions is counted on made-up inputs. Every rank gets the same
result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from avgpipe.model.batch import batch_size, split
from avgpipe.model.parts import PartLayer, Whole

if TYPE_CHECKING:
    from avgpipe.model.flops import FlopCount

_COUNTED = "cost: FLOPs and bytes moved in forward and backward, counted on"
_STATED = "cost: what layers state as compute_cost, else their weights, each used once per sample"
_WEIGHTS = "cost: estimated by the weights, each used once per sample"
_MEASURE = "measure with avgpipe.profile"
_COUNT = "example_inputs= counts FLOPs instead"
# Sizes of images that networks are made for, by the dimensions of a convolution; the count tries which one
# fits.
_SIZES = {
    1: (1024, 128, 256, 512, 2048, 16_000, 64, 32),
    2: (224, 32, 28, 64, 96, 128, 256, 299, 227, 112, 160, 192, 384, 512, 48, 16, 8),
    3: (32, 64, 112, 16, 8),
}
_SAMPLES, _WORDS = 2, 64  # of made-up inputs


@dataclass(frozen=True)
class Estimate:
    """The costs of layers.

    Attributes:
        costs: Cost of each layer, in proportion to its time.
        sent: Over the boundary behind each layer but the last: bytes, or the number of values if bytes are
            unknown.
        kind: One line on the kind of estimate.
    """

    costs: tuple[float, ...]
    sent: tuple[int, ...]
    kind: str

    @classmethod
    def of(
        cls, layers: Sequence[nn.Module], example_inputs: Any = None, parts: int = 1, counts: bool = True
    ) -> Estimate:
        """Estimate ``layers``, which are unchanged.

        Args:
            layers: A chain.
            example_inputs: Inputs of one batch.
            parts: Micro-batches of the batch, the first of which is counted.
            counts: False if nothing depends on it, as with one stage: weights are faster.
        """
        if any(map(_is_stated, layers)):
            return cls._by_weights(layers, f"{_STATED}; {_MEASURE}")
        if not counts:
            return cls._by_weights(layers, f"{_WEIGHTS}; {_MEASURE}")
        dimensions = None if example_inputs is not None else _convolves(layers)
        if example_inputs is None and dimensions is None:
            return cls._by_weights(layers, f"{_WEIGHTS}; {_COUNT}, and avgpipe.profile measures")
        from avgpipe.model.flops import CannotCount, work_of

        if dimensions is None:
            try:
                work = work_of(layers, _first(example_inputs, parts))
            except CannotCount as error:
                kind = f"{_WEIGHTS}, as FLOPs cannot be counted ({error}); {_MEASURE}"
                return cls._by_weights(layers, kind)
            return cls._by_work(work, f"{_COUNTED} example_inputs; {_MEASURE}")
        for inputs, words in _made_up(layers, dimensions):
            try:
                work = work_of(layers, inputs)
            except CannotCount:
                continue
            return cls._by_work(
                work, f"{_COUNTED} {words}, which are made up; example_inputs= counts on yours"
            )
        kind = f"{_WEIGHTS}, though convolutions use theirs more often; {_COUNT}"
        return cls._by_weights(layers, kind)

    @classmethod
    def _by_work(cls, work: FlopCount, kind: str) -> Estimate:
        # A layer that computes nothing costs its call.
        return cls(tuple(float(flops + 1) for flops in work.flops), tuple(work.sent), kind)

    @classmethod
    def _by_weights(cls, layers: Sequence[nn.Module], kind: str) -> Estimate:
        sent = tuple(len(layer.values.gives) if isinstance(layer, PartLayer) else 1 for layer in layers)
        return cls(tuple(map(estimated_cost, layers)), sent[:-1], kind)


def estimated_cost(layer: nn.Module) -> float:
    """Estimate a layer's compute by its weights, each used once per sample.

    An embedding is a lookup only; a layer may define its own ``compute_cost``.
    """
    if _is_stated(layer):
        return float(layer.compute_cost)  # type: ignore[arg-type]
    tables = [m for m in layer.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    looked_up = {id(p) for m in tables for p in m.parameters()}
    return 1.0 + sum(p.numel() for p in layer.parameters() if id(p) not in looked_up)


def _is_stated(layer: nn.Module) -> bool:
    return isinstance(getattr(layer, "compute_cost", None), int | float)


def _first(inputs: Any, parts: int) -> Any:
    """Return the inputs of the first micro-batch; all if they cannot be divided."""
    try:
        return split(inputs, max(1, min(parts, batch_size(inputs))))[0]
    except ValueError:
        return inputs


# ---- made-up inputs -------------------------------------------------------------------------------------------------


def _convolves(layers: Sequence[nn.Module]) -> int | None:
    """Return the dimensions of the first convolution; None if there is none."""
    found = (m for layer in layers for m in layer.modules() if isinstance(m, _ConvNd))
    first = next(found, None)
    return None if first is None else len(first.kernel_size)


def _made_up(layers: Sequence[nn.Module], dimensions: int) -> Iterator[tuple[Any, str]]:
    """Yield inputs that the model may accept, each with a description."""
    if isinstance(layers, Whole):
        yield layers.trial, "a few samples"
        return
    modules = (m for layer in layers for m in layer.modules())
    first = next(m for m in modules if isinstance(m, _ConvNd | nn.Embedding | nn.Linear))
    # Not by first.weight, which a parametrization may compute, and thereby change.
    dtype = next((p.dtype for p in first.parameters()), None)
    if isinstance(first, nn.Embedding):
        yield torch.zeros(_SAMPLES, _WORDS, dtype=torch.long), f"sequences of {_WORDS} words"
    elif isinstance(first, nn.Linear):
        for more in ((), (_WORDS,)):
            yield torch.empty(_SAMPLES, *more, first.in_features, dtype=dtype, device="meta"), "vectors"
    else:
        for size in _SIZES[dimensions]:
            shape = (first.in_channels, *[size] * dimensions)
            words = " x ".join(map(str, shape))
            yield torch.empty(_SAMPLES, *shape, dtype=dtype, device="meta"), f"inputs of {words}"
