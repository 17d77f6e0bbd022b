"""Micro-batches of several sizes from one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from avgpipe.runtime.batch import plain, sample_count, to_device


class Example(NamedTuple):
    """A micro-batch. ``number``: among the sizes."""

    number: int
    samples: int
    inputs: Any
    target: Any


def examples(inputs: Any, target: Any, sizes: Sequence[int], device: torch.device) -> list[Example]:
    """The first samples of a batch for each size; the batch over and over where it has fewer.

    ValueError for tensors that have not the samples as dimension 0.
    """
    inputs, target = plain(inputs), plain(target)
    samples = sample_count(inputs, target)

    def cut(value: Any, size: int) -> Any:
        rows = torch.arange(size) % samples
        chosen = pytree.tree_map(lambda x: _rows(x, rows), value)
        return to_device(chosen, device)

    return [Example(n, size, cut(inputs, size), cut(target, size)) for n, size in enumerate(sizes)]


def _rows(leaf: Any, rows: torch.Tensor) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return leaf
    return leaf.detach().index_select(0, rows.to(leaf.device)).requires_grad_(leaf.requires_grad)
