"""Preemption: ranks that will be ended soon all stop at the same place of their loops, without a collective.

A rank that learns of its preemption, from a signal or from the others' store, publishes the next place that
it has not passed, goes on to that place, and waits there until all ranks have published theirs. All stop at
the greatest. A thread publishes and reads the places, so that a rank which waits for another one's work
delays no rank.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from avgpipe.errors import PipelineTimeout
from avgpipe.ranks.world import Notice, World

_NAME = "preempted"
_LOOK_S = 0.2


class Preemption(Notice):
    """Decides where several ranks stop; each asks at the same places."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._lock = threading.Lock()
        self._place: int | None = None  # at which this rank asked last
        self._announced: int | None = None  # the next place, which it has not passed
        self._is_written = False
        self._agreed = threading.Event()
        self._stop = 0  # the place at which all stop

    @property
    def is_known(self) -> bool:
        """Whether this process will be ended, or knows that another one will."""
        return self.is_noticed or self._announced is not None

    def is_due(self, place: int) -> bool:
        """Whether to stop at ``place``, a number that grows; the same on all ranks that ask there.

        PeerLost or PipelineTimeout where another rank does not publish its place.
        """
        with self._lock:
            self._place, announced = place, self._announced
        if announced is None or place < announced:
            return False
        self._await()
        return place >= self._stop

    def _await(self) -> None:
        deadline = time.monotonic() + self._world.timeout_s
        while not self._agreed.wait(_LOOK_S):
            if (loss := self._world.reported()) is not None:
                raise loss
            if time.monotonic() > deadline:
                raise PipelineTimeout(
                    f"rank {self._world.rank} waited {self._world.timeout_s:g} s for the place at which the "
                    "others can stop before they are ended: every rank must read pipeline.preempted"
                )

    def look(self) -> None:
        """Publish this rank's place, and read those of the others; called repeatedly by a thread."""
        if self._agreed.is_set() or self._place is None:
            return
        with suppress(RuntimeError):  # the store does not answer: next time
            if self._announced is None:
                if not (self.is_noticed or self._world.noted(_NAME)):
                    return
                with self._lock:
                    self._announced = self._place + 1
            if not self._is_written:
                self._world.note(_NAME, "yes")
                self._world.note(f"{_NAME}/{self._world.rank}", str(self._announced))
                self._is_written = True
            places = [self._world.noted(f"{_NAME}/{rank}") for rank in range(self._world.size)]
            if None not in places:
                self._stop = max(int(place) for place in places if place is not None)
                self._agreed.set()
