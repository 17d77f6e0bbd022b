"""The ways that a message can go from one process to the other and back, each timed alike.

A way is made by both ranks, in the same order. ``exchange`` sends messages to and fro, one at a time, and says how long
one takes in one direction, from the beginning of the call that sends it until the other end has it as a tensor.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from avgpipe.errors import PeerLost, PipelineTimeout
from avgpipe.links.group import GroupLink
from avgpipe.links.link import Endpoint, Link, LocalLink, Mailbox
from avgpipe.links.message import Channel, Key, Message
from avgpipe.links.shared import Inbox, SharedLink
from avgpipe.ranks.world import gather
from avgpipe_ext import ring

_CPU = torch.device("cpu")
_ALONE, _CROWDED = 1, 1 << 20  # neighbours, with which a mailbox spins and does not


class Way(Protocol):
    def exchange(self, count: int) -> float:
        """Seconds of one direction, the mean of ``count`` round trips. Both ranks call it with the same count."""
        ...


Read = Callable[[torch.Tensor], object]


def leave(tensor: torch.Tensor) -> None:
    """The message was handed over; nobody looks at it."""


def add_up(tensor: torch.Tensor) -> torch.Tensor:
    """One look at every byte."""
    return tensor.sum()


def payload(size: int, rank: int) -> torch.Tensor:
    """So many bytes, int64, a source of the rank's own."""
    return torch.arange(rank, rank + size // 8)


@dataclass
class Peers:
    """This process and the other one: ranks 0 and 1, whose stages have the same numbers."""

    timeout_s: float

    def __post_init__(self) -> None:
        self.rank = dist.get_rank()
        self.other = 1 - self.rank

    def into(self, rank: int) -> list[Channel]:
        """The one channel that ends there: activations go up, gradients go down."""
        return [Channel(Message("FB"[1 - rank]), 0, 1 - rank, rank)]

    def key(self, rank: int, number: int) -> Key:
        """Of message ``number`` to a rank."""
        return Key(*self.into(rank)[0], number, 0)

    def inboxes(self) -> tuple[Inbox, int, Inbox]:
        """This process's own, and the other one's id and inbox."""
        mine = Inbox.create(self.into(self.rank))
        theirs = gather(mine.offer())[self.other]
        opened = theirs["pid"], Inbox.open(theirs, self.into(self.other))
        dist.barrier()  # its file must stay open until both have opened the other's
        return mine, *opened

    def lost(self, doing: str) -> PeerLost:
        return PeerLost(f"the other process is gone; seen when {doing}")


class RingAlone:
    """The native ring without Python: copied into a slot, noticed, and copied into a slot of the way back."""

    def __init__(self, peers: Peers, size: int, spin_s: float) -> None:
        mine, pid, theirs = peers.inboxes()
        (into_me,), (into_them,) = peers.into(peers.rank), peers.into(peers.other)
        self._sender = theirs.sender(into_them)
        self._receiver = mine.receiver(into_me, pid)
        self._bell, self._peers, self._size, self._spin_s = mine.bell, peers, size, spin_s

    def exchange(self, count: int) -> float:
        return ring.echo(
            *(self._sender, self._receiver, self._bell),
            rounds=count,
            bytes=self._size,
            spin_s=self._spin_s,
            timeout_s=self._peers.timeout_s,
            is_first=self._peers.rank == 0,
        )


class Through:
    """A link of the runtime, with the mailbox on which its worker waits."""

    def __init__(self, peers: Peers, link: Link, mailbox: Mailbox) -> None:
        self._peers, self.link, self._mailbox = peers, link, mailbox
        self._next = 0

    def sending(self, size: int, read: Read = leave) -> Sending:
        return Sending(self, payload(size, self._peers.rank), read)

    def exchange(self, count: int, source: torch.Tensor, read: Read) -> float:
        begin = time.perf_counter()
        for number in range(self._next, self._next + count):
            if self._peers.rank == 0:
                self.link.send(self._peers.key(1, number), source)
                self._receive(number, read)
            else:
                self._receive(number, read)
                self.link.send(self._peers.key(0, number), source)
        self._next += count
        return (time.perf_counter() - begin) / (2 * count)

    def _receive(self, number: int, read: Read) -> None:
        key, mailbox = self._peers.key(self._peers.rank, number), self._mailbox
        if not mailbox.wait_until(lambda: key in mailbox, self._peers.timeout_s):
            raise PipelineTimeout(
                f"rank {self._peers.rank} waited {self._peers.timeout_s:g} s for {self.link.name}"
            )
        read(mailbox.take(key))


@dataclass
class Sending:
    """Messages of one size through a link."""

    through: Through
    source: torch.Tensor
    read: Read

    def exchange(self, count: int) -> float:
        return self.through.exchange(count, self.source, self.read)


def through_shared_memory(peers: Peers, spins: bool) -> Through:
    mine, pid, theirs = peers.inboxes()
    mailbox = Mailbox(mine.bell, _ALONE if spins else _CROWDED)
    link = SharedLink(mine, peers.into(peers.rank), pid, theirs, Endpoint(mailbox, _CPU))
    return Through(peers, link, mailbox)


def through_group(peers: Peers, spins: bool) -> Through:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    mailbox = Mailbox(None, _ALONE if spins else _CROWDED)
    ends = peers.into(peers.rank), peers.into(peers.other)
    link = GroupLink(group, peers.other, *ends, peers.lost, Endpoint(mailbox, _CPU))
    return Through(peers, link, mailbox)


class Local:
    """A link within a process; the second rank waits meanwhile."""

    def __init__(self, peers: Peers, size: int, read: Read = leave) -> None:
        self._mailbox = Mailbox()
        self._link = LocalLink(self._mailbox, _CPU)
        self._key, self._rank, self._read = peers.key(1, 0), peers.rank, read
        self._source = payload(size, 0)

    def exchange(self, count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count if self._rank == 0 else 0):
            self._link.send(self._key, self._source)
            self._mailbox.wait_until(lambda: self._key in self._mailbox, 0)
            self._read(self._mailbox.take(self._key))
        return (time.perf_counter() - begin) / count


class PlainGloo:
    """dist.send and dist.irecv; the receive is posted before the message that is answered is sent."""

    def __init__(self, peers: Peers, size: int, read: Read = leave) -> None:
        self._peers, self._read = peers, read
        self._source, self._target = payload(size, peers.rank), payload(size, 0)

    def exchange(self, count: int) -> float:
        other = self._peers.other
        coming = dist.irecv(self._target, other)
        dist.barrier()  # the first one is posted on both sides
        begin = time.perf_counter()
        for left in range(count, 0, -1):
            assert coming is not None
            if self._peers.rank == 0:
                dist.send(self._source, other)
                coming.wait()
                self._read(self._target)
                coming = dist.irecv(self._target, other) if left > 1 else None
            else:
                coming.wait()
                self._read(self._target)
                coming = dist.irecv(self._target, other) if left > 1 else None
                dist.send(self._source, other)
        return (time.perf_counter() - begin) / (2 * count)


class Memcpy:
    """One memcpy of the same bytes between two buffers of one process; the second rank waits meanwhile.

    It goes to and fro between two pairs of buffers, so that caches serve it as they serve the ways above: those
    touch a source and a slot in either direction.
    """

    def __init__(self, peers: Peers, size: int, read: Read = leave) -> None:
        self._rank, self._read = peers.rank, read
        self._pairs = [(payload(size, 0), payload(size, 1)) for _ in range(2 if peers.rank == 0 else 0)]

    def exchange(self, count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count if self._rank == 0 else 0):
            for source, target in self._pairs:
                ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
                self._read(target)
        return (time.perf_counter() - begin) / (2 * count)
