"""Multiplexes a worker's lanes on its device: of the steps whose inputs are there, the most urgent runs.

One thread issues all work, so there is no lock on the hot path and a run's order is explainable. Backwards go before
forwards, for they free memory and unblock the stages before; among equals the oldest batch goes first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from avgpipe.device import DeviceClock, Row
from avgpipe.errors import PeerLost, PipelineTimeout
from avgpipe.links.link import Mailbox
from avgpipe.links.message import Key
from avgpipe.ranks.watchdog import since
from avgpipe.ranks.world import World
from avgpipe.runtime.lane import Lane, Walk
from avgpipe.runtime.placement import Placement
from avgpipe.timeline.timeline import Event

_KEPT_EVENTS = 20_000
# A lane's steps in a Timeline.
_SHOWN = {kind: kind for kind in "FBIWU"} | dict.fromkeys("TA", "send") | dict.fromkeys("SNGL", "host")
_SEEN = 4  # ranks that an error says more of
_SHORTEST_HOST_S = 20e-6  # less between two steps is the scheduler itself


class Scheduler:
    def __init__(
        self,
        lanes: Sequence[Lane],
        mailbox: Mailbox,
        world: World,
        placement: Placement,
        device_clock: DeviceClock | None = None,
    ) -> None:
        self._lanes, self._mailbox, self._world, self._device_clock = lanes, mailbox, world, device_clock
        self._placement = placement
        self._walks = [walk for lane in lanes for walk in lane.walks]
        self._clock_offset = time.time() - time.perf_counter()  # ranks share the wall clock, not the counter
        self._left_at: float | None = None  # when run_until last returned to its caller
        self._doing: tuple[str, float] = ("nothing yet", time.monotonic())
        self._walk: Walk | None = None  # the one whose step runs now
        # As Event, but on the clock of time.perf_counter, and made by the ten thousand.
        self._events: deque[Row] = deque(maxlen=_KEPT_EVENTS)

    def run_until(
        self,
        done: Callable[[], bool],
        idle: Callable[[], bool] = lambda: False,
        told: Sequence[Key] = (),
    ) -> None:
        """Run steps until ``done()``. When nothing can run, ``idle()`` may do a piece of other work, and says if
        it did. ``told``: messages that may end the run, beside those that steps wait for.
        """
        mailbox, clock, note = self._mailbox, time.perf_counter, self._events.append
        self._note_caller()
        while not done():
            mailbox.collect()
            walk = self._most_urgent()
            if walk is None:
                if not idle():
                    self._wait(told)
                continue
            lane, step = walk.lane, walk.step
            assert step is not None
            self._walk = walk
            start = clock()
            walk.advance()
            if lane.stream is not None:  # only issued: the device's clock tells when it ran
                continue
            end = clock()
            computed = end if lane.sent_at is None else lane.sent_at
            kind, m, batch = _SHOWN[step.kind], step.micro_batch, step.batch
            note((lane.place.seat, lane.pipeline, batch, m, kind, start, computed, ""))
            if computed < end:
                note((lane.place.seat, lane.pipeline, batch, m, "send", computed, end, ""))
        self._walk = None
        self._rest("the caller's code")
        self._left_at = clock()

    def stalled(self) -> bool:
        """Whether every lane waits for something, or has nothing to do."""
        return self._most_urgent() is None

    def note_host(self, what: str, batch: int, start: float, end: float) -> None:
        """Time of other work in this thread, for a batch, on the clock of time.perf_counter."""
        lane = self._lanes[0]
        if end - start >= _SHORTEST_HOST_S:
            self._events.append((lane.place.seat, lane.pipeline, batch, -1, "host", start, end, what))

    def pause(self) -> None:
        """What happens until the next run is not part of training."""
        self._left_at = None

    def _note_caller(self) -> None:
        if self._left_at is not None:
            newest = max(lane.batch or 0 for lane in self._lanes)
            self.note_host("caller", newest, self._left_at, time.perf_counter())
            self._left_at = None

    def events(self) -> list[Event]:
        """What ran, in seconds on a clock that all ranks share."""
        offset = self._clock_offset
        return [
            Event(k, i, j, m if m >= 0 else None, kind, start + offset, end + offset, detail)
            for k, i, j, m, kind, start, end, detail in (*self._events, *self._device_rows())
        ]

    def _device_rows(self) -> list[Row]:
        rows = self._device_clock.rows() if self._device_clock is not None else []
        return [(k, i, j, m, _SHOWN[kind], *times) for k, i, j, m, kind, *times in rows]  # type: ignore[misc]

    def _most_urgent(self) -> Walk | None:
        best: Walk | None = None
        least = (True, 0, 0)
        for walk in self._walks:
            if walk.ready():
                urgency = walk.step.urgency  # type: ignore[union-attr]  # who is ready has a step
                if best is None or urgency < least:
                    best, least = walk, urgency
        return best

    # ---- waiting -------------------------------------------------------------------------------------------------

    def _wait(self, told: Sequence[Key]) -> None:
        """Wait until a lane can go on, or all of ``told`` are there."""
        waiting = [walk for walk in self._walks if walk.step is not None]
        oldest = min(waiting, key=lambda walk: walk.lane.batch or 0, default=None)
        assert oldest or told, "the scheduler was asked to wait while no lane has work"
        start = time.perf_counter()
        self.wait_for(
            told if oldest is None else oldest.missing(),
            lambda: (
                any(walk.ready() for walk in waiting) or bool(told and all(k in self._mailbox for k in told))
            ),
            lambda: [*(key for walk in waiting for key in walk.missing()), *told],
        )
        walk = self._most_urgent()
        if walk is None:
            return
        lane, step = walk.lane, walk.step
        assert step is not None
        self._events.append(
            (
                *(lane.place.seat, lane.pipeline, step.batch, step.micro_batch),
                *("recv", start, time.perf_counter(), step.needs[0].kind if step.needs else "average"),
            )
        )

    def wait_for(
        self,
        keys: Sequence[Key],
        arrived: Callable[[], bool] | None = None,
        awaited: Callable[[], Sequence[Key]] | None = None,
    ) -> None:
        """Wait until ``arrived`` (default: all ``keys`` are there); ``keys`` name what is awaited in errors.

        ``awaited()``: all messages that are (default: those of ``keys`` that are not there).
        """
        if awaited is None:
            awaited = lambda: [k for k in keys if k not in self._mailbox]  # noqa: E731
        if arrived is None:
            arrived = lambda: not awaited()  # noqa: E731
        self._walk = None
        self._rest(f"waiting for {self._awaited(keys)}")
        try:
            if self._mailbox.wait_until(arrived, self._world.timeout_s, awaited):
                return
        except PeerLost as loss:
            raise self._final_loss(loss) from None
        raise PipelineTimeout(self._describe(keys))

    def _final_loss(self, loss: PeerLost) -> PeerLost:
        """The first connection to break may belong to a rank that itself only follows: prefer the first report."""
        deadline = time.monotonic() + 1.0
        while (failure := self._world.reported()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if failure is not None:
            return PeerLost(f"rank {self._world.rank} stops because of {failure}")
        return loss

    def _describe(self, keys: Sequence[Key]) -> str:
        head = f"rank {self._world.rank} waited {self._world.timeout_s:g} s for {self._awaited(keys)}"
        if not keys:
            return head
        rank = self._placement.rank_of(keys[0].source)
        seen = [self._world.told(rank)]
        # That rank may wait too, for another one: where the chain ends, something else is done, or hangs.
        others = [r for r in range(self._world.size) if r not in (rank, self._world.rank)]
        seen += [text for text in map(self._world.told, others) if "waiting for" not in text][:_SEEN]
        return f"{head}; {'; '.join(seen)}. Raise timeout_s if stages are that slow"

    def _rest(self, doing: str) -> None:
        self._doing = doing, time.monotonic()

    def doing(self) -> str:
        """What this worker is at, for the other ranks; asked from another thread."""
        walk = self._walk
        step = walk.step if walk is not None else None
        if walk is None or step is None:
            return since(*self._doing)
        lane = walk.lane
        return f"{step}, pipeline {lane.pipeline}, {self._placement.name(lane.place.seat)}"

    def _awaited(self, keys: Sequence[Key]) -> str:
        if not keys:
            return "the other pipelines of this worker to finish their round of averaging"
        key, name = keys[0], self._placement.name
        return f"{key} from {name(key.source)} (pipeline {key.pipeline}, {name(key.seat)})"
