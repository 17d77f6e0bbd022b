"""What a stage receives, made usable like any activation: tensors that its layers write to are copied first.

A received tensor may lie in memory that others read, such as a slot of another process or an activation that the
stage before has saved; it is the leaf whose gradient goes back; and recomputation begins with it. So the first forward
runs on copies, whose version counters show which of them the layers write to. From then on only those are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from avgpipe.errors import StageError
from avgpipe.runtime.context import Position

_Layers = Callable[[Any, Position], Any]


class Inputs:
    """What one stage, number ``index``, has been seen to write to."""

    def __init__(self, index: int) -> None:
        self._index = index
        # Leaves of the input, by whether the layers train: they may do otherwise when they are evaluated.
        self._written: dict[bool, set[int]] = {}

    @property
    def known(self) -> bool:
        """Whether a forward that trains has run, so that the next one copies no more than it must."""
        return True in self._written

    def run(self, layers: _Layers, value: Any, place: Position, training: bool, again: bool) -> Any:
        """``layers(value, place)``, but ``value`` stays as it is. ``again``: it is needed for another forward."""
        written = self._written.get(training)
        if written is None or written or again:
            return self._checked(layers, value, place, training, again)
        try:
            return layers(
                value, place
            )  # the common case, and no look at it: torch itself refuses to change a leaf
        except StageError as error:
            if not writes_to_a_leaf(error):
                raise
        self._written[training] = set(range(len(pytree.tree_leaves(value))))  # torch does not say to which
        return self._checked(layers, value, place, training, again)

    def _checked(self, layers: _Layers, value: Any, place: Position, training: bool, again: bool) -> Any:
        leaves, structure = pytree.tree_flatten(value)
        tensors = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        written = self._written.get(training)
        copied = tensors.keys() if written is None else written & tensors.keys()
        for n in copied:
            leaves[n] = tensors[n].clone()
        versions = {n: leaves[n]._version for n in tensors}
        try:
            output = layers(pytree.tree_unflatten(leaves, structure) if copied else value, place)
        except StageError as error:
            # A layer that writes for the first time, as those do that are left out at random: torch does not say to
            # which leaf, and has changed none.
            if written is None or copied == tensors.keys() or not writes_to_a_leaf(error):
                raise
            self._written[training] = set(tensors)
            return self._checked(layers, value, place, training, again)
        found = {n for n in tensors if leaves[n]._version != versions[n]}
        if written is None:
            self._written[training] = found
        elif late := found - written:
            written |= late
            if again:
                raise StageError(
                    f"stage {self._index} changed in place a tensor that it received, which no forward before this "
                    "one did, and recomputation needs it as it was: change a clone() of it in the layer"
                )
        return output


def writes_to_a_leaf(error: StageError) -> bool:
    """Whether torch has refused to change a tensor whose gradient is wanted."""
    text = str(error.__cause__)
    return "leaf Variable that requires grad" in text and "in-place" in text
