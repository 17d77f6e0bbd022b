"""What a process of an isolated pipeline publishes, in shared memory that other processes of its host read.

A stage replica writes its update and a text to one of two slots, then raises its count of steps. The process
that speaks for its host also has slots for *sums*: what all pipelines of all hosts have published in a step. Such a
slot counts if its head names the step, and an epoch that is still valid. The memory has no name in a file
system; processes that have opened it keep it when this one ends.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from avgpipe.errors import PipelineError
from avgpipe.links.codec import padded
from avgpipe_ext.ring import Bell, Memory

SLOTS = 2
TEXT_BYTES = 8192  # of a published slot
_SUM_TEXT_BYTES = 2**18  # of a slot for sums, which has the texts of all pipelines
_NUMBER = 8  # bytes
_HEAD_BYTES = 64
_HEAD = struct.Struct("<3q")  # of a slot for sums: the number of its ring, its step and its epoch


@dataclass(frozen=True)
class Like:
    """The shapes of what a stage replica publishes.

    Attributes:
        updates: tensors of the reference's update.
        buffers: averaged buffers.
    """

    updates: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]


class TurnSlot:
    """A text, and tensors; ``regions`` are views of tensors of one dtype that lie one after another.

    Attributes:
        text: its bytes.
    """

    def __init__(self, memory: Memory, offset: int, like: Like, text_bytes: int = TEXT_BYTES) -> None:
        self._text = memoryview(memory)[offset : offset + text_bytes]
        self.text = torch.frombuffer(memory, dtype=torch.uint8, count=text_bytes, offset=offset)
        self._most = text_bytes - _NUMBER
        offset += text_bytes
        self.updates, self.buffers = list[torch.Tensor](), list[torch.Tensor]()
        self.update_regions, self.buffer_regions = list[torch.Tensor](), list[torch.Tensor]()
        for given, tensors, regions in (
            (like.updates, self.updates, self.update_regions),
            (like.buffers, self.buffers, self.buffer_regions),
        ):
            begin, dtype = offset, None
            for tensor in given:
                if dtype not in (None, tensor.dtype):
                    regions.append(_flat(memory, dtype, begin, offset))
                    begin = offset
                dtype, size = tensor.dtype, tensor.numel() * tensor.element_size()
                flat = _flat(memory, dtype, offset, offset + size)
                tensors.append(flat.view(tensor.shape))
                offset += padded(size)
            if dtype is not None and offset > begin:
                regions.append(_flat(memory, dtype, begin, offset))

    @staticmethod
    def bytes_of(like: Like, text_bytes: int = TEXT_BYTES) -> int:
        sizes = (t.numel() * t.element_size() for t in (*like.updates, *like.buffers))
        return text_bytes + sum(map(padded, sizes))

    def write(
        self, values: Any, updates: Sequence[torch.Tensor] = (), buffers: Sequence[torch.Tensor] = ()
    ) -> None:
        """Write a text, and tensors; those that are not given must not be read then."""
        text = json.dumps(values).encode()
        if len(text) > self._most:
            raise PipelineError(
                f"the result of a batch is too long, {len(text)} bytes: return fewer metrics from loss_fn"
            )
        for mine, value in (
            *zip(self.updates, updates, strict=bool(updates)),
            *zip(self.buffers, buffers, strict=bool(buffers)),
        ):
            mine.copy_(value)
        self._text[_NUMBER : _NUMBER + len(text)] = text
        self._text[:_NUMBER] = len(text).to_bytes(_NUMBER, "little")

    def read(self) -> Any:
        end = _NUMBER + int.from_bytes(self._text[:_NUMBER], "little")
        return json.loads(bytes(self._text[_NUMBER:end]))


def _flat(memory: Memory, dtype: torch.dtype, begin: int, end: int) -> torch.Tensor:
    count = (end - begin) // dtype.itemsize
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin)


class ProcessMemory:
    """The memory of one process.

    Args:
        memory: of its whole size.
        held: the numbers of its stage replicas.
        like: by stage replica, for those of them whose slots are used here.
        has_sums: whether it has slots for sums.
    """

    def __init__(self, memory: Memory, held: Sequence[int], like: Mapping[int, Like], has_sums: bool) -> None:
        self.memory, self.held, self.has_sums = memory, list(held), has_sums
        bells = [Bell(memory, n * Bell.BYTES) for n in range(2 * len(held) + 2)]
        *counts, self._whole, self.speaker_bell = bells
        self.counts, self.applied_counts = dict(zip(held, counts)), dict(zip(held, counts[len(held) :]))
        offset = len(bells) * Bell.BYTES
        self._heads = []
        for _ in range(SLOTS):
            self._heads.append(memoryview(memory)[offset : offset + _HEAD_BYTES])
            offset += _HEAD_BYTES
        self._note = memoryview(memory)[offset : offset + _NUMBER].cast("d")
        offset += _HEAD_BYTES
        self._slots: dict[int, list[TurnSlot]] = {}
        self._sums: dict[int, list[TurnSlot]] = {}
        for place, shapes in like.items():
            for slots, text_bytes in ((self._slots, TEXT_BYTES), (self._sums, _SUM_TEXT_BYTES)):
                if slots is self._slots or has_sums:
                    size = TurnSlot.bytes_of(shapes, text_bytes)
                    slots[place] = [
                        TurnSlot(memory, offset + n * size, shapes, text_bytes) for n in range(SLOTS)
                    ]
                    offset += SLOTS * size

    @classmethod
    def create(cls, like: Mapping[int, Like], has_sums: bool) -> ProcessMemory:
        """Make the memory of this process. MemoryError if there is not enough."""
        sizes = [TurnSlot.bytes_of(shapes) for shapes in like.values()]
        sizes += [TurnSlot.bytes_of(shapes, _SUM_TEXT_BYTES) for shapes in like.values()] if has_sums else []
        size = (2 * len(like) + 2) * Bell.BYTES + (SLOTS + 1) * _HEAD_BYTES + SLOTS * sum(sizes)
        return cls(Memory.create(size), [*like], like, has_sums)

    @classmethod
    def open(cls, facts: Sequence[Any], like: Mapping[int, Like]) -> ProcessMemory:
        """Open the memory of a process by its :attr:`facts`. OSError where it has ended."""
        path, size, held, has_sums = facts
        shapes = like if [*like] == held else {}  # of another rank only the counts matter
        return cls(Memory.open(path, size), held, shapes, has_sums)

    @property
    def facts(self) -> list[Any]:
        """Where others open it."""
        return [self.memory.path, self.memory.bytes, self.held, self.has_sums]

    def published(self) -> int:
        """Return how many steps all its stage replicas have published."""
        return min(count.count() for count in self.counts.values())

    def applied(self) -> int:
        """Return how many steps all its stage replicas have applied."""
        return min(count.count() for count in self.applied_counts.values())

    @property
    def note(self) -> float:
        """A number that the other processes of the pipeline read; 0.0 at first."""
        return self._note[0]

    @note.setter
    def note(self, number: float) -> None:
        self._note[0] = number

    def slot(self, place: int, turn: int) -> TurnSlot:
        return self._slots[place][turn % SLOTS]

    # ---- sums --------------------------------------------------------------------------------------------------------

    def sums(self, place: int, turn: int) -> TurnSlot:
        return self._sums[place][turn % SLOTS]

    def mark_whole(self, turn: int, epoch: int) -> None:
        """Say that the sums of a step, made in an epoch, are whole."""
        _HEAD.pack_into(self._heads[turn % SLOTS], 0, self._whole.count() + 1, turn, epoch)
        self._whole.ring()

    def whole(self, turn: int) -> int:
        """Return the epoch in which the sums of a step were made whole; -1 if they are not."""
        rings = self._whole.count()  # what was written before is visible now
        ring, of_turn, epoch = _HEAD.unpack(bytes(self._heads[turn % SLOTS][: _HEAD.size]))
        return epoch if 0 < ring <= rings and of_turn == turn else -1
