"""Processes that end when they should: with their parent, and on signals even while a library waits.

``python -m avgpipe.cli.process PARENT TO_STDERR COMMAND...`` becomes COMMAND, tied to the process PARENT.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM to this process when ``parent``, its parent, ends, however that ends.

    Linux; elsewhere nothing happens. Survives ``exec``.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before it was watched
        os._exit(128 + signal.SIGTERM)


@contextmanager
def ending_on_signals(say: Callable[[signal.Signals], None], grace_s: float = 0.0) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM end this process with 128 + their number; SIGTERM after ``grace_s`` seconds.

    A thread does it, woken by the signal itself: Python's own handlers would wait until the main thread
    returns from whatever library call it is in. The grace lets a worker see, and say, why the others are
    gone. ``say`` is called just before the end. Outside the main thread signals stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handlers = {s: signal.signal(s, lambda *_: None) for s in _SIGNALS}
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = threading.Thread(
        target=_watch, args=(reader, say, grace_s), name="avgpipe-signals", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.write(writer, b"\0")
        watcher.join()
        os.close(writer)
        os.close(reader)


def _watch(reader: int, say: Callable[[signal.Signals], None], grace_s: float) -> None:
    number = os.read(reader, 1)[0]
    if number == signal.SIGTERM and grace_s and select.select([reader], [], [], grace_s)[0]:
        number = os.read(reader, 1)[0]  # the block ended meanwhile, or another signal is impatient
    if number:
        end = signal.Signals(number)
        say(end)
        os._exit(128 + end)


def main() -> None:
    parent, to_stderr, *command = sys.argv[1:]
    die_with_parent(int(parent))
    if to_stderr == "1":
        os.dup2(2, 1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
