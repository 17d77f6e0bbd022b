"""Starting workers on this machine through torch's own launcher, and saying what became of them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from avgpipe.cli.errors import WRONG_ARGUMENTS
from avgpipe.ranks.allocator import launch_environment
from avgpipe.ranks.meeting import private_meeting

PEER_LOST = 3  # exit code of a worker that failed only because another one did
_MONITOR_S = 0.1  # how often the launcher looks after its workers


@dataclass(frozen=True)
class Ended:
    """How local workers ended. ``exit_codes`` by rank, negative for a signal. ``first``: the rank that failed of
    itself, while others were only ended for it; None: all succeeded.
    """

    exit_codes: list[int]
    first: int | None

    def reason(self) -> str:
        """What happened to ``first``, as the end of a sentence about it."""
        assert self.first is not None
        code = self.exit_codes[self.first]
        if code >= 0:
            return f"failed with exit code {code}"
        name = _signal_name(-code)
        hint = " (by hand, or by the system when memory runs out)" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{hint}"


class Interrupted(Exception):
    """A signal told the launcher to end; its workers are gone."""

    def __init__(self, number: int) -> None:
        super().__init__(_signal_name(number))
        self.exit_code = 128 + number


def launch(workers: int, command: Sequence[str], added: Mapping[str, str] | None = None) -> Ended:
    """Run ``command`` once per rank with torchrun's environment, and what is ``added``, and wait for the end of all.

    Ranks meet in a file that only this user can read, and look for each other on this host alone: nothing listens
    beyond it. When a worker fails the launcher ends the others; nothing is restarted. Raises Interrupted on SIGINT,
    SIGTERM, SIGHUP and SIGQUIT, once the workers have been ended.
    """
    from torch.distributed.elastic.multiprocessing import (
        DefaultLogsSpecs,
        PContext,
        SignalException,
        start_processes,
    )

    _quiet()
    processes: PContext | None = None
    with tempfile.TemporaryDirectory(prefix="avgpipe-") as folder, _environment(workers), _handlers():
        environment = {**private_meeting(folder), **(added or {})}
        try:
            processes = start_processes(
                "avgpipe",
                command[0],
                dict.fromkeys(range(workers), tuple(command[1:])),
                {rank: {**environment, **_place(rank, workers)} for rank in range(workers)},
                DefaultLogsSpecs(log_dir=folder),
            )
            result = processes.wait(period=_MONITOR_S)
        except SignalException as error:
            if processes is not None:
                processes.close(error.sigval)
            raise Interrupted(error.sigval) from error
        except KeyboardInterrupt as error:  # before the launcher installed its handlers
            raise Interrupted(signal.SIGINT) from error
        finally:
            _show_cursor()
    assert result is not None
    failures = {rank: (failure.exitcode, failure.timestamp) for rank, failure in result.failures.items()}
    codes = [failures[rank][0] if rank in failures else 0 for rank in range(workers)]
    return Ended(codes, _first(failures) if failures else None)


def _place(rank: int, workers: int) -> dict[str, str]:
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": workers,
        "LOCAL_WORLD_SIZE": workers,
    }
    return {name: str(value) for name, value in own.items()}


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _first(failures: dict[int, tuple[int, int]]) -> int:
    """The rank to blame, of exit codes and times by rank: the launcher ends the others, or they miss their peer."""

    def blame(rank: int) -> tuple[int, int]:
        code, timestamp = failures[rank]
        order = {WRONG_ARGUMENTS: 1, PEER_LOST: 3, -signal.SIGTERM: 4, 128 + signal.SIGTERM: 4}
        return order.get(code, 0 if code < 0 else 2), timestamp

    return min(failures, key=blame)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextmanager
def _environment(workers: int) -> Iterator[None]:
    """Share the cores among the workers, and memory as they need it, unless the user decided otherwise."""
    ours = {"OMP_NUM_THREADS": str(max(1, cores() // workers)), **launch_environment()}
    added = {name: value for name, value in ours.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _handlers() -> Iterator[None]:
    """Give back the signal handlers that the launcher replaces."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _quiet() -> None:
    """The launcher's log says in many lines what we say in one; LOGLEVEL brings it back."""
    if "LOGLEVEL" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _show_cursor() -> None:
    """A progress bar that was killed has left the cursor hidden."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")
        sys.stderr.flush()
