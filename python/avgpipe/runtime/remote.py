"""Dedicated pipelines of other processes, and their updates of a reference."""

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
    """Receives reference updates of dedicated pipelines of other processes: a message for each batch.

    So every worker has the whole of each round, and averaging works as for pipelines that share a worker:
    sums in the order of pipelines, rounds of any staleness, and a last round that is left unfinished.

    Args:
        route: of this process's replica.
        turns: batches in a cycle of the pipelines; batch j is pipeline j % ``turns``'s, or all's if it is 1.
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
        """Continue after ``batches`` in all, whose updates are in the reference."""
        n = self._turns
        self._next = {i: key._replace(batch=batches + (i - batches) % n) for i, key in self._next.items()}

    def collect(self) -> None:
        """Apply the updates that have arrived and are due."""
        for i, key in self._next.items():
            while key in self._mailbox and self._reference.ready(i):
                # The scheduler calls this between steps, when the current stream is the caller's, which is
                # ordered neither after the updates of the round nor before the steps that read their result.
                with self._averaging():
                    update = self._mailbox.take(key)
                    if update is not None:  # else it was not the last batch of a period
                        self._reference.accept(i, update)
                key = self._next[i] = key._replace(batch=key.batch + self._turns)

    def may_step(self, batch: int) -> bool:
        """Whether a batch's step may run, as far as messages go: the reference has further conditions."""
        return True

    def missing(self, batches: int | None = None) -> list[Key]:
        """Return the next awaited message of each pipeline, only of the first ``batches`` if given."""
        keys = [key for key in self._next.values() if key not in self._mailbox]
        return [key for key in keys if batches is None or key.batch < batches]
