"""The values that cross the boundaries between the units of a model, and the parts that each unit needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import nn

from avgpipe.model.blocks import BlockSlot, Call, Observed


class Collected(NamedTuple):
    """A tensor inside a block that the model also returns, such as router logits: a leaf of a module's output."""

    value: str
    module: str  # its name in the block
    leaf: int
    leaves: int


@dataclass(frozen=True)
class Anatomy:
    """A model as a chain of units; see ``avgpipe.model.blocks``.

    Attributes:
        model: The whole model.
        call: How it is called.
        observed: Observations of one run of it.
        takes: By unit, the arguments of its block that earlier units must give, each with the name of its
            value. A value that existed before keeps its first name.
        early: Those of them that unit 0 makes, although they are not passed to the first block.
        returns: By leaf of the last block's output, the values that the last unit needs.
        collected: By the number of a block, the tensors inside it that the last unit needs.
        writes: Whether its forward writes to outputs of modules outside of blocks.
        looks_at: By unit, the inputs whose values it needs; of other inputs it only needs shape and dtype.
    """

    model: nn.Module
    call: Call
    observed: Observed
    takes: Sequence[Mapping[BlockSlot, str]] = ()
    early: frozenset[str] = frozenset()
    returns: Mapping[int, str] = field(default_factory=dict)
    collected: Mapping[int, Sequence[Collected]] = field(default_factory=dict)
    writes: bool = False
    looks_at: Sequence[frozenset[str]] = ()

    @cached_property
    def blocks(self) -> list[str]:
        return list(self.observed.calls)

    @property
    def units(self) -> int:
        return len(self.blocks) + 2

    @cached_property
    def _lives(self) -> dict[str, tuple[int, int]]:
        """Return for each value the first and the last unit at whose beginning it exists."""
        lives: dict[str, tuple[int, int]] = {}

        def add(value: str, first: int, last: int) -> None:
            lives[value] = (lives[value][0] if value in lives else first, last)

        for number, found in self.collected.items():
            for one in found:
                add(one.value, number + 2, self.units - 1)
        for unit, taken in enumerate(self.takes):
            for value in taken.values():
                add(value, 1 if value in self.early else unit, unit)
        for value in self.returns.values():
            add(value, self.units - 1, self.units - 1)
        return lives

    def alive(self, unit: int) -> tuple[str, ...]:
        """Return the values that cross the boundary before a unit."""
        return tuple(value for value, (first, last) in self._lives.items() if first <= unit <= last)

    def early_until(self) -> int:
        """Return the last unit that is passed an early value; 0 if there is none."""
        return max(
            (n for n, taken in enumerate(self.takes) if not self.early.isdisjoint(taken.values())), default=0
        )

    def used(self, begin: int, end: int) -> set[str]:
        """Return the values that the units from ``begin`` on, before ``end``, compute with."""
        found = {value for taken in self.takes[begin:end] for value in taken.values()}
        if end == self.units:
            found |= {*self.returns.values(), *(one.value for of in self.collected.values() for one in of)}
        return found

    def needs(self, name: str, units: range) -> bool:
        """Return whether any of ``units`` computes with the parameter or buffer of that name."""
        return not self.observed.units_of.get(name, frozenset()).isdisjoint(units)
