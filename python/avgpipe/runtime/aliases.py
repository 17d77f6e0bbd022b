"""Tensors of one value that share memory, when they are sent over a cut.

On one device, a layer that writes to one of them changes the others. A message gives each tensor its own
memory. So if tensors are views of another one of the same value, only that one is sent. The receiver makes
the others from it: they share memory again, and gradients of views add up there.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.utils import _pytree as pytree

_MARK = "\0view of "  # replaces a view; its base's number, shape, strides and offset follow


def folded(value: Any) -> Any:
    """Return a value in which marks replace tensors that are views of others of it."""
    leaves, structure = pytree.tree_flatten(value)
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and _may_be_folded(leaf)]
    if len(places) < 2:
        return value
    made = list(leaves)
    by_memory: dict[int, list[int]] = {}
    for n in places:
        by_memory.setdefault(leaves[n].untyped_storage().data_ptr(), []).append(n)
    for group in by_memory.values():
        bases = [n for n in group if leaves[n].is_contiguous()]
        for n in group:
            base = next(
                (b for b in bases if b != n and made[b] is leaves[b] and _holds(leaves[b], leaves[n])), None
            )
            if base is not None:
                view = leaves[n]
                offset = view.storage_offset() - leaves[base].storage_offset()
                made[n] = _MARK + json.dumps([base, list(view.shape), list(view.stride()), offset])
    is_same = all(a is b for a, b in zip(made, leaves))
    return value if is_same else pytree.tree_unflatten(made, structure)


def _may_be_folded(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() > 0


def _holds(base: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether ``view`` lies within ``base``, and both are views of one tensor or one of the other."""
    is_view = view is base or view._base is base or (view._base is not None and view._base is base._base)
    if not is_view or view.requires_grad != base.requires_grad or view.dtype != base.dtype:
        return False
    first = view.storage_offset() - base.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(view.shape, view.stride()))
    return first >= 0 and last < base.numel()


def unfolded(value: Any) -> Any:
    """Return a value in which views replace marks."""
    leaves, structure = pytree.tree_flatten(value)
    marks = [n for n, leaf in enumerate(leaves) if isinstance(leaf, str) and leaf.startswith(_MARK)]
    if not marks:
        return value
    for n in marks:
        base, shape, strides, offset = json.loads(leaves[n].removeprefix(_MARK))
        whole = leaves[base]
        leaves[n] = whole.as_strided(shape, strides, whole.storage_offset() + offset)
    return pytree.tree_unflatten(leaves, structure)
