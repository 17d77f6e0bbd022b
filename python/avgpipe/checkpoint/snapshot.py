"""The state of a process at the end of a batch, copied into main memory while training continues."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from avgpipe.checkpoint.content import changed_by_forwards, changed_by_updates
from avgpipe.device import current_stream, pinned_bytes
from avgpipe.model.model import Model
from avgpipe.plan import Plan
from avgpipe.runtime.lane import Lane
from avgpipe.runtime.route import Step, StepKind
from avgpipe.runtime.worker import Worker
from avgpipe_ext.ring import copy as copy_bytes

_PLACE = "place of a tensor"  # the key that distinguishes one from other containers


def may_run(plan: Plan, batches: int) -> bool:
    """Whether snapshots after ``batches`` can be taken while these run: each stage has a moment between.

    If batches run on older weights than the newest, none has. In the middle of a round, one pipeline may be a
    batch behind the others, whose next updates the reference has by then.
    """
    ordered = plan.weights == "flush" and plan.staleness in (0, 1) and plan.period == 1
    return ordered and not plan.spread and not plan.isolate and batches % plan.batches_per_round == 0


class Snapshot:
    """The stage replicas of this process as they were at the end of a batch.

    The batches before it may be in flight. What forwards change is copied when a pipeline's first forward of
    a later batch is due, what updates change when the first update of any pipeline is, and the rest by
    :meth:`finish`::

        pipeline 0   F4 B4 U4 |copy F5 B5 ...... |copy all updates change  U5          after 5 batches of each
        pipeline 1      F4 B4 U4 |copy F5 B5 ...                              U5

    Its memory is kept and reused by the next one: there is one copy, which must not be read any more then.

    Attributes:
        batches: How many had begun before it.
        contents: What a checkpoint holds of each stage replica, by its number; ``restore`` takes it. Empty
            until it is complete.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.contents: dict[int, dict[str, Any]] = {}
        self._memory: list[torch.Tensor] = []
        self._failure: Exception | None = None
        # Stage replicas, with a pipeline for what its forwards change, or None for what updates change.
        self._left: set[tuple[int, int | None]] = set()

    @classmethod
    def of(cls, batches: int, contents: dict[int, dict[str, Any]]) -> Snapshot:
        """Return a snapshot of contents that exist."""
        made = cls()
        made.batches, made.contents = batches, contents
        return made

    def begin(self, model: Model, worker: Worker, batches: int, done: Callable[[], None]) -> None:
        """Copy the state of ``worker`` after ``batches``, before later ones change it; then call ``done``."""
        self._model, self._worker, self._done = model, worker, done
        self.batches, self.contents, self._failure = batches, {}, None
        self._parts: dict[int, dict[str, Any]] = {}
        self._of_forwards: dict[tuple[int, int], dict[str, Any]] = {}
        self._copies = _Copied(self._memory, pinned=worker.streams is not None)
        self._left = {(n, None) for n in worker.held} | set(worker.lanes)
        self._ready: list[Any] = []  # events of a device
        for lane in worker.lanes.values():
            lane.watchers = (*lane.watchers, self._look)

    @property
    def is_under_way(self) -> bool:
        return bool(self._left)

    def finish(self) -> None:
        """Copy the rest; no batch is in flight."""
        for part in sorted(self._left, key=str):
            self._copy(*part)

    def whole(self) -> dict[int, dict[str, Any]]:
        """Return the contents once a device has copied all, or raise the failure; from any thread."""
        for event in self._ready:
            event.synchronize()
        if self._failure is not None:
            raise self._failure
        return self.contents

    def _look(self, lane: Lane, step: Step) -> None:
        if step.batch >= self.batches:
            number = lane.route.replica
            self._copy(number, lane.pipeline)
            if step.kind is StepKind.UPDATE:
                self._copy(number, None)

    @torch.no_grad()
    def _copy(self, number: int, pipeline: int | None) -> None:
        if (number, pipeline) not in self._left:
            return
        model, worker, copies = self._model, self._worker, self._copies
        try:
            if pipeline is None:
                self._parts[number] = copies.of(changed_by_updates(model, worker, number))
            else:
                found = copies.of(changed_by_forwards(model, worker, number, pipeline))
                self._of_forwards[number, pipeline] = found
        except (MemoryError, RuntimeError) as error:  # out of memory, which does not stop training
            self._failure = self._failure or error
        if worker.streams is not None:
            self._ready.append(current_stream(worker.device).record_event())
        self._left.remove((number, pipeline))
        if self._left:
            return
        for lane in worker.lanes.values():
            lane.watchers = tuple(look for look in lane.watchers if look != self._look)
        self._memory = copies.memory
        if self._failure is None:
            for (n, i), found in self._of_forwards.items():
                self._parts[n]["replicas"][i] |= found
            self.contents = self._parts
        self._done()

    def packed(self) -> list[torch.Tensor]:
        """Return the contents for :func:`unpacked`, in the memory that the next one reuses."""
        return _packed(self.contents, self._memory)


# ---- a state as bytes for another process ----------------------------------------------------------------------------


def packed(state: Any) -> list[torch.Tensor]:
    """Return a copy of containers and tensors as bytes for :func:`unpacked`: a text, then the tensors' memory."""
    copies = _Copied([], pinned=False)
    return _packed(copies.of(state), copies.memory)


def _packed(state: Any, memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    numbers = {part.data_ptr(): n for n, part in enumerate(memory)}

    def place_of(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        number = numbers.get(leaf.untyped_storage().data_ptr(), 0)  # any number, for one without elements
        return {_PLACE: [number, leaf.dtype, leaf.storage_offset(), [*leaf.shape], [*leaf.stride()]]}

    text = io.BytesIO()
    torch.save(tree_map(place_of, state), text)
    return [torch.frombuffer(bytearray(text.getvalue()), dtype=torch.uint8), *memory]


def unpacked(parts: Sequence[torch.Tensor]) -> Any:
    """Return the state that was packed; its tensors lie in ``parts``, each of which has memory of its own."""
    text, *memory = parts

    def tensor_at(leaf: Any) -> Any:
        if not (isinstance(leaf, dict) and _PLACE in leaf):
            return leaf
        number, dtype, *place = leaf[_PLACE]
        if 0 in place[1]:
            return torch.empty(place[1], dtype=dtype)
        return torch.empty(0, dtype=dtype).set_(memory[number].untyped_storage(), *place)

    contents = torch.load(io.BytesIO(text.numpy().tobytes()), weights_only=True)
    is_place = lambda value: isinstance(value, dict) and _PLACE in value  # noqa: E731
    return tree_map(tensor_at, contents, is_leaf=is_place)


class _Copied:
    """Copies of containers and their tensors; views of the same memory in one of them stay views of the same.

    Attributes:
        memory: The memory of the tensors.
    """

    def __init__(self, free: list[torch.Tensor], pinned: bool) -> None:
        self.memory: list[torch.Tensor] = []
        self._pinned = pinned
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        for memory in free:
            self._free[memory.numel()].append(memory)
        self._copied: dict[tuple[int, int], torch.Tensor]

    def of(self, value: Any) -> Any:
        self._copied = {}  # tensors copied earlier may have other values now
        return tree_map(self._of_leaf, value)

    def _of_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        memory, size = leaf.untyped_storage(), leaf.untyped_storage().nbytes()
        place = memory.data_ptr(), size
        if place not in self._copied:
            self._copied[place] = self._copy_memory(leaf, size)
        made = torch.empty(0, dtype=leaf.dtype)
        return made.set_(
            self._copied[place].untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride()
        )

    def _copy_memory(self, leaf: torch.Tensor, size: int) -> torch.Tensor:
        free = self._free[size]
        new = pinned_bytes if self._pinned else partial(torch.empty, dtype=torch.uint8)
        target = free.pop() if free else new(size)
        if leaf.device.type == "cpu":  # training does not read it, and needs the caches for other data
            copy_bytes(target.data_ptr(), leaf.untyped_storage().data_ptr(), size, past_caches=True)
        else:
            whole = leaf.detach().as_strided((size // leaf.element_size(),), (1,), 0).view(torch.uint8)
            target[: len(whole)].copy_(whole, non_blocking=self._pinned)
        self.memory.append(target)
        return target
