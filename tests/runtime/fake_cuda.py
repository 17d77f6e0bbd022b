"""Streams and events without a device: they only keep account of what comes before what.

Every operation has a number on its stream. A stream's clock says, for each stream, up to which operation it is ordered
after; an event keeps a copy of the clock of the stream on which it was recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Clock = dict[str, int]


class Event:
    def __init__(self, **_: bool) -> None:
        self.clock: Clock = {}
        self.at = 0.0

    def record(self, stream: Stream) -> None:
        self.clock, self.at = dict(stream.clock), time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


class Stream:
    count = 0

    def __init__(self, *_: Any) -> None:
        Stream.count += 1
        self.name = f"stream {Stream.count}"
        self.clock: Clock = {self.name: 0}

    def wait_event(self, event: Event) -> None:
        for name, number in event.clock.items():
            self.clock[name] = max(self.clock.get(name, 0), number)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def operate(self) -> tuple[str, int]:
        """Issue an operation; its name."""
        self.clock[self.name] += 1
        return self.name, self.clock[self.name]

    def follows(self, operation: tuple[str, int]) -> bool:
        """Whether what is issued now runs after ``operation``."""
        name, number = operation
        return self.clock.get(name, 0) >= number


class FakeCuda:
    """Stands for ``torch.cuda`` in avgpipe.runtime.streams."""

    Event, Stream = Event, Stream

    def __init__(self) -> None:
        self._current = Stream()

    def current_stream(self, device: Any = None) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before
