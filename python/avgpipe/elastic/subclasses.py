"""Tensors that wrap others, such as 8-bit optimizer state: functions beyond torch's own methods."""

from __future__ import annotations

from typing import Any

import torch


def is_made_of_others(value: Any) -> bool:
    """Whether a tensor wraps others and lists them: a traceable wrapper subclass, in torch's terms."""
    return isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__")


def copied(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, also if its class, or a wrapped one's, has no clone()."""
    if not is_made_of_others(local_part(value)):
        return value.clone()
    kind: Any = type(value)
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(value, name) for name in names}
    own = {name: copied(part) if isinstance(part, torch.Tensor) else part for name, part in parts.items()}
    made: torch.Tensor = kind.__tensor_unflatten__(own, context, value.shape, value.stride())
    return made


def local_part(value: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor; any other tensor unchanged."""
    part: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return part
