"""What SGD and Adam remember of their parameters: in their own ``state_dict`` format, at the parameters' places.

Of parameters that are views of one tensor the state tensors are too, so that one pass over flat memory moves them.
State that others made, as by ``load_state_dict``, is moved to its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, count
from operator import is_, itemgetter
from typing import Any

import torch

from avgpipe.elastic.places import Places, Span, Unfusable, memory


class Slots:
    """State tensors called ``name``, one for each parameter: views of flat memory, or as torch makes them."""

    def __init__(self, name: str, places: Places) -> None:
        self.name, self.places = name, places
        self.tensors: list[torch.Tensor | None] = [None] * len(places.params)
        self._flats: dict[int, torch.Tensor] = {}
        self.revision = 0  # moves when another tensor is put in the place of one

    def of(self, i: int) -> torch.Tensor:
        mine = self.tensors[i]
        assert mine is not None, "no state yet"
        return mine

    def flat(self, span: Span) -> torch.Tensor:
        return memory(self._flats[span.owner], span.start, span.numel)

    def make(self, i: int) -> torch.Tensor:
        """Zeros for parameter i."""
        p, home = self.places.params[i], self.places.homes[i]
        mine = self.tensors[i]
        if home is None or self.places.is_whole(home):
            mine = torch.zeros_like(p, requires_grad=False)
        elif mine is None:
            mine = self._flat_of(home.owner).as_strided(p.shape, p.stride(), home.start)
        else:
            return mine.zero_()
        return self._put(i, mine)

    def take(self, i: int, value: Any) -> torch.Tensor:
        """``value`` in its place; the same tensor where it may stay. Unfusable if it is not like the parameter."""
        p, home = self.places.params[i], self.places.homes[i]
        if not isinstance(value, torch.Tensor) or value.shape != p.shape or value.dtype != p.dtype:
            raise Unfusable(f"{self.name} of parameter {i} has not the parameter's shape and dtype")
        stays = home is None or self.places.is_whole(home)
        if stays and value.stride() == p.stride() and value.device == p.device:
            return self._put(i, value)
        return self.make(i).copy_(value)

    def _put(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        self.tensors[i] = tensor
        self.revision += 1
        return tensor

    def _flat_of(self, owner: int) -> torch.Tensor:
        if owner not in self._flats:
            t = self.places.owners[owner]
            self._flats[owner] = torch.zeros(t.numel(), dtype=t.dtype, device=t.device)
        return self._flats[owner]


class Counters:
    """Adam's step counters of one parameter group: views of one tensor."""

    def __init__(self, members: range, dtype: torch.dtype, device: torch.device) -> None:
        self.members, self.kind = members, (dtype, device)
        self.flat = torch.zeros(len(members), dtype=dtype, device=device)
        self.views = [self.flat[n] for n in range(len(members))]
        self._marks: list[float] | None = None  # on an accelerator: equal ones for counters known to be equal
        self._fresh = count(-1.0, -1.0)

    def of(self, i: int) -> torch.Tensor:
        return self.views[i - self.members.start]

    def put(self, i: int, value: Any) -> torch.Tensor:
        self._marks = None
        mine = self.of(i)
        return mine.copy_(value) if isinstance(value, torch.Tensor) else mine.fill_(value)

    def ages(self, stepping: Sequence[int]) -> list[float]:
        """Equal numbers for equal counters, and the same ones when all have made one step more."""
        on_host = self.kind[1].type == "cpu"
        if on_host or self._marks is None:
            self._marks = self.flat.tolist()
        assert self._marks is not None
        mine = [self._marks[i - self.members.start] for i in stepping]
        return [value - mine[0] for value in mine] if on_host else mine

    def advance(self, stepping: Sequence[int], by: float | torch.Tensor) -> None:
        """Count a step of some parameters; a tensor on the device for what the host does not know."""
        if isinstance(by, torch.Tensor):
            by = by.to(self.flat.dtype).reshape(())
        if len(stepping) == len(self.views):
            self.flat.add_(by)
            return
        torch._foreach_add_([self.of(i) for i in stepping], by)
        if self._marks is not None:  # whether they are equal to the others now, the device knows
            new: dict[float, float] = {}
            for i in stepping:
                n = i - self.members.start
                self._marks[n] = new.setdefault(self._marks[n], next(self._fresh))


class Watch:
    """What an optimizer's state held when last looked at, to see at little cost that it still does.

    KeyError if the state of one of ``params`` lacks one of ``names``.
    """

    def __init__(
        self, state: Mapping[torch.Tensor, Any], params: Iterable[torch.Tensor], names: Sequence[str]
    ) -> None:
        self._all = list(state.values())
        self._seen = [state[p] for p in params]
        self._get = itemgetter(*names, names[0])  # once more: of one name it would not give a tuple
        self._tensors = list(chain.from_iterable(map(self._get, self._seen)))

    def holds(self, state: Mapping[torch.Tensor, Any]) -> bool:
        if len(state) != len(self._all) or not all(map(is_, state.values(), self._all)):
            return False
        try:
            return all(map(is_, chain.from_iterable(map(self._get, self._seen)), self._tensors))
        except KeyError:
            return False
