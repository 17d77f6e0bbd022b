"""Optimizers that hold weights by their memory, not by their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from avgpipe.elastic.arena import Arena


def refuse_hidden_weights(optimizer: torch.optim.Optimizer, arena: Arena) -> None:
    """ValueError for an optimizer that has kept views of the weights: where versions take turns in the memory, it would
    change one that is not the newest. What it keeps in ``state`` or of its own is no concern.
    """
    memory = {flat.untyped_storage().data_ptr() for flat in arena.weights if flat.numel()}
    own = {id(p) for p in arena.parameters}
    for name, tensor in _tensors("", vars(optimizer), set()):
        if id(tensor) not in own and _address(tensor) in memory:
            raise ValueError(
                f"{type(optimizer).__name__} keeps weights by their memory, in its attribute {name}, and so would miss "
                "that versions take turns: use an optimizer that reads its parameters, or a schedule that flushes"
            )


def _tensors(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, Mapping):
        parts = iter(value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = enumerate(value)
    elif isinstance(value, torch.optim.Optimizer):
        parts = iter(vars(value).items())
    for key, part in parts:
        yield from _tensors(f"{name}.{key}" if name else str(key), part, seen)


def _address(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else None
