"""Spread pipelines: each tells the others' workers of the same stage its updates of the reference.

So every worker has the whole of each round, and the rules of averaging are those of pipelines that share a worker: sums
in the order of pipelines, rounds of any staleness, and a last round that is left unfinished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from avgpipe.device import LaneStream
from avgpipe.elastic import Reference
from avgpipe.links.link import Mailbox
from avgpipe.links.message import Key


class Exchange:
    """Takes in what the other pipelines tell ``seat``: a message for every batch of theirs, in their order.

    ``others``: of each of them, its pipeline and seat. ``stream``: of the seat's lane, None for a CPU.
    """

    def __init__(
        self,
        reference: Reference,
        mailbox: Mailbox,
        seat: int,
        others: Sequence[tuple[int, int]],
        stream: LaneStream | None = None,
    ) -> None:
        self._rounds, self._mailbox = reference.rounds, mailbox
        self._pipelines = reference.replicas
        self._next = {i: Key("V", i, other, seat, i, -1) for i, other in others}
        self._averaging: Callable[[], AbstractContextManager[None]] = (
            nullcontext if stream is None else stream.averaging
        )

    def resume(self, batches: int) -> None:
        """So many have begun in all, and what they told is in the reference."""
        n = self._pipelines
        self._next = {i: key._replace(batch=batches + (i - batches) % n) for i, key in self._next.items()}

    def collect(self) -> None:
        """Take in what is there and may come."""
        for i, key in self._next.items():
            while key in self._mailbox and self._rounds.ready(i, True):
                # The scheduler asks between steps, when the current stream is the caller's: that one comes neither
                # after the updates that a round is made of nor before the steps that read what it makes.
                with self._averaging():
                    update = self._mailbox.take(key)
                    if update is not None:  # else it was not the last batch of a period
                        self._rounds.accept(i, update)
                key = self._next[i] = key._replace(batch=key.batch + self._pipelines)

    def missing(self, batches: int | None = None) -> list[Key]:
        """What is awaited next of each; of the first ``batches`` alone if they are given."""
        keys = [key for key in self._next.values() if key not in self._mailbox]
        return [key for key in keys if batches is None or key.batch < batches]
