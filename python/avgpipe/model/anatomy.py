"""What has to cross the boundaries between the units of a model, and which parts each unit needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import nn

from avgpipe.model.blocks import BlockSlot, Call, Observed


class Collected(NamedTuple):
    """A tensor of a block's inside that the model returns, as router logits: a leaf of what a module returned."""

    value: str
    module: str  # by its name in the block
    leaf: int
    leaves: int


@dataclass(frozen=True)
class Anatomy:
    """A model as a chain of units; see ``avgpipe.model.blocks``.

    Attributes:
        model: the whole.
        call: how it is called.
        observed: what one run of it has shown.
        takes: by unit, what its block is called with that earlier units must give, each with the name of its value.
            A value that was there before has the name that it got first.
        early: those of them that unit 0 makes, although the first block is not given them.
        returns: by leaf of what the last block returns, the values that the last unit needs.
        collected: by the number of a block, what of its inside the last unit needs.
        writes: whether its forward writes to what modules outside of blocks return.
        looks_at: by unit, the inputs whose values it needs; of others it needs no more than shape and dtype.
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
        """By value, the first and the last unit at whose beginning it is there."""
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
        """Return the last unit that is given an early value; 0 if there is none."""
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
        """Whether any of ``units`` computes with the parameter or buffer of that name."""
        return not self.observed.units_of.get(name, frozenset()).isdisjoint(units)
