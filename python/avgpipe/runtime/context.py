"""Where in a run the code that is executing now stands, and what layers carry from batch to batch.

A layer that only maps inputs to outputs needs neither. A recurrent layer whose hidden state goes on from one batch
to the next keeps it in a :class:`Carry`, which holds one value per micro-batch and stays right under recomputation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn


class Position(NamedTuple):
    """The place of a forward or backward in a run."""

    pipeline: int = 0
    batch: int = -1  # -1: outside of any pipeline, where every call counts as a new batch
    micro_batch: int = 0


_here = Position()


def position() -> Position:
    """The place of the computation that is running now."""
    return _here


def set_position(there: Position) -> Position:
    """Set the current place and return the one before."""
    global _here
    before, _here = _here, there
    return before


class Carry(nn.Module):
    """A pytree of tensors that a layer carries from a batch to the next one of the same pipeline, per micro-batch.

    Not a part of ``state_dict()``. ``get`` returns what ``set`` stored in the *previous* batch, also when
    recomputation runs a forward a second time, or None at the beginning::

        hidden = self.carry.get()
        output, hidden = self.lstm(x, hidden)
        self.carry.set((hidden[0].detach(), hidden[1].detach()))
    """

    def __init__(self) -> None:
        super().__init__()
        # micro-batch -> (batch that last wrote, value it read, value it wrote)
        self.values: dict[int, tuple[int, Any, Any]] = {}

    def get(self) -> Any:
        batch, read, written = self.values.get(_here.micro_batch, (-1, None, None))
        again = batch == _here.batch and batch != -1
        return read if again else written

    def set(self, value: Any) -> None:
        self.values[_here.micro_batch] = (_here.batch, self.get(), value)

    def reset(self) -> None:
        self.values.clear()

    def forward(self, *_: torch.Tensor) -> None:
        raise TypeError("a Carry is not called; use get() and set()")
