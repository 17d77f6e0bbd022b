"""The streams of a worker on an accelerator: its lanes' and the one for copies; and the clock of their work.

Each lane has a stream. A tensor that it computes and another stream reads is passed on with an event:

    lane's stream     F3 ── record(ready) ── F4 ─ ...
    reader's stream            └─ wait(ready) ── record_stream(tensors) ── reads

Weights, reference and updates of a stage are shared by its lanes. Their updates are one chain, by one event:

    lane 0's stream   ... B7 ── U ── record(averaged) ── F0 of its next batch ...
    lane 1's stream   ... B7 ─────────└─ wait(averaged) ── U ── record(averaged) ...

If an update changes the weights of other lanes too (staleness 0), their next batch waits for that event as
well. Updates from pipelines in other processes are a part of the chain, on the stream of the lane that
applies them. A batch begins after the work on the caller's stream at that time; the caller's stream waits for
a lane when its batch's loss is read, and for no later one. No other stream waits, and the host waits only for
that loss, by
polling: meanwhile it issues other steps, and ends the wait at the timeout.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch.utils import _pytree as pytree

from avgpipe import device as devices
from avgpipe.device import ReadyOnEvent, current_stream, on_accelerator, ready_on_event, timed_event

_log = logging.getLogger("avgpipe")

_POOL = 32  # streams that torch has for a device; further ones are reused


_KEPT = 40_000  # rows of a clock


_UNREAD = 512  # spans that a clock leaves unread before it checks which have ended


_REBASE_MS = 10_000.0  # events measure the time between them in float32


@contextmanager
def captured(device: torch.device, pool: Any = None, states: Iterable[Any] = ()) -> Iterator[Any]:
    """Capture what the block issues on the current stream, instead of running it; yield the graph.

    ``torch.cuda.graph`` does this too, but waits for the device each time, empties the allocator's cache, and
    forbids calls that break a capture in all threads, not only in its own.

    Args:
        pool: the ``pool()`` of a graph after which this one is always replayed, and with which it shares
            memory.
        states: of generators, see :func:`avgpipe.device.random_state`, from which the block draws.
    """
    graph = devices.backend.graph(device)
    for state in states:
        graph.register_generator_state(state)
    shared = {} if pool is None else {"pool": pool}
    graph.capture_begin(**shared, capture_error_mode="thread_local")
    try:
        yield graph
    except BaseException:
        with suppress(RuntimeError):  # it reports only that something went wrong
            graph.capture_end()
        raise
    graph.capture_end()


class Streams:
    """The streams of a worker on an accelerator; the CPU has none."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._of_lanes = device, list[Any]()
        # By reference; a wait captures the last record, so one event is enough.
        self._averaged: dict[int, Any] = {}
        self.clock = DeviceClock(device)
        self.copies = CopyStream(device)

    def lane(self, reference: int, moves_others: bool) -> LaneStream:
        """Return a stream for a lane.

        Args:
            reference: A number that the lanes of one reference share; their updates are one chain.
            moves_others: Whether an update may move weights outside of a lane's own steps.
        """
        idle = devices.backend.idle[self._device]
        self._of_lanes.append(idle.pop() if idle else devices.backend.Stream(self._device))
        if len(self._of_lanes) == _POOL:  # the one for copies makes one too many
            _log.warning(
                "a worker has %d lanes or more on %s, and torch %d streams for all of them: some lanes share one and "
                "take turns; plan fewer pipelines or stages for a worker",
                *(_POOL, self._device, _POOL),
            )
        averaged = self._averaged.setdefault(reference, devices.backend.Event(self._device))
        return LaneStream(self._device, self._of_lanes[-1], averaged, moves_others, self.clock)

    def close(self) -> None:
        """Give the lanes' streams, with cuBLAS's tens of MiB for each, back for reuse by the next worker."""
        devices.backend.idle[self._device] += self._of_lanes
        self._of_lanes.clear()


class LaneStream:
    """The stream of a lane, which runs its forwards, backwards, optimizer and averaging one after another."""

    def __init__(
        self, device: torch.device, stream: Any, averaged: Any, moves_others: bool, clock: DeviceClock
    ) -> None:
        self._device, self._averaged, self._moves_others = device, averaged, moves_others
        self._clock, self._stream = clock, stream

    def begin(self, batch: ReadyOnEvent | None) -> None:
        """Begin a batch after the work on the caller's stream: weights it loaded, inputs it computed."""
        self._stream.wait_stream(current_stream(self._device))
        if batch is not None:
            with self._stream:
                batch.received()

    @contextmanager
    def step(
        self, place: Place | None, begins: bool, updates: bool, receive: Callable[[], None]
    ) -> Iterator[None]:
        """Issue the block's work on this stream.

        Args:
            place: Stage, pipeline, batch, micro-batch and kind, for the clock; None: the step is no part of
                training.
            begins: Whether it is the first step of a batch.
            updates: Whether it is a part of the chain of updates.
            receive: Makes the current stream wait for the step's inputs; the clock does not count this wait.
        """
        with self._stream:
            if updates or (begins and self._moves_others):
                self._stream.wait_event(self._averaged)  # returns at once if it was never recorded
            receive()
            start = None if place is None else self._clock.mark(self._stream)
            yield
            if place is not None:
                self._clock.note(place, start, self._clock.mark(self._stream))
            if updates:
                self._stream.record_event(self._averaged)

    def issuing(self) -> AbstractContextManager[Any]:
        """Return the context that issues work on this stream outside of its steps, such as sums and averages.

        If updates arrive from other processes, this is the only lane of its reference here: the chain of updates is
        its stream.
        """
        return self._stream  # type: ignore[no-any-return]

    def wait_for(self, other: LaneStream) -> None:
        """Order what this lane issues next after what the other lane has issued."""
        self._stream.wait_stream(other._stream)

    def begin_for(self, other: LaneStream) -> None:
        """Order what this lane issues next after all that the other lane's next batch must wait for."""
        self._stream.wait_stream(other._stream)
        if other._moves_others:
            self._stream.wait_event(other._averaged)

    def wait_event(self, event: Any) -> None:
        """Order what this lane issues next after an event."""
        self._stream.wait_event(event)

    @contextmanager
    def noting(self, place: Place) -> Iterator[None]:
        """Note on the clock what the block issues on this stream as a step at another place."""
        start = self._clock.mark(self._stream)
        yield
        self._clock.note(place, start, self._clock.mark(self._stream))

    def issued(self) -> Any:
        """Return an event after all that this lane has issued so far."""
        return self._stream.record_event()

    def end(self, issued: Any = None) -> None:
        """Make the caller's stream wait for what this lane had ``issued`` then; by default, for all of it."""
        current_stream(self._device).wait_event(self.issued() if issued is None else issued)


class CopyStream:
    """Copies batches to the device, on a stream of its own, from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, devices.backend.Stream(device)

    def start(self, value: Any) -> ReadyOnEvent:
        """Begin to copy a pytree to the device, without blocking the host."""
        with self._stream:
            return ready_on_event(pytree.tree_map(self._copy, value), self._device)

    def _copy(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or on_accelerator(leaf):
            return leaf
        # The pinned copy may be freed at once: torch's host allocator keeps it until the stream has read it.
        return devices.backend.pinned(leaf).to(self._device, non_blocking=True)


Place = tuple[int, int, int, int, str]  # stage, pipeline, batch, micro-batch and kind


Row = tuple[int, int, int, int, str, float, float, str]


class DeviceClock:
    """Records the device's work on the clock of time.perf_counter. Events are reused once they are read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unread: deque[tuple[Place, Any, Any]] = deque()
        self._free: list[Any] = []
        self._rows: deque[Row] = deque(maxlen=_KEPT)
        self._calibrate()

    def mark(self, stream: Any) -> Any:
        """Return an event recorded now."""
        if not self._free and len(self._unread) >= _UNREAD:
            self._read(waits=False)
        event = self._free.pop() if self._free else devices.backend.Event(self._device, enable_timing=True)
        event.record(stream)
        return event

    def note(self, place: Place, start: Any, end: Any) -> None:
        self._unread.append((place, start, end))

    def rows(self) -> list[Row]:
        """Return all spans that were noted; waits until the device has completed them."""
        self._read(waits=True)
        self._calibrate()  # the two clocks drift apart
        return list(self._rows)

    def ended(self) -> deque[Row]:
        """Return the noted spans that have ended, without waiting."""
        self._read(waits=False)
        return self._rows

    def _calibrate(self) -> None:
        base = timed_event(self._device)
        base.synchronize()
        self._base, self._base_s = base, time.perf_counter()

    def _read(self, waits: bool) -> None:
        """Read the oldest spans: all, or those that have ended."""
        while self._unread:
            place, start, end = self._unread[0]
            if waits:
                end.synchronize()
            elif not end.query():
                return
            self._unread.popleft()
            start_s = self._base_s + self._base.elapsed_time(start) / 1e3
            end_s = max(start_s, self._base_s + self._base.elapsed_time(end) / 1e3)
            self._rows.append((*place, start_s, end_s, ""))
            far = self._base.elapsed_time(end) > _REBASE_MS
            self._free += (start, self._base if far else end)
            if far:
                self._base, self._base_s = end, end_s
