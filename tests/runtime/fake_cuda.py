"""CUDA without a device: streams and events that only keep account of what comes before what, tensors that say they are
elsewhere.

Every operation has a number on its stream. A stream's clock says, for each stream, up to which operation it is ordered
after; an event keeps a copy of the clock of the stream on which it was recorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

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


class Work:
    """Of a collective that NCCL runs: on a stream of its own, after what was current when it was issued.

    ``wait`` keeps the host no time: it orders the stream that is current, in the thread that calls.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self._stream = cuda, Stream()
        self._stream.wait_stream(cuda.current_stream())
        self.operation = self._stream.operate()

    def wait(self) -> None:
        self._cuda.current_stream().wait_stream(self._stream)


class HostWork(Work):
    """Of a collective that gloo runs on copies in the host's memory. ``done``: set when the copy back is issued.

    ``wait`` keeps the host until then, and then orders the current stream.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(cuda)
        self.done = threading.Event()

    def wait(self) -> None:
        assert self.done.wait(20), "the collective is never done"
        super().wait()


class FakeCuda:
    """Stands for ``torch.cuda`` in avgpipe.device. Each thread has a current stream, first the default one."""

    Event, Stream = Event, Stream

    def __init__(self) -> None:
        self._default = Stream()
        self._of_thread = threading.local()

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(self._of_thread, "current", self._default)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._of_thread.current = self.current_stream(), stream
        try:
            yield
        finally:
            self._of_thread.current = before


class DeviceTensor(torch.Tensor):
    """Says that it is on a CUDA device, with its values in the host's memory. As there, only a copy may go between the
    two; ``meetings``: how many bytes such copies had.
    """

    inner: torch.Tensor
    meetings: ClassVar[list[int]] = []

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> DeviceTensor:
        form = {"strides": inner.stride(), "dtype": inner.dtype, "device": "cuda:0"}
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(cls, inner.shape, **form)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        meets = not all(isinstance(x, cls) for x in tensors)
        if meets and function is not torch.ops.aten.copy_.default:
            raise ValueError(f"{function}: tensors of two devices")
        inside = pytree.tree_map(lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs or {}))
        result = function(*inside[0], **inside[1])
        if meets:
            cls.meetings.append(args[1].nbytes)
            return args[0]
        return pytree.tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, result)
