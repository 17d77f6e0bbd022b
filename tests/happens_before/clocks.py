"""What comes after what, on streams that do nothing but keep account of it.

Every operation has a number on its stream. A stream's clock says, for each stream, up to which operation it is ordered
after; an event keeps a copy of the clock of the stream on which it was recorded. The host has a clock too, of all that
it has waited for: whatever it issues from then on comes after that.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from tests.patience import limit

Clock = dict[int, int]

_PATIENCE = 5  # times that an event says it has not happened yet


class Operation(NamedTuple):
    """What was issued: the number of its stream, and its own there."""

    stream: int
    number: int


def join(clock: Clock, other: Clock) -> None:
    for stream, number in other.copy().items():  # another thread may add a stream to it meanwhile
        if clock.get(stream, 0) < number:
            clock[stream] = number


class Event:
    def __init__(self, account: Account) -> None:
        self._account = account
        self.clock: Clock = {}
        self.at = 0.0
        self._asked = 0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._account.current_stream()
        self._account.records += 1
        # what is issued later comes after what the host has waited for by then, and not by now
        stream.join_host()
        self.clock, self.at, self._asked = dict(stream.clock), time.perf_counter(), 0

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._account.current_stream()).wait_event(self)

    def query(self) -> bool:
        """Say whether it has happened: as late as can be, yet not never, for who asks again and again waits for it."""
        host = self._account.host
        self._asked += 1
        if self._asked > _PATIENCE:
            join(host, self.clock)
        return all(host.get(stream, 0) >= number for stream, number in self.clock.items())

    def synchronize(self) -> None:
        join(self._account.host, self.clock)

    def elapsed_time(self, end: Event) -> float:
        host = self._account.host
        clocks = (*self.clock.items(), *end.clock.items())
        assert all(host.get(stream, 0) >= number for stream, number in clocks), "they may not be over yet"
        return 1e3 * (end.at - self.at)


class Stream(AbstractContextManager["Stream"]):
    def __init__(self, account: Account) -> None:
        self._account = account
        self.number = next(account.numbers)
        self.clock: Clock = {self.number: 0}
        self._before: list[Stream] = []

    def __repr__(self) -> str:
        return f"stream {self.number}"

    def __enter__(self) -> Stream:
        self._before.append(self._account.current_stream())
        self._account.of_thread.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._account.of_thread.current = self._before.pop()

    def join_host(self) -> None:
        join(self.clock, self._account.host)

    def wait_event(self, event: Event) -> None:
        self._account.waits += 1
        join(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._account)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.join_host()
        join(self._account.host, self.clock)

    def operate(self) -> Operation:
        """Issue an operation."""
        self.join_host()
        number = self.clock[self.number] = self.clock[self.number] + 1
        return Operation(self.number, number)

    def follows(self, operation: Operation) -> bool:
        """Whether what is issued now runs after ``operation``."""
        self.join_host()
        return self.clock.get(operation.stream, 0) >= operation.number


class Account:
    """Stands for streams of torch: as ``avgpipe.device.backend``, and for ``torch.cuda`` in a link between processes.

    Each thread has a current stream, first the default one.

    Attributes:
        host: what the host has waited for.
        waits, records: of events, so far.
    """

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.host: Clock = {}
        self.waits = self.records = 0
        self.of_thread = threading.local()
        self.idle: dict[Any, list[Stream]] = defaultdict(list)
        self.default = self.Stream()

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:
        return Stream(self)

    def Event(self, device: Any = None, **_: bool) -> Event:
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(self.of_thread, "current", self.default)

    def enqueues(self, device: Any) -> bool:
        return True

    def holds(self, tensor: Any) -> bool:
        return False

    def record_stream(self, tensor: Any, stream: Stream) -> None:
        pass

    def pinned(self, tensor: Any) -> Any:
        return tensor.clone()

    def pinned_bytes(self, size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8)


class Work:
    """Of a collective that NCCL runs: on a stream of its own, after what was current when it was issued.

    ``wait`` keeps the host no time: it orders the stream that is current, in the thread that calls.
    """

    def __init__(self, account: Account) -> None:
        self._account, self.stream = account, account.Stream()
        self.stream.wait_stream(account.current_stream())
        self.operation = self.stream.operate()

    def wait(self, *_: Any) -> None:
        self._account.current_stream().wait_stream(self.stream)


class HostWork(Work):
    """Of a collective that gloo runs on copies in the host's memory. ``done``: set when the copy back is issued.

    ``wait`` keeps the host until then, and then orders the current stream.
    """

    def __init__(self, account: Account) -> None:
        super().__init__(account)
        self.done = threading.Event()

    def wait(self, *_: Any) -> None:
        assert self.done.wait(limit(20)), "the collective is never done"
        super().wait()
