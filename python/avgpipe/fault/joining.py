"""Adds one more pipeline to a run of isolated ones, by another command, on the launcher's host or elsewhere.

The launcher leaves its address and a token in a folder that only its user can read. A command that joins asks
there, gets the job to start, and stays connected: each end notices when the other has ended. The processes
are not children of the launcher; it knows them by their connections, for which the kernel gives the process
ids, and can end them. On another host the command there ends them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from avgpipe.errors import PipelineError, reason
from avgpipe.fault.gate import Gate
from avgpipe.fault.relay import Relay
from avgpipe.fault.roster import ENDED, JOIN, VERSION, encoded, received
from avgpipe.fault.trunk import Trunk, parse_address
from avgpipe.ranks.launch import Job, RanksFailed, as_here
from avgpipe.ranks.process import folder_for_a_socket, peer_of
from avgpipe.ranks.supervisor import ending, keeping_handlers, pass_on_questions

ADDRESS = "join.json"
_POLL_S = 0.05
_FINISH_S, _GIVE_UP_S = (
    30.0,
    1.0,
)  # for the launcher to receive the last messages: at the run's end, and otherwise
_END_S = 3.0  # for processes on another host to end, after the order to do so


class NoPlace(ValueError):
    """A run accepts no other pipeline just now, or its host does not answer; it may later."""


def leave_address(folder: Path, address: str, token: str) -> None:
    """Write what :func:`join` needs."""
    with open(os.open(folder / ADDRESS, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"address": address, "token": token}, file)


class Joined:
    """The processes of a pipeline that another command has started."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._starter = _watched(peer_of(connection))
        self._ranks: dict[int, int | None] = {}  # by process id, its descriptor; None where it has ended
        self._is_killed = False

    def know(self, processes: Iterable[int]) -> None:
        """Note processes that have reported to belong here."""
        for process in processes:
            if process not in self._ranks:
                self._ranks[process] = _watched(process)
                if self._is_killed:
                    self._kill(process)

    def poll_or_kill(self) -> bool | None:
        """Return None while they run; True once all have ended. Kill them if their command has ended."""
        if _has_ended(self._starter) and not self._is_killed:
            self.kill("the command that started it has ended")
        left = [process for process, watched in self._ranks.items() if not _has_ended(watched)]
        return None if left or not (self._is_killed or _has_ended(self._starter)) else True

    def kill(self, why: str, blamed: int | None = None) -> None:
        """Kill all, and send the command the reason."""
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

    def release(self) -> None:
        """Let go of the command and of the processes."""
        self._connection.close()
        for watched in (self._starter, *self._ranks.values()):
            if watched is not None:
                os.close(watched)
        self._starter, self._ranks = None, {}


class JoinedFar:
    """The processes of a pipeline that a command on another host has started and reports on."""

    def __init__(self, connection: Connection, gate: Gate) -> None:
        self._connection, self._gate = connection, gate
        self._limit = float("inf")  # on the monotonic clock, for their end
        self._has_ended = False

    def poll_or_kill(self) -> bool | None:
        """Return None while they run; True once all have ended, or the connection to that host."""
        if self._has_ended:
            return True
        if time.monotonic() > self._limit:
            self._gate.close()
        try:
            self._has_ended = self._gate.is_over or (
                self._connection.poll(0) and received(self._connection)[0] == ENDED
            )
        except (OSError, EOFError, ValueError):
            self._has_ended = True
        return True if self._has_ended else None

    def kill(self, why: str, blamed: int | None = None) -> None:
        """Have the command end all, and send it the reason."""
        self._limit = min(self._limit, time.monotonic() + _END_S)
        with suppress(OSError):
            self._connection.send_bytes(encoded(["end", why]))

    def close(self, number: int) -> None:
        """End all as the launcher ends."""
        self._gate.close()
        self._connection.close()


def _watched(process: int) -> int | None:
    """Return a descriptor of a process, which becomes readable when it ends; None where it has ended."""
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:
        return None


def _has_ended(watched: int | None) -> bool:
    return watched is None or bool(select.select([watched], [], [], 0)[0])


def join(folder: Path, say: Callable[[str], None]) -> int:
    """Start one more pipeline for the run whose launcher's address is in ``folder``, and wait for its end.

    Returns:
        Its number.

    Raises:
        ValueError: there is no such run, or it accepts no other pipeline.
        PipelineError: the pipeline has failed, or was ended.
        Interrupted: a signal arrived; the processes have been ended.
    """
    try:
        found = json.loads((folder / ADDRESS).read_text())
        connection = Client(found["address"], authkey=found["token"].encode())
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        raise ValueError(f"{folder}: no run with --isolate is active there") from None
    except (OSError, EOFError, ValueError, AuthenticationError) as error:
        raise ValueError(f"{folder}: its launcher cannot be asked: {reason(error)}") from None
    with connection:
        welcome = _ask(connection, {}, str(folder))
        os.chdir(welcome["folder"])
        return _run(
            Job(**welcome["job"]), welcome["pipeline"], welcome["place"], connection, str(folder), say
        )


def join_far(address: str, token: str, say: Callable[[str], None]) -> int:
    """Do the same as :func:`join`, for a launcher on another host that listens at ``address`` ("host:port").

    The job must exist here as there: under the same names, relative to the current folder of this process.
    """
    with folder_for_a_socket() as folder:
        try:
            relay = Relay(Trunk.connect(parse_address(address), token.encode()), Path(folder))
        except ConnectionRefusedError:
            raise ValueError(f"{address}: no run with --listen is active there") from None
        except AuthenticationError as error:
            raise ValueError(f"{address}: its launcher cannot be asked: {reason(error)}") from None
        except (OSError, EOFError) as error:
            raise NoPlace(f"{address}: its launcher cannot be reached: {reason(error)}") from None
        try:
            welcome = _ask(relay.command, {"host": socket.gethostname()}, address)
            place = relay.listen(welcome["place"])
            job = as_here(Job(**welcome["job"]))
            pipeline = _run(job, welcome["pipeline"], place, relay.command, address, say)
            relay.finish(_FINISH_S)
            return pipeline
        finally:
            relay.finish(_GIVE_UP_S)


def _ask(connection: Connection, about: dict[str, Any], run: str) -> dict[str, Any]:
    """Ask to start one more pipeline; ValueError where the run accepts none."""
    try:
        connection.send_bytes(encoded([JOIN, VERSION, about]))
        _, welcome = received(connection)
    except ValueError as error:
        raise ValueError(f"{run}: its launcher has not answered: {reason(error)}") from None
    except (OSError, EOFError) as error:
        raise NoPlace(f"{run}: its launcher has not answered: {reason(error)}") from None
    if "why" in welcome:
        raise NoPlace(f"{run}: {welcome['why']}")
    return dict(welcome)


def _run(
    job: Job,
    pipeline: int,
    place: Mapping[str, str],
    connection: Connection,
    run: str,
    say: Callable[[str], None],
) -> int:
    """Start the processes, and wait for their end, or for the launcher's order to end them."""
    with keeping_handlers(), ExitStack() as stack:
        stack.callback(_send_end, connection)
        processes = job.start(stack, place)
        pass_on_questions(lambda: [processes])
        with ending(processes.close):
            say(f"pipeline {pipeline} is started, and joins the others of {run}")
            while (end := processes.poll_or_kill()) is None:
                if connection.poll(_POLL_S):
                    processes.kill()
                    if why := _why(connection):  # else their exit codes say it
                        raise PipelineError(f"pipeline {pipeline} was ended: {why}")
        if isinstance(end, RanksFailed):
            raise PipelineError(f"pipeline {pipeline}: rank {end.rank} {end.reason}")
        return int(pipeline)


def _send_end(connection: Connection) -> None:
    with suppress(OSError):
        connection.send_bytes(encoded([ENDED]))


def _why(connection: Connection) -> str:
    try:
        _, why = received(connection)
    except (OSError, EOFError, ValueError):
        return "the run's launcher has ended"
    return str(why)
