"""Multiplexes a worker's pipelines on its device: runs the most urgent step whose inputs have arrived.

One thread issues all work, so there is no lock on the hot path and a run's order is explainable. Backwards go before
forwards, for they free memory and unblock the stages before; among equals the oldest batch goes first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]  # missing in torch's stubs
from torch.profiler import record_function

from avgpipe.errors import PeerLost, PipelineTimeout
from avgpipe.links.link import Key, Mailbox
from avgpipe.ranks import environment as probe
from avgpipe.ranks.world import World, since
from avgpipe.runtime.lane import Lane, Queue
from avgpipe.runtime.placement import Placement
from avgpipe.runtime.route import Step, StepKind
from avgpipe.schedule.row import Event, EventKind

if TYPE_CHECKING:
    from avgpipe.runtime.streams import DeviceClock, Row

_KEPT_EVENTS = 20_000
# How a step is shown in a Timeline, where not by its own kind.
_SHOWN = {kind.value: kind.value for kind in StepKind}
_SHOWN.update(dict.fromkeys((StepKind.SEND_TIED.value, StepKind.SHARE_PART.value), EventKind.SEND.value))
_HOST = (StepKind.SUM_TIED, StepKind.ADD_NORM, StepKind.SUM_REPLICAS, StepKind.RECEIVE_LOSS)
_SHOWN.update(dict.fromkeys((kind.value for kind in _HOST), EventKind.HOST.value))
_SEND = EventKind.SEND.value
# As faults name them.
_ACTIONS = {kind: kind.name.lower().replace("_", " ") for kind in StepKind}
_POLL_S = 50e-6  # between two queries of a device's progress
_SHORTEST_HOST_S = 20e-6  # a shorter time between two steps is the scheduler itself
_DESCRIBED_RANKS = 4  # whose last action an error adds
_LOOK_S = 0.02
_REPORT_S = 1.0  # after a broken connection, for the first report of a failure


class Scheduler:
    """Runs the steps of ``lanes``, which wait in ``queues``."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        queues: Sequence[Queue],
        mailbox: Mailbox,
        world: World,
        placement: Placement,
        device_clock: DeviceClock | None = None,
    ) -> None:
        self._lanes, self._queues, self._mailbox, self._world = lanes, queues, mailbox, world
        self._placement, self._device_clock = placement, device_clock
        self._clock_offset = time.time() - time.perf_counter()  # ranks share the wall clock, not the counter
        self._left_at: float | None = None  # when run_until last returned to its caller
        self._doing: tuple[str, float] = ("nothing yet", time.monotonic())
        self._running: tuple[Lane, Step] | None = None
        # Like Event, but on the clock of time.perf_counter, and cheap, as there are tens of thousands.
        self._events: deque[Row] = deque(maxlen=_KEPT_EVENTS)
        self.background: Callable[[], bool] = lambda: False  # like ``idle``, for every run
        # Called at the timeout of a wait: reports the missing messages to a process that will send them or
        # cancel the wait; False if there is none.
        self.complains: Callable[[], bool] = lambda: False

    def forget(self) -> None:
        """Drop the lanes, so that their memory is freed; nothing runs after this."""
        self._lanes, self._queues, self._running = [], [], None

    def run_until(
        self,
        done: Callable[[], bool],
        idle: Callable[[], bool] = lambda: False,
        awaited: Sequence[Key] = (),
        recorded: bool = True,
    ) -> None:
        """Run steps until ``done()``.

        Args:
            done: checked before every step.
            idle: called when nothing can run; may do some other work, and returns whether it did.
            awaited: messages that may end the run, beside those that steps wait for.
            recorded: whether :meth:`events` shows the steps; true for training.
        """
        mailbox, clock, note = self._mailbox, time.perf_counter, self._events.append
        if recorded:
            self._note_caller()
        # Neither can be switched on before this call returns to the caller.
        watched = bool(_profiler_enabled() or probe.armed)
        while not done():
            mailbox.collect()
            queue = self._most_urgent()
            if queue is None:
                if not (idle() or self.background()):
                    self._wait(awaited, recorded)
                continue
            lane, step = self._running = queue.next
            start = clock()
            if watched:
                self._advance_watched(lane, step, "training" if recorded else "evaluation")
            else:
                lane.advance(step)
            queue.pop()
            if lane.stream is not None or not recorded:  # the device's clock measures when it ran
                continue
            end = clock()
            sent_at = lane.port.sent_at
            computed = end if sent_at is None else sent_at
            place = lane.route.replica, lane.pipeline, step.batch, step.micro_batch
            note((*place, _SHOWN[step.kind], start, computed, ""))
            if computed < end:
                note((*place, _SEND, computed, end, ""))
        self._running = None
        self.rest("the caller's code")
        self._left_at = clock() if recorded else None

    def _advance_watched(self, lane: Lane, step: Step, phase: str) -> None:
        """Perform a step under a profiler, or one in which a test injects a fault."""
        place = {
            "rank": self._world.rank,
            "pipeline": lane.pipeline,
            "stage": lane.route.stage,
            "batch": step.batch,
        }
        of_step = {**place, "micro_batch": step.micro_batch if step.micro_batch >= 0 else None}
        is_update = step.kind is StepKind.UPDATE
        due = probe.at("update" if is_update else phase, **of_step, action=_ACTIONS[step.kind])
        for fault in due:
            fault.damage(lane)
        with record_function(self._range_name(lane, step)):
            lane.advance(step)
        if is_update and lane.trained.elastic is not None:
            for fault in probe.at("averaging", **place):
                fault.damage(lane)

    def run_until_done(self, event: Any) -> None:
        """Run steps until the device has completed the work before ``event``.

        The host polls instead of blocking in one call: it receives messages meanwhile, and if the device
        never completes, as after a peer's death, the wait ends in PeerLost or PipelineTimeout.
        """
        mailbox = self._mailbox
        deadline = time.monotonic() + self._world.timeout_s

        def pause() -> bool:
            mailbox.raise_failure()
            if time.monotonic() > deadline:
                raise PipelineTimeout(
                    f"rank {self._world.rank} waited {self._world.timeout_s:g} s for its device to complete its work. "
                    "Raise timeout_s if it is that slow; else a transfer that it waits for has never arrived"
                )
            mailbox.pause(_POLL_S)
            return True

        self._left_at = None  # the caller has run no code since the run before
        self.run_until(event.query, pause)

    def stalled(self) -> bool:
        """Whether every pipeline waits for something, or has no work."""
        return self._most_urgent() is None

    def note_host(self, what: str, batch: int, start: float, end: float) -> None:
        """Record other work in this thread, for a batch, on the clock of time.perf_counter."""
        lane = self._lanes[0]
        if end - start >= _SHORTEST_HOST_S:
            self._events.append(
                (lane.route.replica, lane.pipeline, batch, -1, EventKind.HOST.value, start, end, what)
            )

    def pause(self) -> None:
        """Leave the time until the next run out of the record: it is not part of training."""
        self._left_at = None

    def _note_caller(self) -> None:
        if self._left_at is not None:
            newest = max(lane.oldest_batch or 0 for lane in self._lanes)
            self.note_host("caller", newest, self._left_at, time.perf_counter())
            self._left_at = None

    def events(self) -> list[Event]:
        """Return what ran, in seconds on a clock that all ranks share."""
        offset, places = self._clock_offset, self._placement
        return [
            Event(
                places.stage_of(r),
                i,
                j,
                m if m >= 0 else None,
                kind,
                start + offset,
                end + offset,
                detail,
                places.worker_of(r),
            )
            for r, i, j, m, kind, start, end, detail in (*self._events, *self._device_rows())
        ]

    def rows_since(self, start: float) -> list[Row]:
        """Return what began after ``start`` (time.perf_counter); of a device's work, what has ended."""
        rows = self._events if self._device_clock is None else self._device_clock.ended()
        return list(takewhile(lambda row: row[5] > start, reversed(rows)))

    def _device_rows(self) -> list[Row]:
        rows = self._device_clock.rows() if self._device_clock is not None else []
        return [(k, i, j, m, _SHOWN[kind], *times) for k, i, j, m, kind, *times in rows]  # type: ignore[misc]

    def _most_urgent(self) -> Queue | None:
        best: Queue | None = None
        least = (True, 0, 0)
        for queue in self._queues:
            step = queue.head
            if (
                step is not None
                and (best is None or step.priority < least)
                and queue.lane_of(step).is_ready(step)
            ):
                best, least = queue, step.priority
        return best

    # ---- waiting -------------------------------------------------------------------------------------------------

    def _wait(self, awaited: Sequence[Key], recorded: bool) -> None:
        """Wait until a step can run, or all messages of ``awaited`` have arrived."""
        waiting = [queue.next for queue in self._queues if queue.head is not None]
        oldest = min(waiting, key=lambda queued: queued[1].batch, default=None)
        assert oldest or awaited, "the scheduler was asked to wait while nothing has work"
        awaited = [key for key in awaited if key not in self._mailbox]
        if oldest is None and not awaited:
            return
        start = time.perf_counter()
        self.wait_for(
            awaited if oldest is None else oldest[0].missing(oldest[1]),
            lambda: (
                any(lane.is_ready(step) for lane, step in waiting)
                or bool(awaited and all(k in self._mailbox for k in awaited))
            ),
            lambda: [*(key for lane, step in waiting for key in lane.missing(step)), *awaited],
        )
        queue = self._most_urgent()
        if queue is None or not recorded:
            return
        lane, step = queue.next
        what = step.needs[0].kind.value if step.needs else "average"
        place = lane.route.replica, lane.pipeline, step.batch, step.micro_batch
        self._events.append((*place, EventKind.RECEIVE.value, start, time.perf_counter(), what))

    def wait_for(
        self,
        keys: Sequence[Key],
        arrived: Callable[[], bool] | None = None,
        awaited: Callable[[], Sequence[Key]] | None = None,
    ) -> None:
        """Wait until ``arrived`` (default: all ``keys`` have arrived); errors name the messages by ``keys``.

        ``awaited()``: all missing messages (default: those of ``keys``).
        """
        if awaited is None:
            awaited = lambda: [k for k in keys if k not in self._mailbox]  # noqa: E731
        if arrived is None:
            arrived = lambda: not awaited()  # noqa: E731
        self._running = None
        self.rest(f"waiting for {self._named(keys)}")
        try:
            while not self._mailbox.wait_until(arrived, self._world.timeout_s, awaited):
                if not self.complains():
                    raise PipelineTimeout(self._describe(keys))
        except PeerLost as loss:
            raise self._final_loss(loss) from None

    def _named(self, keys: Sequence[Key]) -> str:
        """Name the awaited messages in words."""
        if not keys:
            return "the other pipelines of this worker to finish their round of averaging"
        key, name = keys[0], self._placement.name
        return f"{key} from {name(key.source)} (pipeline {key.pipeline}, {name(key.target)})"

    def _final_loss(self, loss: PeerLost) -> PeerLost:
        """Prefer the first report: the first broken connection may be to a rank that only failed in turn."""
        within_s = 0.0 if probe.is_replaceable() else _REPORT_S  # a replaced rank needs no report
        deadline = time.monotonic() + within_s
        while (first := self._world.reported()) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return first or loss

    def _describe(self, keys: Sequence[Key]) -> str:
        head = f"rank {self._world.rank} waited {self._world.timeout_s:g} s for {self._named(keys)}"
        if not keys:
            return head
        rank = self._placement.rank_of(keys[0].source)
        seen = [self._world.last_seen(rank)]
        # That rank may wait too, for another one: the rank at the end of the chain is busy, or hangs.
        others = [r for r in range(self._world.size) if r not in (rank, self._world.rank)]
        waits = "waiting for"
        seen += [text for text in map(self._world.last_seen, others) if waits not in text][:_DESCRIBED_RANKS]
        return f"{head}; {'; '.join(seen)}. Raise timeout_s if stages are that slow"

    def rest(self, doing: str) -> None:
        self._doing = doing, time.monotonic()

    def doing(self) -> str:
        """Return what this worker is doing, for the other ranks; called from another thread."""
        running = self._running
        if running is None:
            return since(*self._doing)
        lane, step = running
        return f"{step}, pipeline {lane.pipeline}, {self._placement.name(lane.route.replica)}"

    def _range_name(self, lane: Lane, step: Step) -> str:
        """Return the name of a step in torch.profiler."""
        micro_batch = "" if step.micro_batch < 0 else step.micro_batch
        action, stage = f"{step.kind.value}{micro_batch}", self._placement.name(lane.route.replica)
        return f"avgpipe: {action} {stage} pipeline {lane.pipeline} batch {step.batch}"
