"""What signals do to a process that trains: they end it, even while a library waits, or have it end by itself."""

from __future__ import annotations

import faulthandler
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

GRACE_S = 3.0  # after SIGTERM, to see the closed connection of the rank that died and name it
PREEMPTED = signal.SIGUSR2  # from a launcher, to its ranks
_ENDS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Answers:
    """What a process that trains does when signals come, in a thread of its own.

    Attributes:
        preempt: sees to it that the process ends by itself.
        within_s: how long that may take.
        doing: says what it is at.
    """

    preempt: Callable[[], None]
    within_s: float
    doing: Callable[[], str]


_answers: Answers | None = None
_is_preempted = False  # somebody has said so, though there was nobody to answer


@contextmanager
def answering(answers: Answers) -> Iterator[None]:
    """Have signals answered inside a block that ends on them."""
    global _answers
    _answers = answers
    if _is_preempted:
        answers.preempt()
    try:
        yield
    finally:
        _answers = None


@contextmanager
def ending_on_signals(
    say: Callable[[signal.Signals], None], grace_s: float = 0.0, preempted_by: int = signal.SIGTERM
) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM end this process with 128 + their number; SIGTERM after ``grace_s`` seconds.

    A thread does it, woken by the signal itself: Python's own handlers would wait until the main thread
    returns from whatever library call it is in. The grace lets a worker see, and say, why the others are
    gone. ``say`` is called just before the end. Outside the main thread signals stay as they are.

    ``preempted_by`` is the signal by which somebody takes the machine away. Where :func:`answering` says how, the
    process then ends by itself in time, unless another signal is impatient. A launcher's ranks have another one, for
    its SIGTERM says that a rank is gone. SIGUSR1 shows on standard error what all threads are at, and ends nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handled = {*_ENDS, preempted_by, signal.SIGUSR1}
    handlers = {number: signal.signal(number, lambda *_: None) for number in handled}
    faulthandler.register(signal.SIGUSR1, file=2, chain=True)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watching = reader, say, grace_s, preempted_by, os.getppid()
    watcher = threading.Thread(target=_watch, args=watching, name="avgpipe-signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        faulthandler.unregister(signal.SIGUSR1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.write(writer, b"\0")
        watcher.join()
        os.close(writer)
        os.close(reader)


def _watch(
    reader: int, say: Callable[[signal.Signals], None], grace_s: float, preempted_by: int, parent: int
) -> None:
    end, deadline, is_preempted = int(signal.SIGTERM), math.inf, False
    while (number := _next_signal(reader, deadline)) is not None:
        if number == 0:  # the block has ended
            return
        if number == signal.SIGUSR1:
            with suppress(OSError, ValueError):  # nobody reads
                if _answers is not None:
                    print(f"avgpipe: {_answers.doing()}", file=sys.stderr, flush=True)
        elif number == preempted_by and not is_preempted and _preempt(preempted_by):
            is_preempted = True
            deadline = math.inf if _answers is None else time.monotonic() + _answers.within_s
        elif number not in _ENDS:  # another one, as torch handles those of a DataLoader's processes
            continue
        elif is_preempted and preempted_by not in _ENDS and number == signal.SIGTERM and _has_parent(parent):
            continue  # it came to all processes, and the launcher has told what it means
        elif number == signal.SIGTERM and grace_s and deadline == math.inf:
            deadline = time.monotonic() + grace_s
        else:
            end = number
            break
    try:
        say(signal.Signals(end))
    finally:  # though nobody may read it
        os._exit(128 + end)


def _has_parent(parent: int) -> bool:
    return os.getppid() == parent


def _preempt(by: int) -> bool:
    """Whether the process will end by itself, or will once it trains."""
    global _is_preempted
    if _answers is None:
        _is_preempted = by not in _ENDS
        return _is_preempted
    _answers.preempt()
    return True


def _next_signal(reader: int, deadline: float) -> int | None:
    """Return the next signal, 0 for the end of the block, None once the time is up."""
    left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
    return os.read(reader, 1)[0] if select.select([reader], [], [], left)[0] else None
