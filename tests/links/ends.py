"""The two ends of a link in one process, over each kind of link."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from avgpipe.errors import PeerLost
from avgpipe.links.codec import Verifier
from avgpipe.links.group import GroupLink
from avgpipe.links.link import Channel, Key, Mailbox, Message
from avgpipe.links.shared import Inbox, SharedLink
from avgpipe.links.transport import Endpoint
from tests.patience import limit

LINKS = ["shm", "gloo"]
CPU = torch.device("cpu")
CHANNELS = [Channel(Message.ACTIVATION, 0, 0, 1), Channel(Message.EVALUATION, 0, 0, 1)]  # from 0 to 1
BACK = [Channel(Message.GRADIENT, 0, 1, 0)]


class Ends:
    """Stage 0 and stage 1 with a link between them."""

    def __init__(self, links: list[Any], mailboxes: list[Mailbox]) -> None:
        self.links, self.mailboxes = links, mailboxes
        self._next = 0

    def key(self, kind: str = "F", number: int | None = None) -> Key:
        if number is None:
            number = self._next
            self._next += 1
        source = 1 if kind == "B" else 0
        return Key(Message(kind), 0, source, 1 - source, number, 0)

    def send(self, value: Any, kind: str = "F") -> Key:
        key = self.key(kind)
        self.links[key.source].send(key, value)
        return key

    def receive(self, key: Key, timeout_s: float = 20) -> Any:
        box = self.mailboxes[key.target]
        assert box.wait_until(lambda: key in box, limit(timeout_s)), f"{key} did not arrive"
        return box.take(key)

    def pass_on(self, value: Any, kind: str = "F") -> Any:
        return self.receive(self.send(value, kind))


@contextmanager
def ends(
    kind: str, wire_dtype: torch.dtype | None = None, verifies: bool = False, more: Sequence[Channel] = ()
) -> Iterator[Ends]:
    """``more``: channels from 0 to 1, beside ``CHANNELS``."""
    into = [BACK, [*CHANNELS, *more]]  # by seat
    verifiers = [Verifier(f"end {1 - k}", f"end {k}") if verifies else None for k in range(2)]
    made = (shared_ends if kind == "shm" else group_ends)(into, wire_dtype, verifiers)
    try:
        yield made
    finally:
        for link in made.links:
            link.leave()
        for link in made.links:
            link.close(10)


def shared_ends(
    into: list[list[Channel]], wire_dtype: torch.dtype | None, verifiers: list[Verifier | None]
) -> Ends:
    inboxes = [Inbox.create(into[k]) for k in range(2)]
    opened = [Inbox.open(inboxes[k].offer(), into[k]) for k in range(2)]
    boxes = [Mailbox(inbox.bell) for inbox in inboxes]
    links = [
        SharedLink(
            *(inboxes[k], opened[1 - k], os.getpid()),
            Endpoint(boxes[k], CPU, into[k], into[1 - k], wire_dtype, verifiers[k]),
        )
        for k in range(2)
    ]
    return Ends(links, boxes)


def groups(count: int) -> list[Any]:
    """The ranks of a gloo group, all of them in this process."""
    store = dist.HashStore()
    made: list[Any] = [None] * count

    def join(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(store, rank, count, timedelta(seconds=60))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def group_ends(
    into: list[list[Channel]], wire_dtype: torch.dtype | None, verifiers: list[Verifier | None]
) -> Ends:
    boxes = [Mailbox(), Mailbox()]
    links = [
        GroupLink(
            *(group, 1 - k, PeerLost),
            Endpoint(boxes[k], CPU, into[k], into[1 - k], wire_dtype, verifiers[k]),
        )
        for k, group in enumerate(groups(2))
    ]
    return Ends(links, boxes)
