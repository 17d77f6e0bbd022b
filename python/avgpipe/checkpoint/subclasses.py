"""Optimizer states with tensors of other classes than torch's own, such as torchao's 8-bit states.

A file has them as plain containers and tensors, as ``__tensor_flatten__`` splits them: so it loads with
``weights_only=True`` anywhere, and by name into stages of another cut.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from avgpipe.elastic.subclasses import is_made_of_others
from avgpipe.errors import CheckpointError
from avgpipe.runtime.optimizers import members_of

_CLASS = "class of a tensor"  # the key that distinguishes a tensor in its plain form from other containers


def taken_apart(value: Any) -> Any:
    """Return an optimizer's state as plain containers and tensors; CheckpointError if it has no such form."""
    if isinstance(value, Mapping):
        return {key: taken_apart(part) for key, part in value.items()}
    if not isinstance(value, torch.Tensor) or type(value) in (torch.Tensor, torch.nn.Parameter):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if not is_made_of_others(value):
        raise CheckpointError(
            f"the optimizer's state has a tensor of {kind}, which has no plain form (__tensor_flatten__) to be saved "
            "in: use another optimizer"
        )
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: taken_apart(getattr(value, name)) for name in names}
    shape = [list(value.shape), list(value.stride())]
    return {_CLASS: kind, "parts": parts, "context": context, "shape": shape}


def put_together(value: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Invert :func:`taken_apart`, for ``optimizer``.

    Raises:
        ValueError: for a class that is not of its package: a file must not decide what is imported.
    """
    if not isinstance(value, Mapping):
        return value
    if _CLASS not in value:
        return {key: put_together(part, optimizer) for key, part in value.items()}
    module, _, name = value[_CLASS].rpartition(".")
    kinds = [kind for member in members_of(optimizer) for kind in type(member).__mro__]
    found = getattr(sys.modules.get(module), name, None)
    if found is None or _package(module) not in {_package(kind.__module__) for kind in kinds}:
        raise ValueError(
            f"the optimizer that was saved keeps {name} of {_package(module)}, and {type(optimizer).__name__} has no "
            "such tensors"
        )
    parts = {key: put_together(part, optimizer) for key, part in value["parts"].items()}
    return found.__tensor_unflatten__(parts, value["context"], *map(torch.Size, value["shape"]))


def _package(module: str) -> str:
    return module.partition(".")[0]
