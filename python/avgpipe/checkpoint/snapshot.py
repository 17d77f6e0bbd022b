"""What a process holds at the end of a batch, copied into main memory, so that training can go on meanwhile."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from avgpipe.checkpoint.content import content_of
from avgpipe.device import pinned_bytes
from avgpipe.model.model import Model
from avgpipe.runtime.worker import Worker

_PLACE = "place of a tensor"  # the key that tells one from other containers


class Snapshot:
    """The stage replicas of this process as they were at a batch's end.

    Its memory is kept, and the next :meth:`take` uses it again: there is one copy, which nobody may read any more then.

    Attributes:
        batches: Begun before it was taken.
        contents: What a checkpoint holds of each stage replica, by its number; ``restore`` takes it.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.contents: dict[int, dict[str, Any]] = {}
        self._memory: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self, model: Model, worker: Worker, batches: int) -> None:
        """Copy what ``worker`` holds after ``batches``; none may be in flight."""
        copies = _Copies(self._memory, pinned=worker.streams is not None)
        self.contents = {n: copies.of(content_of(model, worker, n)) for n in worker.held}
        self._memory, self.batches = copies.memory, batches
        worker.wait_for_device(recorded=False)

    def taken_apart(self) -> tuple[bytes, list[torch.Tensor]]:
        """Return the contents as a text for :func:`put_together`, and the memory that their tensors are in."""
        numbers = {memory.data_ptr(): n for n, memory in enumerate(self._memory)}

        def place_of(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            number = numbers.get(leaf.untyped_storage().data_ptr(), 0)  # any will do for one without elements
            return {_PLACE: [number, leaf.dtype, leaf.storage_offset(), [*leaf.shape], [*leaf.stride()]]}

        text = io.BytesIO()
        torch.save(tree_map(place_of, self.contents), text)
        return text.getvalue(), self._memory


def put_together(text: bytes, memory: Sequence[torch.Tensor]) -> dict[int, dict[str, Any]]:
    """Return the contents of a snapshot that was taken apart, whose tensors lie in ``memory``."""

    def tensor_at(leaf: Any) -> Any:
        if not (isinstance(leaf, dict) and _PLACE in leaf):
            return leaf
        number, dtype, *place = leaf[_PLACE]
        if 0 in place[1]:
            return torch.empty(place[1], dtype=dtype)
        return torch.empty(0, dtype=dtype).set_(memory[number].untyped_storage(), *place)

    contents = torch.load(io.BytesIO(text), weights_only=True)
    is_place = lambda value: isinstance(value, dict) and _PLACE in value  # noqa: E731
    found: dict[int, dict[str, Any]] = tree_map(tensor_at, contents, is_leaf=is_place)
    return found


class _Copies:
    """Copies of containers and their tensors; views of the same memory are such again.

    Attributes:
        memory: What the tensors are in.
    """

    def __init__(self, free: list[torch.Tensor], pinned: bool) -> None:
        self.memory: list[torch.Tensor] = []
        self._pinned = pinned
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        for memory in free:
            self._free[memory.numel()].append(memory)
        self._copied: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        return tree_map(self._of_leaf, value)

    def _of_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        memory, size = leaf.untyped_storage(), leaf.untyped_storage().nbytes()
        place = memory.data_ptr(), size
        if place not in self._copied:
            self._copied[place] = self._copy(memory, size, leaf.device)
        made = torch.empty(0, dtype=leaf.dtype)
        return made.set_(
            self._copied[place].untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride()
        )

    def _copy(self, memory: torch.UntypedStorage, size: int, device: torch.device) -> torch.Tensor:
        free = self._free[size]
        new = pinned_bytes if self._pinned else partial(torch.empty, dtype=torch.uint8)
        target = free.pop() if free else new(size)
        target.copy_(torch.empty(0, dtype=torch.uint8, device=device).set_(memory), non_blocking=self._pinned)
        self.memory.append(target)
        return target
