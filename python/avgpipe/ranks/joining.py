"""One more pipeline for a run of isolated ones, started by another command on this host.

The launcher leaves its address and a token in a folder that its user alone can read. Who joins asks there, is told what
to start, and stays connected: either end sees when the other one is gone. The processes are not the launcher's
children; it knows them by their connections, of which the kernel says whose they are, and can end them.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path

from avgpipe.errors import PipelineError, reason
from avgpipe.ranks.coordinator import JOIN, VERSION, encoded, received
from avgpipe.ranks.launch import Job, RanksFailed, ending, keeping_handlers
from avgpipe.ranks.process import peer_of

ADDRESS = "join.json"
_POLL_S = 0.05


def leave_address(folder: Path, address: str, token: str) -> None:
    """Write what :func:`join` needs."""
    with open(os.open(folder / ADDRESS, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"address": address, "token": token}, file)


class Joined:
    """The processes of a pipeline that another command has started."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._starter = _watched(peer_of(connection))
        self._ranks: dict[int, int | None] = {}  # by process id, what tells its end; None where it has ended
        self._is_killed = False

    def know(self, processes: Iterable[int]) -> None:
        """Note processes that have said that they belong here."""
        for process in processes:
            if process not in self._ranks:
                self._ranks[process] = _watched(process)
                if self._is_killed:
                    self._kill(process)

    def poll_or_kill(self) -> bool | None:
        """Return None while they run; True once all have ended. Without the command that has started them they end."""
        if _has_ended(self._starter) and not self._is_killed:
            self.kill("the command that started it has ended")
        left = [process for process, watched in self._ranks.items() if not _has_ended(watched)]
        return None if left or not (self._is_killed or _has_ended(self._starter)) else True

    def kill(self, why: str, blamed: int | None = None) -> None:
        """End all at once, and tell the command why."""
        self._is_killed = True
        with suppress(OSError):
            self._connection.send_bytes(encoded(["end", why]))
        for process in self._ranks:
            self._kill(process)

    def _kill(self, process: int) -> None:
        watched = self._ranks[process]
        if watched is not None and not _has_ended(watched):
            signal.pidfd_send_signal(watched, signal.SIGKILL)

    def close(self, number: int) -> None:
        """End all as the launcher ends."""
        self.kill("the run has ended")
        self._connection.close()
        for watched in (self._starter, *self._ranks.values()):
            if watched is not None:
                os.close(watched)


def _watched(process: int) -> int | None:
    """Return a descriptor of a process, which becomes readable when it ends; None where it has ended."""
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:
        return None


def _has_ended(watched: int | None) -> bool:
    return watched is None or bool(select.select([watched], [], [], 0)[0])


def join(folder: Path, say: Callable[[str], None]) -> int:
    """Start one more pipeline for the run whose launcher has left its address in ``folder``, and wait for its end.

    Returns:
        Its number.

    Raises:
        ValueError: there is no such run, or it lets nobody in.
        PipelineError: the pipeline has failed, or was ended.
        Interrupted: a signal came; the processes have been ended.
    """
    try:
        found = json.loads((folder / ADDRESS).read_text())
        connection = Client(found["address"], authkey=found["token"].encode())
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        raise ValueError(f"{folder}: no run with --isolate goes on there") from None
    except (OSError, EOFError, ValueError, AuthenticationError) as error:
        raise ValueError(f"{folder}: its launcher cannot be asked: {reason(error)}") from None
    with connection, keeping_handlers(), ExitStack() as stack:
        connection.send_bytes(encoded([JOIN, VERSION, {}]))
        try:
            _, welcome = received(connection)
        except (OSError, EOFError, ValueError) as error:
            raise ValueError(f"{folder}: its launcher has not answered: {reason(error)}") from None
        if "why" in welcome:
            raise ValueError(f"{folder}: {welcome['why']}")
        pipeline = welcome["pipeline"]
        os.chdir(welcome["folder"])
        job = Job(**welcome["job"])
        processes = job.start(stack, welcome["place"])
        with ending(processes.close):
            say(f"pipeline {pipeline} is started, and joins the others of {folder}")
            while (end := processes.poll_or_kill()) is None:
                if connection.poll(_POLL_S):
                    raise PipelineError(f"pipeline {pipeline} was ended: {_why(connection)}")
        if isinstance(end, RanksFailed):
            raise PipelineError(f"pipeline {pipeline}: rank {end.rank} {end.reason}")
        return int(pipeline)


def _why(connection: Connection) -> str:
    try:
        _, why = received(connection)
    except (OSError, EOFError, ValueError):
        return "the run's launcher is gone"
    return str(why)
