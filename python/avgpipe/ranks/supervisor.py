"""The loop of every launcher: it starts processes by a policy, watches them, and leaves none, whatever ends it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.signals import PREEMPTED

if TYPE_CHECKING:
    from avgpipe.ranks.launch import Started

_HANDLED = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT  # by torch's launcher


_arrived: list[int] = []  # signals that have raised Signalled


class Signalled(KeyboardInterrupt):
    """A signal ended the launcher; where it is no Interrupted, before it had ranks."""

    def __init__(self, number: int) -> None:
        super().__init__(signal_name(number))
        self.sigval, self.exit_code = number, 128 + number


class Interrupted(Signalled):
    """A signal ended the launcher; its ranks have ended."""


class LaunchPolicy(Protocol):
    """What a launcher does with the processes that it starts, and with those that are lost."""

    def begin(self) -> None:
        """Start the processes."""

    def look(self) -> bool:
        """React to what has happened, many times a second; return whether the run goes on."""

    def all_started(self) -> Sequence[Started]:
        """Return all processes at this moment."""

    def close(self, number: int) -> None:
        """End all processes by a signal, and wait."""


def watch(policy: LaunchPolicy, preemption_s: float | None = None, poll_s: float = LIMITS.poll_s) -> bool:
    """Run a policy's processes to the end; return whether they were notified of a preemption.

    ``preemption_s``: see :func:`run_on_ranks`. Interrupted where a signal arrived. In any case no process is
    left.
    """
    preempted: Preempted | None = None

    def close(number: int) -> None:
        policy.close(number if preempted is None else preempted.signal_for(number))

    with keeping_handlers(), ending(close):
        pass_on_questions(policy.all_started)
        policy.begin()
        if _arrived:  # what it raised was lost in a callback, as of Python's imports
            raise Signalled(_arrived[0])
        if preemption_s is not None:
            preempted = Preempted(policy.all_started, preemption_s)
        while policy.look():
            time.sleep(poll_s)
            if preempted is not None:
                preempted.look()
    return preempted is not None and preempted.is_noticed


class Preempted:
    """Handles the launcher's first SIGTERM: its ranks are notified, and may end by themselves in time.

    Args:
        all_started: returns all started processes at any time.
        within_s: the time limit in seconds.
    """

    def __init__(self, all_started: Callable[[], Iterable[Started]], within_s: float) -> None:
        self._all_started, self._within_s = all_started, within_s
        self._deadline: float | None = None
        self._signalled: dict[int, set[int]] = {}
        self._before: Any = None
        self._listen()

    def _listen(self) -> None:
        """Install the handler; torch's launcher replaces it whenever it starts processes."""
        answer = signal.getsignal(signal.SIGTERM)
        if answer != self._notice and threading.current_thread() is threading.main_thread():
            self._before = answer
            signal.signal(signal.SIGTERM, self._notice)

    def _notice(self, *_: object) -> None:
        self._deadline = time.monotonic() + self._within_s + LIMITS.poll_s
        signal.signal(signal.SIGTERM, self._before)  # a second SIGTERM ends them at once

    @property
    def is_noticed(self) -> bool:
        return self._deadline is not None

    def signal_for(self, number: int) -> int:
        """Return the signal by which to end the ranks: those that were notified take SIGTERM for a part of it."""
        return signal.SIGINT if self.is_noticed and number != signal.SIGKILL else number

    def look(self) -> None:
        """Notify the ranks; if they have not ended in time, let SIGTERM have its usual effect."""
        if self._deadline is None:
            self._listen()
            return
        for started in self._all_started():
            started.send_signal(PREEMPTED, self._signalled.setdefault(id(started), set()))
        if time.monotonic() > self._deadline:
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def ending(close: Callable[[int], None]) -> Iterator[None]:
    """Call ``close`` after the block in any case, with the signal that should end the started processes.

    Interrupted where a signal has ended the block.
    """
    number: int = signal.SIGKILL
    try:
        yield
    except BaseException as error:
        number = getattr(error, "sigval", signal.SIGINT if isinstance(error, KeyboardInterrupt) else number)
        if number != signal.SIGKILL:
            raise Interrupted(number) from error
        raise
    finally:
        _end(close, number)


def _end(close: Callable[[int], None], number: int) -> None:
    """Call ``close``; if a signal arrives meanwhile call it again, to kill all."""
    try:
        close(number)
    except BaseException as error:
        if not (isinstance(error, KeyboardInterrupt) or hasattr(error, "sigval")):
            raise
        if threading.current_thread() is threading.main_thread():
            for handled in _HANDLED:  # until keeping_handlers restores them
                signal.signal(handled, signal.SIG_IGN)
        close(signal.SIGKILL)


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """Let signals raise Signalled within the block, until torch's launcher handles them.

    So whatever a launcher makes before is removed. Signals that are ignored, or handled by the caller, stay so.
    Outside the main thread nothing changes.
    """
    unhandled = signal.SIG_DFL, signal.default_int_handler
    with keeping_handlers():
        if threading.current_thread() is threading.main_thread():
            for number in _HANDLED:
                if signal.getsignal(number) in unhandled:
                    signal.signal(number, _raise)
        try:
            yield
        finally:
            _arrived.clear()


def _raise(number: int, _: object) -> None:
    _arrived.append(number)
    raise Signalled(number)


def pass_on_questions(all_started: Callable[[], Iterable[Started]]) -> None:
    """Forward SIGUSR1 to all ranks, which print what they are doing; see :func:`keeping_handlers`."""

    def pass_on(*_: object) -> None:
        for started in all_started():
            started.send_signal(signal.SIGUSR1, set())

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, pass_on)


@contextmanager
def keeping_handlers() -> Iterator[None]:
    """Restore the signal handlers that torch's launcher replaces in the main thread."""
    before = {number: signal.getsignal(number) for number in (*_HANDLED, signal.SIGUSR1)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGTERM."""
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")
