"""Groups of torch.distributed over hosts, made by processes that the coordinator connects.

What they need to find each other goes through the coordinator, which knows its processes; the groups' own connections
are neither authenticated nor encrypted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from avgpipe.fault.membership import Membership
from avgpipe.ranks.met import break_off

_LIMIT = 2  # of waits, in the timeouts after which the coordinator aborts them
_SEGMENT = 2**20  # bytes, of a message
_RESULT = 2**20  # tags from here on are of sums
_TEXT = 2**21 - 1  # of texts


class Meeting(dist.Store):  # type: ignore[name-defined,misc]
    """A store whose texts go through the coordinator."""

    def __init__(
        self, membership: Membership, name: str, goes_on: Callable[[], bool], limit_s: float
    ) -> None:
        super().__init__()
        self._membership, self._name, self._goes_on, self._limit_s = membership, name, goes_on, limit_s

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._membership.post(self._name, key, data.hex())

    def get(self, key: str) -> bytes:
        text = self._membership.posted(self._name, key, self._goes_on, self._limit_s)
        return bytes.fromhex(text)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class HostGroup:
    """A group of processes, with gloo; this one is ``index`` of ``size``.

    RuntimeError from any method where another one has ended, or the group was aborted.

    Attributes:
        awaited: the process that a method waits for, or has failed with; None for none.
    """

    def __init__(
        self,
        membership: Membership,
        name: str,
        index: int,
        size: int,
        goes_on: Callable[[], bool],
        address: str,
    ) -> None:
        limit_s = _LIMIT * membership.timeout_s
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [_device(address)]
        options._timeout = timedelta(seconds=limit_s)
        store = Meeting(membership, name, goes_on, limit_s)
        self._group = gloo(store, index, size, options)
        self.index, self.size = index, size
        self.awaited: int | None = None
        self._inbox: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def send(self, tensor: torch.Tensor, target: int, tag: int = 0) -> Any:
        return self._group.send([tensor], target, tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Any:
        return self._group.recv([tensor], source, tag)

    def abort(self) -> None:
        """End all that is under way here, at once, with an error."""
        break_off(self._group, (self.index + 1) % self.size)

    def texts(self, text: bytes, sizes: Sequence[int]) -> Callable[[], list[bytes]]:
        """Begin to exchange texts; return a function that waits for them, and returns that of every process.

        ``sizes``: the most bytes of each.
        """
        buffers = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        buffers[self.index][: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        others = [n for n in range(self.size) if n != self.index]
        works = [(self.receive(buffers[n], n, _TEXT), n) for n in others]
        works += [(self.send(buffers[self.index], n, _TEXT), n) for n in others]

        def found() -> list[bytes]:
            for work, other in works:
                self._wait(work, other)
            self.awaited = None
            return [bytes(buffer.numpy()).rstrip(b"\0") for buffer in buffers]

        return found

    def sum(self, own: torch.Tensor, out: torch.Tensor, wire: torch.dtype | None = None) -> None:
        """Write the sum of all processes' ``own`` into ``out``, with the same bits everywhere.

        Each process sums one part, in the order of processes and in the tensors' dtype, and passes it on; so
        each sends and receives less than twice the tensor. It goes in segments, for all lines to be busy.

        Args:
            own, out: flat, of one size and dtype, in main memory; they may not overlap.
            wire: dtype of what is sent; None: the tensors'.
        """
        kept = own.dtype if wire is None or not own.is_floating_point() else wire
        length = max(1, _SEGMENT // kept.itemsize)
        each = -(-own.numel() // self.size)
        ends = [min(n * each, own.numel()) for n in range(self.size + 1)]
        parts = [
            [(a, min(a + length, end)) for a in range(begin, end, length)] for begin, end in pairwise(ends)
        ]
        others = [(self.index + n) % self.size for n in range(1, self.size)]
        mine = parts[self.index]
        inbox = self._buffer(kept, (self.size - 1) * (ends[self.index + 1] - ends[self.index]))
        rows, coming, at = {}, {}, 0
        for n, (a, b) in enumerate(mine):
            for source in others:
                rows[source, n] = inbox[at : at + b - a]
                coming[source, n] = self.receive(rows[source, n], source, n)
                at += b - a
        sums: list[tuple[Any, int, torch.Tensor, torch.Tensor]] = []
        for source in others:
            for n, (a, b) in enumerate(parts[source]):
                into = out[a:b] if kept == own.dtype else torch.empty(b - a, dtype=kept)
                sums.append((self.receive(into, source, _RESULT + n), source, into, out[a:b]))
        sent: list[tuple[Any, int, torch.Tensor]] = []
        for n in range(max(map(len, parts))):
            for target in others:
                for a, b in parts[target][n : n + 1]:
                    piece = own[a:b].to(kept)
                    sent.append((self.send(piece, target, n), target, piece))
        for n, (a, b) in enumerate(mine):
            total = out[a:b]
            for source in range(self.size):
                if source != self.index:
                    self._wait(coming[source, n], source)
                row = own[a:b] if source == self.index else rows[source, n]
                if source == 0:
                    total.copy_(row)
                else:
                    total.add_(row)
            piece = total.to(kept)
            if kept != own.dtype:
                total.copy_(piece)
            sent += [(self.send(piece, target, _RESULT + n), target, piece) for target in others]
        for work, source, into, target_of in sums:
            self._wait(work, source)
            if into.dtype != target_of.dtype:
                target_of.copy_(into)
        for work, target, _ in sent:
            self._wait(work, target)
        self.awaited = None

    def _wait(self, work: Any, process: int) -> None:
        self.awaited = process
        work.wait()

    def _buffer(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        found = self._inbox.get((dtype, count))
        if found is None:
            found = self._inbox[dtype, count] = torch.empty(count, dtype=dtype)
        return found


def _device(address: str) -> object:
    """Return gloo's device: of the interface that the user has chosen, else of an address of this host."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if chosen != "lo" and not address.startswith("127."):
        return dist.ProcessGroupGloo.create_device(interface=chosen)
    return dist.ProcessGroupGloo.create_device(hostname=address)
