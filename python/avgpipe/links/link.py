"""What every link promises, the mailbox that it fills, and the link within a process.

In the mailbox arrived messages wait for the lane that needs them; the scheduler sleeps on it until one does. The
scheduler's thread alone reads and takes. It looks into the links that have no thread of their own (``sources``)
whenever the bell has rung; threads, and other processes, ring it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from avgpipe.device import Handed, handed
from avgpipe.links.message import Key, assemble, describe
from avgpipe_ext import ring

_SPIN_S = 200e-6


class Link(Protocol):
    """This worker's connection to the seats of one other place.

    ``send`` never blocks, and has taken its copy when it returns. What arrives goes into the mailbox.
    """

    name: str

    def send(self, key: Key, value: object) -> None: ...

    def close(self, patience_s: float) -> None:
        """``patience_s``: how long the other end may take to receive what was sent last."""


class BellLike(Protocol):
    """A counter that others move, and a way to wait until they do."""

    def count(self) -> int: ...

    def ring(self) -> None: ...

    def wait(self, seen: int, timeout_s: float, spin_s: float = 0.0) -> int: ...


class Mailbox:
    """``bell``: the one that this worker's peers ring; by default one of this process. ``neighbours``: workers
    that compute on this host at the same time, this one included; spinning is for when there is a processor for
    each. ``rank_of``: the rank that holds each seat; by default seat k is at rank k.
    """

    def __init__(
        self,
        bell: BellLike | None = None,
        neighbours: int = 1,
        rank_of: Sequence[int] | None = None,
    ) -> None:
        self._rank_of = rank_of
        self.messages: dict[Key, Any] = {}
        self.sources: list[Callable[[], None]] = []
        self.bell: BellLike = bell or (ring.Bell.local() if ring.supported() else ThreadBell())
        self._spin_s = _SPIN_S if neighbours <= _processors() else 0.0
        self._seen = -1
        self._failure: BaseException | None = None
        self._lost: dict[int, BaseException] = {}  # ranks from which nothing more comes

    def put(self, key: Key, value: Any) -> None:
        """Deliver from the scheduler's own thread."""
        self.messages[key] = value

    def deliver(self, key: Key, value: Any) -> None:
        """Deliver from any thread."""
        self.messages[key] = value
        self.bell.ring()

    def fail(self, failure: BaseException, source: int | None = None) -> None:
        """Make every later wait for what has not arrived raise ``failure`` (the first one stays).

        With ``source``, only waits for messages of that rank: it may have left because it was done.
        """
        if source is not None:
            self._lost.setdefault(source, failure)
        elif self._failure is None:
            self._failure = failure
        self.bell.ring()

    def __contains__(self, key: Key) -> bool:
        return key in self.messages

    def take(self, key: Key) -> Any:
        message = self.messages.pop(key)
        return message.received() if isinstance(message, Handed) else message

    def collect(self) -> None:
        """Look into the sources if the bell has rung since the last time."""
        count = self.bell.count()
        if count != self._seen:
            self._seen = count  # before looking: what arrives meanwhile rings once more
            for source in self.sources:
                source()

    def raise_failure(self, awaited: Callable[[], Iterable[Key]] = tuple) -> None:
        if self._failure is not None:
            raise self._failure
        if self._lost:
            for key in awaited():
                rank = key.source if self._rank_of is None else self._rank_of[key.source]
                if rank in self._lost:
                    raise self._lost[rank]

    def wait_until(
        self,
        arrived: Callable[[], bool],
        timeout_s: float,
        awaited: Callable[[], Iterable[Key]] = tuple,
    ) -> bool:
        """Wait for ``arrived()`` to come true, asked whenever the bell rings; False after ``timeout_s``.

        ``awaited()``: messages without which it never will.
        """
        deadline = time.monotonic() + timeout_s
        spin_s = self._spin_s
        while True:
            self.collect()
            if arrived():
                return True
            self.raise_failure(awaited)  # after the look: a peer that has sent everything may end
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self.bell.wait(self._seen, left_s, spin_s)


class ThreadBell:
    """A bell for the threads of one process, where there is no futex."""

    def __init__(self) -> None:
        self._count, self._changed = 0, threading.Condition()

    def count(self) -> int:
        return self._count

    def ring(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait(self, seen: int, timeout_s: float, spin_s: float = 0.0) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._count != seen, timeout_s)
        return self._count


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LocalLink:
    """Both ends in this process: tensors are detached and shared, not copied; on CUDA they come with the event at which
    they are ready.
    """

    name = "local"

    def __init__(self, mailbox: Mailbox, device: torch.device) -> None:
        self._mailbox, self._device, self._has_streams = mailbox, device, device.type == "cuda"

    def send(self, key: Key, value: Any) -> None:
        if isinstance(value, torch.Tensor):  # most are
            value = value.detach().requires_grad_(value.requires_grad)
        else:
            value = assemble(*describe(value))
        self._mailbox.put(key, handed(value, self._device) if self._has_streams else value)

    def close(self, patience_s: float) -> None:
        pass
