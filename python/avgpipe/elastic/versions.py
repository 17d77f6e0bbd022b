"""Versions of a stage's weights, for schedules without a flush: parameters point at one at a time.

A version is counted in updates: version v includes v updates. The newest one is what the parameters hold;
older ones have their own buffers. To run a forward or backward on another version, the parameters are pointed
at its buffer, without copying. An update whose version is still needed first copies it, then changes the
copy.

A batch may run on a prediction instead: a version some updates later, as the optimizer's state predicts it.
It is made while its base version is the newest and has its own buffer, so that no update needs a copy.

Pointing is enough because autograd refers to a weight in one of two ways: it has saved the parameter, and
then reads its present target; or a view of it, which stays with the buffer it was made in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from avgpipe.elastic.flat import Arena, hidden_view
from avgpipe.schedule.row import Version

# FSDP's way of changing tensors that autograd has saved; not exported, so the tests run it under every torch.
_preserving_version_counters: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]

Flats: TypeAlias = list[torch.Tensor]


class Versions:
    """The versions of ``arena``; ``newest`` is the number of its updates.

    Args:
        arena: the newest weights.
        predict: writes the newest weights as predicted after ``updates`` more updates; None: batches run on
            old weights.
    """

    def __init__(self, arena: Arena, predict: Callable[[Flats, int], None] | None = None) -> None:
        self._arena, self._predict = arena, predict
        self.newest = 0
        self._shown: Version | None = Version(0)
        self._kept: dict[Version, Flats] = {Version(0): arena.weights}  # the newest too
        self._free: list[Flats] = []

    @property
    def bytes(self) -> int:
        """The size of all buffers except the newest version's."""
        buffers = [*self._kept.values(), *self._free]
        return sum(flat.nbytes for flats in buffers for flat in flats) - sum(
            flat.nbytes for flat in self._arena.weights
        )

    def show(self, version: Version) -> None:
        """Point the parameters at a version, or at its prediction."""
        version = self._place(version)
        if version != self._shown:
            if version not in self._kept:
                self._make(version)
            self._arena.point_at(self._kept[version])
            self._shown = version

    def _place(self, version: Version) -> Version:
        return version if self._predict is not None else version._replace(delay=0)

    def _make(self, version: Version) -> None:
        """Predict from the newest version; KeyError for an older one, which no longer exists."""
        if self._predict is None or version.number != self.newest:
            raise KeyError(version)
        flats = self._buffers(self._arena.weights)
        self._predict(flats, version.delay)
        self._kept[version] = flats

    def _buffers(self, like: Flats) -> Flats:
        return self._free.pop() if self._free else [torch.zeros_like(flat) for flat in like]

    @contextmanager
    def updating(self, needed: Collection[Version]) -> Iterator[Flats | None]:
        """Allow changes of the parameters in place inside; they are the newest version afterwards.

        Yields the weights before, if they are kept.

        Args:
            needed: the versions of batches in flight, and of those to come, as far as they exist.
        """
        places = {self._place(version) for version in needed}
        whole = min((number for number, delay in places if not delay), default=self.newest + 1)
        for place in list(self._kept):
            if place not in places if place.delay else place.number < min(whole, self.newest):
                self._free.append(self._kept.pop(place))
        for place in places:
            if place.delay and place.number == self.newest and place not in self._kept:
                self._make(place)
        old = self._kept[Version(self.newest)]
        if whole <= self.newest:
            new = self._buffers(old)
            for to, flat in zip(new, old):
                to.copy_(flat)
        else:
            new = self._kept.pop(Version(self.newest))
        self._arena.weights = new
        self._arena.point_at(new)
        self._shown = None
        # Tensors saved with an older version are unchanged, though the parameter was changed in place.
        with _preserving_version_counters(tuple(self._arena.parameters)):
            yield old if old is not new else None
        self.newest += 1
        self._shown = Version(self.newest)
        self._kept[self._shown] = new

    def older(self) -> dict[int, Flats]:
        """Return the versions beside the newest that a run needs to resume, by their distance in updates."""
        return {self.newest - v.number: flats for v, flats in self._kept.items() if v.number != self.newest}

    def restore(self, older: dict[int, Flats]) -> None:
        """Restore versions: the newest from the arena, and the older ones as :meth:`older` returned them."""
        self.newest = max(older, default=0)
        self._shown = newest = Version(self.newest)
        # Without batches in flight, the next one runs on a version as many updates old as its gradients are
        # late.
        kept = {self._place(Version(self.newest - b, b)): flats for b, flats in older.items()}
        self._free, self._kept = [], {**kept, newest: self._arena.weights}


def refuse_hidden_weights(optimizer: torch.optim.Optimizer, arena: Arena) -> None:
    """Refuse, with ValueError, an optimizer that has kept views of the weights.

    Since versions exchange their memory, it would change one that is not the newest. Tensors in its ``state``
    or memory of its own do not matter.
    """
    name = hidden_view(optimizer, arena.parameters, arena.weights)
    if name is not None:
        raise ValueError(
            f"{type(optimizer).__name__} keeps weights by their memory, in its attribute {name}, and so would miss "
            "that versions exchange it: use an optimizer that reads its parameters, or a schedule that flushes"
        )


# ---- the average over time -------------------------------------------------------------------------------------------


class WeightAverage:
    """Averages flat weights by the rule of ``torch.optim.swa_utils``.

    The first update copies the weights; each later one moves the average by ``1 - decay`` of the way to them.

    Args:
        weights: the weights before the first update.
        decay: from 0 to 1.

    Attributes:
        flats: the average. Of weights in 16 bits it is float32, as small changes would be lost otherwise.
        updates: the number of updates in it.
    """

    def __init__(self, weights: Sequence[torch.Tensor], decay: float) -> None:
        self._share = 1 - decay
        self._dtypes = [flat.dtype for flat in weights]
        self.flats = [flat.detach().to(_wide(flat.dtype), copy=True) for flat in weights]
        self.updates = 0

    @property
    def weights(self) -> list[torch.Tensor]:
        """The average in the dtypes of the weights."""
        return [flat.to(dtype) for flat, dtype in zip(self.flats, self._dtypes)]

    @torch.no_grad()
    def update(self, weights: Sequence[torch.Tensor]) -> None:
        """Add the weights after an update."""
        if self.updates == 0:
            self.restart(weights)
        elif self.flats:
            values = [w.to(flat.dtype) for w, flat in zip(weights, self.flats)]
            torch._foreach_lerp_(self.flats, values, self._share)
        self.updates += 1

    @torch.no_grad()
    def restart(self, weights: Sequence[torch.Tensor]) -> None:
        """Start again at ``weights``."""
        self.updates = 0
        for flat, value in zip(self.flats, weights):
            flat.copy_(value)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
