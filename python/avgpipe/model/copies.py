"""Copies of modules, and explanations why one cannot be made."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn

from avgpipe.errors import reason

M = TypeVar("M", bound=nn.Module)


def copied(model: M, memo: dict[int, Any]) -> M:
    """Return a deep copy. ``memo``: by identity, the replacement of an object in the copy.

    A tensor with a graph that a forward has left in an attribute is copied without the graph. ValueError
    names the module and the attribute that cannot be copied.
    """
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
    known = dict(memo)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # of any kind: objects define how they are copied
        raise ValueError(_why(model, known) or f"the model cannot be copied: {reason(error)}") from error


def _why(model: nn.Module, memo: dict[int, Any]) -> str | None:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_modules", "_parameters", "_buffers"):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception as error:
                where = f"module {name!r}" if name else "the model"
                return (
                    f"{where} ({type(module).__name__}) cannot be copied, as its attribute {key!r} is a "
                    f"{type(value).__name__} ({reason(error)}), and a Pipeline trains a copy: make it in forward, or "
                    "give the module a __deepcopy__"
                )
    return None
