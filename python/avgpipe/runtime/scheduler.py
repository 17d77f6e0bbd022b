"""Multiplexes a worker's lanes on its device: of the steps whose inputs are there, the most urgent runs.

One thread issues all work, so there is no lock on the hot path and a run's order is explainable. Backwards go before
forwards, for they free memory and unblock the stages before; among equals the oldest batch goes first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from avgpipe.errors import PeerLost, PipelineTimeout
from avgpipe.report.timeline import Event
from avgpipe.runtime.lane import Lane
from avgpipe.runtime.links import GroupLink, Link
from avgpipe.runtime.mailbox import Mailbox
from avgpipe.runtime.message import Key
from avgpipe.runtime.world import World

_POLL_S = 0.5  # how often an idle worker looks whether another rank has reported a failure
_KEPT_EVENTS = 20_000
_SHOWN = {"F": "F", "B": "B", "U": "U", "T": "send", "S": "host", "N": "host"}  # a lane's steps in a Timeline


class Scheduler:
    def __init__(
        self, lanes: Sequence[Lane], mailbox: Mailbox, links: Mapping[int, Link], world: World
    ) -> None:
        self._lanes, self._mailbox, self._links, self._world = lanes, mailbox, links, world
        self._clock_offset = time.time() - time.perf_counter()  # ranks share the wall clock, not the counter
        self.events: deque[Event] = deque(maxlen=_KEPT_EVENTS)

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            lane = self._most_urgent()
            if lane is None:
                self._wait()
                continue
            step = lane.next_step()
            batch = lane.batch
            assert step is not None
            assert batch is not None
            start = self.now()
            lane.advance()
            kind, m = step
            self.events.append(
                Event(
                    lane.stage, lane.pipeline, batch, m if m >= 0 else None, _SHOWN[kind], start, self.now()
                )
            )

    def now(self) -> float:
        """Seconds on the clock that all ranks share."""
        return time.perf_counter() + self._clock_offset

    def _most_urgent(self) -> Lane | None:
        best: Lane | None = None
        best_rank = (True, 0, 0)
        for lane in self._lanes:
            if lane.ready():
                step = lane.next_step()
                assert step is not None
                rank = (step[0] == "F", lane.batch or 0, -lane.stage)
                if best is None or rank < best_rank:
                    best, best_rank = lane, rank
        return best

    def _wait(self) -> None:
        """Wait until a lane can go on."""
        waiting = [lane for lane in self._lanes if lane.next_step() is not None]
        oldest = min(waiting, key=lambda lane: lane.batch or 0, default=None)
        assert oldest is not None, "the scheduler was asked to wait while no lane has work"
        start = self.now()
        self.wait_for(oldest.missing(), lambda: any(lane.ready() for lane in waiting))
        self.events.append(
            Event(oldest.stage, oldest.pipeline, oldest.batch or 0, None, "recv", start, self.now())
        )

    def wait_for(self, keys: Sequence[Key], arrived: Callable[[], bool] | None = None) -> None:
        """Wait until ``arrived`` (default: all ``keys`` are there); ``keys`` name what is awaited in errors."""
        if arrived is None:
            arrived = lambda: all(k in self._mailbox for k in keys)  # noqa: E731
        limit = time.monotonic() + self._world.timeout_s
        while True:
            try:
                remaining_s = max(0.0, limit - time.monotonic())
                if self._mailbox.wait_until(arrived, min(_POLL_S, remaining_s)):
                    return
            except PeerLost:
                raise self._final_loss() from None
            failure = self._world.reported()
            if failure is not None:
                raise PeerLost(f"rank {self._world.rank} stops because of {failure}")
            if time.monotonic() >= limit:
                raise PipelineTimeout(self._describe(keys))

    def _final_loss(self) -> PeerLost:
        """The first connection to break may belong to a rank that itself only follows: prefer the first report."""
        deadline = time.monotonic() + 1.0
        while (failure := self._world.reported()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if failure is not None:
            return PeerLost(f"rank {self._world.rank} stops because of {failure}")
        try:
            self._mailbox.raise_failure()
        except PeerLost as loss:
            return loss
        raise AssertionError("unreachable")

    def _describe(self, keys: Sequence[Key]) -> str:
        head = f"rank {self._world.rank} waited {self._world.timeout_s:g} s"
        if not keys:
            return f"{head} for the other pipelines of this worker to finish their round of averaging"
        key = keys[0]
        link = self._links.get(key.source)
        heard = link.last_heard if isinstance(link, GroupLink) else None
        last = f"last heard from it: {heard}" if heard else "nothing has been heard from it in this run"
        return (
            f"{head}: pipeline {key.pipeline}, stage {key.stage} needs {key} from stage {key.source}; {last}. "
            "Raise timeout_s if stages are that slow"
        )
