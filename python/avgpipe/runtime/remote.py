"""Dedicated pipelines of other processes: what they add to a reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from avgpipe.elastic.reference import Reference
from avgpipe.links.link import Mailbox
from avgpipe.links.message import Key, Message
from avgpipe.runtime.route import Route

if TYPE_CHECKING:
    from avgpipe.runtime.streams import LaneStream


class RemoteUpdates:
    """Takes in what dedicated pipelines of other processes add to the reference: a message for each of their batches.

    So every worker has the whole of each round, and the rules of averaging are those of pipelines that share a worker:
    sums in the order of pipelines, rounds of any staleness, and a last round that is left unfinished.

    Args:
        route: of this process's replica.
        turns: after how many batches it is a pipeline's turn again; batch j is pipeline j % ``turns``'s, or all's.
        stream: of its lane; None on a CPU.
    """

    def __init__(
        self,
        reference: Reference,
        mailbox: Mailbox,
        route: Route,
        turns: int,
        stream: LaneStream | None = None,
    ) -> None:
        self._reference, self._mailbox, self._turns = reference, mailbox, turns
        self._next = {
            i: Key(Message.REFERENCE_UPDATE, i, replica, route.replica, i % turns, -1)
            for i, replica in route.remote
        }
        self._averaging: Callable[[], AbstractContextManager[None]] = (
            nullcontext if stream is None else stream.averaging
        )

    def resume(self, batches: int) -> None:
        """Go on after ``batches`` in all, whose updates are in the reference."""
        n = self._turns
        self._next = {i: key._replace(batch=batches + (i - batches) % n) for i, key in self._next.items()}

    def collect(self) -> None:
        """Take in what is there and whose turn it is."""
        for i, key in self._next.items():
            while key in self._mailbox and self._reference.ready(i):
                # The scheduler asks between steps, when the current stream is the caller's: that one comes neither
                # after the updates that a round is made of nor before the steps that read what it makes.
                with self._averaging():
                    update = self._mailbox.take(key)
                    if update is not None:  # else it was not the last batch of a period
                        self._reference.accept(i, update)
                key = self._next[i] = key._replace(batch=key.batch + self._turns)

    def may_step(self, batch: int) -> bool:
        """Whether the step of a batch may be made, as far as messages go: the reference says more."""
        return True

    def missing(self, batches: int | None = None) -> list[Key]:
        """Return what is awaited next of each pipeline, of the first ``batches`` alone if they are given."""
        keys = [key for key in self._next.values() if key not in self._mailbox]
        return [key for key in keys if batches is None or key.batch < batches]
