"""Our scheduler, with a device that runs one action at a time, as a CPU does: an experiment.

On a device the scheduler issues an action as soon as its messages are announced, long before they are there, and
streams share the device. Here it issues an action once its messages are there, and only while fewer than two are on the
device: one that runs, and one behind it, so that the device does not wait for the host. Among those that are ready the
scheduler chooses as ever.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from avgpipe.device import ReadyOnEvent
from avgpipe.runtime.lane import Lane
from avgpipe.runtime.scheduler import Scheduler
from avgpipe.runtime.streams import LaneStream

_MOST = 2
_POLL_S = 20e-6


@contextmanager
def in_turn() -> Iterator[deque[Any]]:
    """Let pipelines that train meanwhile take turns on their device; yield the events after what is issued there."""
    issued: deque[Any] = deque()
    step, is_ready = LaneStream.step, Lane.is_ready
    most_urgent, wait = Scheduler._most_urgent, Scheduler._wait

    @contextmanager
    def noted(stream: LaneStream, place: Any, *rest: Any, **more: Any) -> Iterator[None]:
        with step(stream, place, *rest, **more):
            yield
        if place is not None:
            issued.append(stream.issued())

    def is_there(lane: Lane, step: Any) -> bool:
        return is_ready(lane, step) and all(_has_happened(lane.port.messages[key]) for key in step.needs)

    def most_urgent_in_turn(scheduler: Scheduler) -> Any:
        while issued and issued[0].query():
            issued.popleft()
        return most_urgent(scheduler) if len(issued) < _MOST else None

    def wait_in_turn(scheduler: Scheduler, *rest: Any) -> None:
        """For the device, which rings no bell; else for messages."""
        queued = [queue.next for queue in scheduler._queues if queue.head is not None]
        if issued or any(is_ready(lane, step) for lane, step in queued):
            time.sleep(_POLL_S)
        else:
            wait(scheduler, *rest)

    with ExitStack() as stack:
        for owner, name, patched in (
            (LaneStream, "step", noted),
            (Lane, "is_ready", is_there),
            (Scheduler, "_most_urgent", most_urgent_in_turn),
            (Scheduler, "_wait", wait_in_turn),
        ):
            stack.enter_context(mock.patch.object(owner, name, patched))
        yield issued


def _has_happened(message: Any) -> bool:
    return not isinstance(message, ReadyOnEvent) or bool(message._ready.query())
