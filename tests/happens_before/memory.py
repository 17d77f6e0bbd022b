"""Who touches which bytes, and whether that is in order.

Two accesses to the same bytes, one of them a write, on two streams of which neither waits for the other, are a race:
the numbers depend on which stream is ahead. Memory that is freed goes to the next allocation on the stream where it was
allocated, as the caching allocators of accelerators do: whoever used it on another stream must have told the allocator
by ``record_stream``, or that stream must have waited for him.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, defaultdict
from typing import NamedTuple

import torch

from tests.happens_before.clocks import Operation, Stream


class Access(NamedTuple):
    operation: Operation
    what: str


class Allocation:
    """Memory of the device, and the newest accesses to each of its parts, by stream.

    Attributes:
        home: the stream on which it was allocated.
        recorded: numbers of the other streams that the allocator was told of.
    """

    def __init__(self, home: Stream) -> None:
        self.home, self.recorded = home, set[int]()
        # By begin and end in bytes, stream, and whether it writes.
        self.accesses: dict[tuple[int, int, int, bool], Access] = {}


class Memory:
    """All memory of the device. ``found``: what is not in order, and how often."""

    def __init__(self, found: Counter[str] | None = None) -> None:
        self.found: Counter[str] = Counter() if found is None else found
        # So far. Orderings: pairs that had to be, and were, looked at.
        self.accesses = self.orderings = self.reuses = 0
        # Threads that receive copy to the device too; and memory may be freed anywhere.
        self._lock = threading.RLock()
        self._allocations: dict[int, Allocation] = {}
        self._freed: dict[int, list[Allocation]] = defaultdict(list)  # by home

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return has_storage(tensor) and storage_of(tensor) in self._allocations

    def allocate(self, tensor: torch.Tensor, stream: Stream) -> Allocation:
        """Take a tensor's memory for the device's, allocated on ``stream``."""
        key = storage_of(tensor)
        made = self._allocations.get(key)
        if made is None:
            self.reuse(stream)
            made = self._allocations[key] = Allocation(stream)
            weakref.finalize(tensor.untyped_storage(), self.free, key).atexit = False
        return made

    def free(self, key: int) -> None:
        gone = self._allocations.pop(key, None)
        if gone is not None:
            self._freed[gone.home.number].append(gone)

    def reuse(self, stream: Stream) -> None:
        """Give all that was freed to what ``stream`` allocates next: any of it may be what it gets."""
        for gone in self._freed.pop(stream.number, ()):
            self.reuses += 1
            for (_, _, number, _), access in gone.accesses.items():
                if number != stream.number and number not in gone.recorded:
                    self.orderings += 1
                    if not stream.follows(access.operation):
                        self.found[
                            f"freed and reused on {stream} while in use, without record_stream: {access.what}"
                        ] += 1

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        allocation = self._allocations.get(storage_of(tensor))
        if allocation is not None:
            allocation.recorded.add(stream.number)

    def access(
        self, tensor: torch.Tensor, stream: Stream, operation: Operation, what: str, writes: bool
    ) -> None:
        """Note that an operation reads, or writes, a tensor; it must be in the device's memory."""
        allocation = self._allocations[storage_of(tensor)]
        if tensor.numel() == 0:
            return
        with self._lock:
            self._access(allocation, tensor, stream, Access(operation, what), writes)

    def _access(
        self, allocation: Allocation, tensor: torch.Tensor, stream: Stream, new: Access, writes: bool
    ) -> None:
        self.accesses += 1
        size = tensor.element_size()
        begin = tensor.storage_offset() * size
        end = begin + (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1) * size
        clock, here = stream.clock, stream.number
        over = []
        for place, access in allocation.accesses.items():
            first, last, number, wrote = place
            if first < end and begin < last and (writes or wrote):
                if number != here:
                    self.orderings += 1
                    if clock.get(number, 0) < access.operation.number:
                        kinds = f"{'writes' if wrote else 'reads'}, then {'writes' if writes else 'reads'}"
                        self.found[f"race ({kinds}): {access.what} / {new.what}"] += 1
                # Whoever comes after this one comes after that one, or races with this one.
                if writes and begin <= first and last <= end:
                    over.append(place)
        for place in over:
            del allocation.accesses[place]
        allocation.accesses[begin, end, here, writes] = new

    def look(self, tensor: torch.Tensor, host: dict[int, int], what: str) -> None:
        """Note that the host reads a tensor in its own memory, which a stream may still write."""
        with self._lock:
            accesses = list(self._allocations[storage_of(tensor)].accesses.items())
        for (_, _, number, wrote), access in accesses:
            self.orderings += 1
            if wrote and host.get(number, 0) < access.operation.number:
                self.found[f"race (writes, then the host reads): {access.what} / {what}"] += 1


def has_storage(value: object) -> bool:
    """Whether it is a tensor whose memory can be looked at; that of a sparse one cannot."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def place(depth: int = 2) -> str:
    """The innermost line of the package that is running, such as runtime/compute.py:120."""
    frame = sys._getframe(depth)
    while frame is not None:
        _, mark, rest = frame.f_code.co_filename.rpartition("/python/avgpipe/")
        if mark:
            return f"{rest}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "the caller"
