"""Waits for messages of other workers, and raises an error that describes the wait when none arrives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from avgpipe.errors import PeerLost, PipelineTimeout
from avgpipe.links.link import Mailbox
from avgpipe.links.message import Key
from avgpipe.ranks.process import is_replaceable
from avgpipe.ranks.world import World
from avgpipe.runtime.placement import Placement

_DESCRIBED_RANKS = 4  # whose last action an error adds
_LOOK_S = 0.02
_REPORT_S = 1.0  # after a broken connection, for the first report of a failure


class Waiting:
    """The waits of one worker, each with the time limit of its world."""

    def __init__(self, mailbox: Mailbox, world: World, placement: Placement) -> None:
        self._mailbox, self._world, self._placement = mailbox, world, placement

    def named(self, keys: Sequence[Key]) -> str:
        """Name the awaited messages in words."""
        if not keys:
            return "the other pipelines of this worker to finish their round of averaging"
        key, name = keys[0], self._placement.name
        return f"{key} from {name(key.source)} (pipeline {key.pipeline}, {name(key.target)})"

    def wait(
        self,
        keys: Sequence[Key],
        arrived: Callable[[], bool] | None,
        awaited: Callable[[], Sequence[Key]] | None,
        complains: Callable[[], bool],
    ) -> None:
        """Wait as :meth:`avgpipe.runtime.scheduler.Scheduler.wait_for` describes.

        ``complains``: called at the timeout; reports the missing messages to a process that will send them or
        cancel the wait. False if there is none.
        """
        if awaited is None:
            awaited = lambda: [k for k in keys if k not in self._mailbox]  # noqa: E731
        if arrived is None:
            arrived = lambda: not awaited()  # noqa: E731
        try:
            while not self._mailbox.wait_until(arrived, self._world.timeout_s, awaited):
                if not complains():
                    raise PipelineTimeout(self._describe(keys))
        except PeerLost as loss:
            raise self._final_loss(loss) from None

    def _final_loss(self, loss: PeerLost) -> PeerLost:
        """Prefer the first report: the first broken connection may be to a rank that only failed in turn."""
        within_s = 0.0 if is_replaceable() else _REPORT_S  # a replaced rank needs no report
        deadline = time.monotonic() + within_s
        while (first := self._world.reported()) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return first or loss

    def _describe(self, keys: Sequence[Key]) -> str:
        head = f"rank {self._world.rank} waited {self._world.timeout_s:g} s for {self.named(keys)}"
        if not keys:
            return head
        rank = self._placement.rank_of(keys[0].source)
        seen = [self._world.last_seen(rank)]
        # That rank may wait too, for another one: the rank at the end of the chain is busy, or hangs.
        others = [r for r in range(self._world.size) if r not in (rank, self._world.rank)]
        waits = "waiting for"
        seen += [text for text in map(self._world.last_seen, others) if waits not in text][:_DESCRIBED_RANKS]
        return f"{head}; {'; '.join(seen)}. Raise timeout_s if stages are that slow"
