"""Weights of a stage that batches in flight still need, beside the newest ones.

A version is counted in updates: version v is what v updates have made. The newest one is what the parameters hold;
older ones lie in buffers of their own. To forward or backward a batch on another version the parameters are pointed at
its buffer, which moves no bytes. An update whose version somebody still needs first copies it, then changes the copy.

Pointing is enough because autograd finds a weight in one of two ways: it has saved the parameter, and then reads what
it points at now; or a view of it, which stays with the buffer it was made in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from avgpipe.elastic.flat import Arena, hidden_view

# FSDP's way of changing what autograd has saved on purpose; not exported, so the tests run it under every torch.
_preserving_version_counters: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]


class Versions:
    """The versions of ``arena``; ``newest`` is the number of its updates."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.newest = 0
        self._shown = 0
        self._kept: dict[int, list[torch.Tensor]] = {0: arena.weights}  # the newest too
        self._free: list[list[torch.Tensor]] = []

    @property
    def bytes(self) -> int:
        """The size of all buffers but the newest version's."""
        buffers = [*self._kept.values(), *self._free]
        return sum(flat.nbytes for flats in buffers for flat in flats) - sum(
            flat.nbytes for flat in self._arena.weights
        )

    def show(self, version: int) -> None:
        """Point the parameters at a version."""
        if version != self._shown:
            self._arena.point_at(self._kept[version])
            self._shown = version

    def forget_before(self, version: int) -> None:
        """Nobody needs versions below ``version`` any more; the newest one stays."""
        for old in [v for v in self._kept if v < min(version, self.newest)]:
            self._free.append(self._kept.pop(old))

    @contextmanager
    def updating(self, needed_from: int) -> Iterator[None]:
        """The parameters may be changed in place inside, and are the newest version afterwards.

        ``needed_from``: the lowest version that batches in flight, or to come, still need.
        """
        self.forget_before(needed_from)
        old = self._kept[self.newest]
        if needed_from <= self.newest:
            new = self._free.pop() if self._free else [torch.empty_like(flat) for flat in old]
            for to, flat in zip(new, old):
                to.copy_(flat)
        else:
            new = self._kept.pop(self.newest)
        self._arena.weights = new
        self._arena.point_at(new)
        self._shown = -1
        # What was saved with an older version is still what it was, though the parameter was changed in place.
        with _preserving_version_counters(tuple(self._arena.parameters)):
            yield
        self.newest += 1
        self._kept[self.newest] = new
        self._shown = self.newest

    def older(self) -> dict[int, list[torch.Tensor]]:
        """What a run needs beside the newest weights to go on: versions by how many updates they lie behind."""
        return {self.newest - v: flats for v, flats in self._kept.items() if v != self.newest}

    def restore(self, older: dict[int, list[torch.Tensor]]) -> None:
        """The arena has the newest weights, and these are those before it; as :meth:`older` gave them."""
        behind = max(older, default=0)
        self.newest = self._shown = behind
        self._free, kept = [], {behind - back: flats for back, flats in older.items()}
        self._kept = {**kept, behind: self._arena.weights}


def refuse_hidden_weights(optimizer: torch.optim.Optimizer, arena: Arena) -> None:
    """Refuse, with ValueError, an optimizer that has kept views of the weights.

    Where versions take turns in the memory, it would change one that is not the newest. What it keeps in ``state`` or
    of its own is no concern.
    """
    name = hidden_view(optimizer, arena.parameters, arena.weights)
    if name is not None:
        raise ValueError(
            f"{type(optimizer).__name__} keeps weights by their memory, in its attribute {name}, and so would miss "
            "that versions take turns: use an optimizer that reads its parameters, or a schedule that flushes"
        )
