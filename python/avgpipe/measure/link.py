"""Messages to and fro between two processes, through the links of the runtime."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from avgpipe.errors import PeerLost, PipelineTimeout
from avgpipe.links.group import GroupLink
from avgpipe.links.link import Endpoint, Link, Mailbox
from avgpipe.links.message import Channel, Key, Message
from avgpipe.links.shared import Inbox, SharedLink
from avgpipe.ranks.world import gather

_CPU = torch.device("cpu")
_ALONE, _CROWDED = 1, 1 << 20  # neighbours, with which a mailbox spins and does not

Read = Callable[[torch.Tensor], object]


def leave(tensor: torch.Tensor) -> None:
    """Look at nothing of a message: it was handed over."""


def payload(size: int, rank: int) -> torch.Tensor:
    """Return so many bytes of int64, other ones for each rank."""
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
        """Return the key of message ``number`` to a rank."""
        return Key(*self.into(rank)[0], number, 0)

    def inboxes(self) -> tuple[Inbox, int, Inbox]:
        """This process's own, and the other one's id and inbox."""
        mine = Inbox.create(self.into(self.rank))
        theirs = gather(mine.offer())[self.other]
        opened = theirs["pid"], Inbox.open(theirs, self.into(self.other))
        dist.barrier()  # its file must stay open until both have opened the other's
        return mine, *opened

    def shared_memory(self, spins: bool) -> Through:
        mine, pid, theirs = self.inboxes()
        mailbox = Mailbox(mine.bell, _ALONE if spins else _CROWDED)
        link = SharedLink(mine, self.into(self.rank), pid, theirs, Endpoint(mailbox, _CPU))
        return Through(self, link, mailbox)

    def gloo(self, spins: bool) -> Through:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        mailbox = Mailbox(None, _ALONE if spins else _CROWDED)
        ends = self.into(self.rank), self.into(self.other)
        lost = lambda doing: PeerLost(f"the other process is gone; seen when {doing}")  # noqa: E731
        return Through(self, GroupLink(group, self.other, *ends, lost, Endpoint(mailbox, _CPU)), mailbox)


class Through:
    """A link, with the mailbox on which its worker waits. Both ranks exchange alike, a message at a time."""

    def __init__(self, peers: Peers, link: Link, mailbox: Mailbox) -> None:
        self._peers, self.link, self._mailbox = peers, link, mailbox
        self._next = 0

    def exchange(self, count: int, source: torch.Tensor, read: Read = leave) -> float:
        """Seconds of one direction, the mean of ``count`` round trips."""
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
