"""Tensors that are made of others, as optimizers keep them in 8 bits: what torch's own methods cannot do with them."""

from __future__ import annotations

from typing import Any

import torch


def is_made_of_others(value: Any) -> bool:
    """Whether a tensor is, and says of which: a traceable wrapper subclass, in the words of torch."""
    return isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__")


def copied(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, also of one whose class, or whose parts', cannot be cloned."""
    if not is_made_of_others(local_part(value)):
        return value.clone()
    kind: Any = type(value)
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(value, name) for name in names}
    own = {name: copied(part) if isinstance(part, torch.Tensor) else part for name, part in parts.items()}
    made: torch.Tensor = kind.__tensor_unflatten__(own, context, value.shape, value.stride())
    return made


def local_part(value: Any) -> torch.Tensor:
    """Return what this rank has of a DTensor, which is any other tensor itself."""
    part: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return part
