"""A run in a process of its own: how signals end it, and the reason why it failed, from its log."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from avgpipe.cli.output import WRONG_ARGUMENTS
from avgpipe.ranks.launch import tied
from avgpipe_lab.compare.comparison import FAILED, KILLED, OUT_OF_MEMORY, REFUSED

_LOOK_S = 0.25  # seconds between two checks of a run
_GRACE_S = {signal.SIGINT: 20.0, signal.SIGTERM: 5.0}  # wait after each signal, then SIGKILL
_SAID = "avgpipe: error: "
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|MemoryError", re.IGNORECASE
)
_RAISED = re.compile(r"[\w.]*(Error|Exception)\b")  # the last line of a traceback
_REASON_LETTERS = 200
_PROGRAM = (sys.executable, "-m", "avgpipe")

Caught = list[signal.Signals]
# Runs ``avgpipe`` with the given words until it ends or a signal ends it, and writes its output to the file;
# calls the function now and then; returns the exit code.
Runner = Callable[[Sequence[str], Path, Caught, Callable[[], None]], int]


@contextmanager
def noting_signals(caught: Caught) -> Iterator[None]:
    """Note SIGINT and SIGTERM within the block instead of raising, so that results are still written."""
    here = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if here else ()
    handlers = {s: signal.signal(s, lambda n, _: caught.append(signal.Signals(n))) for s in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_in_process(
    command: Sequence[str],
    log: Path,
    caught: Caught,
    tick: Callable[[], None],
    program: Sequence[str] = _PROGRAM,
) -> int:
    """Run in a new session, so that Ctrl-C reaches this process only, which then ends the run once.

    After a signal the run gets SIGINT, then SIGTERM, then SIGKILL; another signal meanwhile shortens the
    wait. Its workers end with it.
    """

    def wait(signals: int, seconds: float) -> None:
        """Wait ``seconds`` for the process to end, or until there are more than ``signals`` signals."""
        deadline = time.monotonic() + seconds
        while len(caught) == signals and time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)
                return
            tick()

    with log.open("wb") as file:
        process = subprocess.Popen(
            tied("stdout", *program, *command),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait(0, math.inf)
        for number, grace_s in _GRACE_S.items():
            if process.poll() is None:
                process.send_signal(number)
                wait(len(caught), grace_s)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode


def verdict(code: int, log: str) -> tuple[str, str]:
    """Return status and reason of a run without a summary, from its exit code and its log."""
    lines = [line for line in log.splitlines() if line.strip()]
    said = [line.removeprefix(_SAID) for line in lines if line.startswith(_SAID)]
    short = next((line for line in lines if _NO_MEMORY.search(line)), None)
    if short is not None:
        return OUT_OF_MEMORY, _plain(short)
    if code == -signal.SIGKILL or any("was killed by SIGKILL" in line for line in said):
        return KILLED, _plain(said[-1]) if said else "by hand, or by the system when memory runs out"
    status = REFUSED if code == WRONG_ARGUMENTS else FAILED
    raised = [line for line in lines if _RAISED.match(line)]
    # The first error is the cause: other workers then lost a peer, and the last line names the worker that
    # failed.
    if said and not (raised and "failed with exit code" in said[0]):
        return status, _plain(said[0])
    return status, _plain(raised[0] if raised else lines[-1]) if lines else f"exit code {code}"


def _plain(line: str) -> str:
    """Return the message without its hint about resuming, cut to a limit: the log has all of it."""
    line = re.sub(
        r"; (there is no checkpoint yet|resume from the last checkpoint with: .*)$", "", line.strip()
    )
    line = line.removeprefix(_SAID)
    return line if len(line) <= _REASON_LETTERS else line[: _REASON_LETTERS - 3].rstrip() + "..."
