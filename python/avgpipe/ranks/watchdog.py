"""A thread that tells the other ranks what this one is doing, and this one when another has failed or died.

It works while the main thread computes, waits, or hangs in somebody's layer. A process of this host is watched by its
descriptor, which becomes readable when it ends, however it ends.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from avgpipe.ranks.world import World

_TICK_S = 0.5
_TELL_S = 5.0
_CLOSE_S = 5.0


class Waits(Protocol):
    """Where the main thread waits for other ranks."""

    def fail(self, failure: BaseException, source: int | None = None) -> None:
        """End every wait with ``failure``, or those for the rank ``source``."""


class Watchdog:
    """``doing()``: what the main thread is at, in words. ``processes``: those of ranks on this host, by rank."""

    def __init__(
        self, world: World, mailbox: Waits, doing: Callable[[], str], processes: Mapping[int, int]
    ) -> None:
        self._world, self._mailbox, self._doing = world, mailbox, doing
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}  # by descriptor
        for rank, process in processes.items():
            self._watch(rank, process)
        self._wake_read, self._wake_write = os.pipe()
        self._poll.register(self._wake_read, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="avgpipe-watchdog", daemon=True)
        self._thread.start()

    def _watch(self, rank: int, process: int) -> None:
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            self._lost(rank)
        else:
            self._ranks[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)

    def _run(self) -> None:
        told = seen = ""
        told_at = float("-inf")
        while True:
            for descriptor, _ in self._poll.poll(1000 * _TICK_S):
                if descriptor == self._wake_read:
                    return
                self._poll.unregister(descriptor)
                self._lost(self._ranks[descriptor])
            doing = self._doing()
            # What does not last is told seldom: a store may keep all that it was ever told.
            if doing != told and (doing == seen or time.monotonic() > told_at + _TELL_S):
                self._world.tell(doing)
                told, told_at = doing, time.monotonic()
            seen = doing
            if (loss := self._world.reported()) is not None:
                self._mailbox.fail(loss)

    def _lost(self, rank: int) -> None:
        """Only who still waits for something from that rank hears of it."""
        self._mailbox.fail(self._world.lost(rank, "watching its process"), rank)

    def close(self) -> None:
        os.write(self._wake_write, b"x")
        self._thread.join(_CLOSE_S)
        for descriptor in (*self._ranks, self._wake_read, self._wake_write):
            os.close(descriptor)


def since(what: str, begin_s: float) -> str:
    """``what``, begun at ``begin_s`` of the monotonic clock; only seconds that matter are shown, so the text rests."""
    seconds = time.monotonic() - begin_s
    return what if seconds < 1 else f"{what}, for {seconds:.0f} s"
