"""What a process holds at the end of a batch, copied into main memory, so that training can go on meanwhile."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch.utils._pytree import tree_map

from avgpipe.checkpoint.content import content_of
from avgpipe.model.model import Model
from avgpipe.runtime.worker import Worker


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
        target = free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        target.copy_(torch.empty(0, dtype=torch.uint8, device=device).set_(memory), non_blocking=self._pinned)
        self.memory.append(target)
        return target
