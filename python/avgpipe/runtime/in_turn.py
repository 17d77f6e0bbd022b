"""A scheduler whose device runs one action after another, as a CPU does, instead of all at once.

By default an action is issued as soon as its messages are announced, long before they are there, and the streams of
several pipelines share the device. Where kernels fill it, pipelines then compute everything together, and wait in the
same bubbles. Here an action is issued once its messages are there, and only while few others are on the device: one
that runs, and one behind it, so that the device does not wait for the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from avgpipe.device import ReadyOnEvent
from avgpipe.errors import PipelineTimeout
from avgpipe.links.link import Key
from avgpipe.runtime.lane import Lane, Queue
from avgpipe.runtime.route import Step
from avgpipe.runtime.scheduler import Scheduler

_POLL_S = 20e-6  # between two queries of the device's progress


class InTurnScheduler(Scheduler):
    """Issues a step once its messages are there, while fewer than ``most`` steps are on the device."""

    def __init__(self, most: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._most = most
        self._issued: deque[Any] = deque()  # events after the steps that are on the device
        self._noted: tuple[Lane, Step] | None = None  # the newest step with an event
        self._moved_at = time.monotonic()  # when a step was issued, or found done

    def _most_urgent(self) -> Queue | None:
        self._note_issued()
        while self._issued and self._issued[0].query():
            self._issued.popleft()
            self._moved_at = time.monotonic()
        if len(self._issued) >= self._most:
            return None
        ready = [queue for queue in self._queues if queue.head is not None and self._is_there(*queue.next)]
        return min(ready, key=lambda queue: queue.next[1].priority, default=None)

    def _note_issued(self) -> None:
        """Take an event after the step that has run since the last call."""
        if self._running is not None and self._running is not self._noted:
            self._noted = self._running
            lane = self._running[0]
            if lane.stream is not None:
                self._issued.append(lane.stream.issued())
                self._moved_at = time.monotonic()

    @staticmethod
    def _is_there(lane: Lane, step: Step) -> bool:
        """Whether a step is ready, and the device has its messages."""
        messages = lane.port.messages
        return lane.is_ready(step) and all(
            message.has_happened for key in step.needs if isinstance(message := messages[key], ReadyOnEvent)
        )

    def _wait(self, awaited: Sequence[Key], recorded: bool) -> None:
        """Wait for the device, which rings no bell; else as always."""
        queued = [queue.next for queue in self._queues if queue.head is not None]
        if not self._issued and not any(lane.is_ready(step) for lane, step in queued):
            super()._wait(awaited, recorded)
            self._moved_at = time.monotonic()
            return
        self._mailbox.raise_failure()
        if time.monotonic() - self._moved_at > self._world.timeout_s:
            raise PipelineTimeout(
                f"rank {self._world.rank} waited {self._world.timeout_s:g} s for its device to complete a step. Raise "
                "timeout_s if it is that slow; else a transfer that it waits for has never arrived"
            )
        self._mailbox.pause(_POLL_S)
