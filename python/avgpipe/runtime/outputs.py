"""The model's outputs for a batch, joined from those for its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from avgpipe.model.batch import BatchDims, dims_in, sample_count
from avgpipe.runtime.evaluate import read_here, run_evaluation
from avgpipe.runtime.worker import Worker


def check_inputs(inputs: Any, micro_batches: int, dims: BatchDims) -> None:
    """Raise ValueError for inputs that are no batch, on which the pipeline would only fail later."""
    sample_count(inputs, is_whole=micro_batches == 1, dims=dims)


def outputs_of(
    worker: Worker, micro_batches: int, weights: str | int, inputs: Any, dims: BatchDims
) -> tuple[Any, str | None]:
    """Return the model's output for a batch, on every rank; or None, and the reason why there is none."""
    batches, collector = [(inputs, None)], partial(OutputCollector, dims.outputs)
    ((output, refusal),) = run_evaluation(worker, micro_batches, weights, batches, collector)
    return output, refusal


class OutputCollector:
    """Collects the last stage's outputs. ``dim``: the dimension of their samples."""

    def __init__(self, dim: int) -> None:
        self._outputs: list[Any] = []
        self._sizes: list[int] = []
        self._dim = dim

    def add(self, output: Any, target: Any, samples: int, given: Any) -> None:
        self._outputs.append(output)
        self._sizes.append(samples)

    def result(self) -> tuple[Any, str | None]:
        """Return the output for the batch; or None, and the reason."""
        read_here(tree_leaves(self._outputs))
        try:
            return concatenate(self._outputs, self._sizes, self._dim), None
        except ValueError as error:  # every rank raises it, so it is no failure of one
            return None, str(error)


def concatenate(values: list[Any], sizes: Sequence[int], dims: Any = 0) -> Any:
    """Invert :func:`split` for outputs of micro-batches of ``sizes`` samples: join tensors along their samples.

    A value without samples is returned once if all micro-batches have the same. ValueError if they differ.
    """
    if len(values) == 1:
        return values[0]
    flat = [tree_flatten(v) for v in values]
    specs = [spec for _, spec in flat]
    if any(spec != specs[0] for spec in specs):
        raise ValueError("the outputs of micro-batches have different structures, so they cannot be joined")
    places = [dims] * specs[0].num_leaves if type(dims) is int else dims_in(flat[0][0], specs[0], dims)
    columns = zip(*(leaves for leaves, _ in flat))
    joined = [_joined(column, sizes, dim) for column, dim in zip(columns, places)]
    return tree_unflatten(joined, specs[0])


def _joined(column: Sequence[Any], sizes: Sequence[int], dim: int | None) -> Any:
    first = column[0]
    if not isinstance(first, torch.Tensor):
        alike = all(value == first for value in column)
    elif (
        dim is not None and first.dim() > dim and all(t.shape[dim] == size for t, size in zip(column, sizes))
    ):
        return torch.cat(tuple(column), dim)
    else:
        alike = all(torch.equal(t, first) for t in column)
    if alike:
        return first
    what = f"a tensor {list(first.shape)}" if isinstance(first, torch.Tensor) else type(first).__name__
    raise ValueError(
        f"the model returns {what}, which has no samples along dimension {dim} and is not the same for all "
        f"{len(column)} micro-batches of a batch, so that there is no value of the whole batch: return it for each "
        "sample, leave it out in evaluation, or use micro_batches=1"
    )
