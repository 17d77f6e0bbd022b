"""Signals in a process that trains: they end it, even while a library waits, or make it end by itself."""

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

PREEMPTED = signal.SIGUSR2  # from a launcher, to its ranks
_ENDS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Answers:
    """What a process that trains does on signals, in a thread of its own.

    Attributes:
        preempt: makes the process end by itself.
        within_s: the time limit for that, in seconds.
        doing: returns what it is doing.
    """

    preempt: Callable[[], None]
    within_s: float
    doing: Callable[[], str]


_answers: Answers | None = None
_is_preempted = False  # a preemption arrived outside any answering() block


@contextmanager
def answering(answers: Answers) -> Iterator[None]:
    """Answer signals by ``answers`` within the block."""
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
    """Within the block, SIGINT and SIGTERM end this process with 128 + their number.

    SIGTERM does so after ``grace_s`` seconds, in which a worker can notice, and report, why the others have
    ended. A thread ends the process, woken by the signal itself: Python's own handlers would wait until the
    main thread returns from the library call that it is in. ``say`` is called just before the end. Outside
    the main thread nothing changes.

    ``preempted_by`` is the signal that announces a preemption of the machine. Where :func:`answering` gives
    answers, the process then ends by itself in time, unless a further signal ends it at once. A launcher's
    ranks have another signal for it, since the launcher's SIGTERM means that a rank has ended. SIGUSR1 prints
    what all threads are doing on standard error, and ends nothing.
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
            with suppress(OSError, ValueError):  # no reader
                if _answers is not None:
                    print(f"avgpipe: {_answers.doing()}", file=sys.stderr, flush=True)
        elif number == preempted_by and not is_preempted and _preempt(preempted_by):
            is_preempted = True
            deadline = math.inf if _answers is None else time.monotonic() + _answers.within_s
        elif number not in _ENDS:  # another signal, such as SIGCHLD of DataLoader processes
            continue
        elif (
            is_preempted and preempted_by not in _ENDS and number == signal.SIGTERM and os.getppid() == parent
        ):
            continue  # it was sent to all processes, and the launcher has sent its meaning
        elif number == signal.SIGTERM and grace_s and deadline == math.inf:
            deadline = time.monotonic() + grace_s
        else:
            end = number
            break
    try:
        say(signal.Signals(end))
    finally:  # even where standard error has no reader
        os._exit(128 + end)


def _preempt(by: int) -> bool:
    """Preempt the process; return whether it will end by itself, now or once it trains."""
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
