"""Adds one more pipeline to a run of isolated ones, by another command, on the launcher's host or elsewhere.

On its host the launcher leaves its address and a token in a folder that only its user can read; commands of other
hosts know an address and a secret. A command that joins asks there, gets the job to start, and stays
connected: each end notices when the other has ended. It starts the processes, which connect to the launcher
themselves, and ends them when the launcher asks for it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from avgpipe.errors import PipelineError, reason
from avgpipe.fault.door import ENDED, JOIN, VERSION, connect, encoded, received
from avgpipe.fault.group import OVER, REFUSED
from avgpipe.fault.membership import environment
from avgpipe.files import json_object, reading
from avgpipe.ranks.environment import RESTART
from avgpipe.ranks.launch import Job, RanksFailed, as_here
from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.process import host_here
from avgpipe.ranks.supervisor import ending, keeping_handlers, pass_on_questions

ADDRESS = "join.json"


TOO_FEW = "too few pipelines are left"  # why the last ones are ended


class RunEnded(PipelineError):
    """The run that a command joins has ended, or refuses its pipeline.

    Attributes:
        is_done: whether all its work is done.
    """

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")
        self.is_done = why == OVER


class NoPlace(ValueError):
    """A run accepts no other pipeline just now, or its host does not answer; it may later."""


def leave_address(folder: Path, address: str, token: str) -> None:
    """Write what :func:`join` needs."""
    with open(os.open(folder / ADDRESS, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"address": address, "token": token}, file)


class Joined:
    """The launcher's end: processes that another command has started, and reports on.

    Attributes:
        is_cut: whether their command has ended without a word.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._limit = float("inf")  # on the monotonic clock, for their end
        self._end: RanksFailed | bool | None = None
        self.is_cut = False

    def poll_or_kill(self) -> RanksFailed | bool | None:
        """Return None while they run; how they failed, or True, once all have ended, or the connection to them."""
        try:
            if self._end is None and self._connection.poll(0):
                _, *failure = received(self._connection)
                self._end = _failure(*failure) if failure else True
        except (OSError, EOFError, ValueError, TypeError, LookupError):
            self._end = self.is_cut = True
        return True if self._end is None and time.monotonic() > self._limit else self._end

    def kill(self, why: str, blamed: int | None = None) -> None:
        """Have the command end all, and send it the reason."""
        self._limit = min(self._limit, time.monotonic() + LIMITS.join_end_s)
        with suppress(OSError):
            self._connection.send_bytes(encoded(["end", why]))

    def close(self, number: int) -> None:
        """End all as the launcher ends."""
        self.kill("the run has ended")


def join(folder: Path, say: Callable[[str], None]) -> int:
    """Start one more pipeline for the run whose launcher's address is in ``folder``, and wait for its end.

    Returns:
        Its number.

    Raises:
        ValueError: there is no such run.
        NoPlace: it accepts no other pipeline.
        RunEnded: the run has ended.
        PipelineError: the pipeline has failed, or was ended before the run was over.
        Interrupted: a signal arrived; the processes have been ended.
    """
    try:
        with reading(folder / ADDRESS) as text:
            found = json_object("it", text)
        address, token = (str(found.get(name, "")) for name in ("address", "token"))
        if not address.startswith("/"):
            raise ValueError(f"its address is {address!r}")
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder}: no run with --isolate is active there") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: its launcher cannot be asked: {reason(error)}") from None
    return _join(str(folder), address, token, say)


def join_far(address: str, secret: str, say: Callable[[str], None]) -> int:
    """Do the same as :func:`join`, for a launcher that listens at ``address`` ("host:port").

    The job must exist here as there: under the same names, relative to the current folder of this process.
    """
    return _join(address, address, secret, say)


def _join(run: str, address: str, secret: str, say: Callable[[str], None]) -> int:
    """Start the processes, and wait for their end, or for the launcher's order to end them.

    ``run``: its name in messages.
    """
    is_far = not address.startswith("/")
    try:
        connection = connect(address, secret.encode())
    except (ConnectionRefusedError, FileNotFoundError):
        none, what = (NoPlace, "no run") if is_far else (ValueError, "no run with --isolate")
        raise none(f"{run}: {what} is active there") from None
    except AuthenticationError as error:
        raise ValueError(f"{run}: its launcher cannot be asked: {reason(error)}") from None
    except (OSError, EOFError) as error:
        raise NoPlace(f"{run}: its launcher cannot be reached: {reason(error)}") from None
    with connection, keeping_handlers(), ExitStack() as stack:
        welcome = _ask(connection, run)
        job, pipeline = Job(**welcome["job"]), int(welcome["pipeline"])
        if is_far:
            job = as_here(job)
        else:
            os.chdir(welcome["folder"])
        place = environment(address, secret, welcome["group"], pipeline)
        failure = list[Any]()
        stack.callback(_send_end, connection, failure)
        processes = job.start(stack, {**place, RESTART: welcome["restart"]})
        pass_on_questions(lambda: [processes])
        with ending(processes.close):
            say(f"pipeline {pipeline} is started, and joins the others of {run}")
            while (end := processes.poll_or_kill()) is None:
                if connection.poll(LIMITS.poll_s):
                    processes.kill()
                    why = _why(connection)
                    if why == OVER:
                        return pipeline
                    if why == TOO_FEW or why.startswith(REFUSED):
                        raise RunEnded(f"pipeline {pipeline} was ended", why)
                    if why:  # else their exit codes say it
                        raise PipelineError(f"pipeline {pipeline} was ended: {why}")
        if isinstance(end, RanksFailed):
            failure += [end.exit_codes, end.rank, end.reason]
            raise PipelineError(f"pipeline {pipeline}: rank {end.rank} {end.reason}")
        return pipeline


def _ask(connection: Connection, run: str) -> dict[str, Any]:
    """Ask to start one more pipeline; NoPlace where the run accepts none."""
    about = {"host": host_here(), "name": socket.gethostname()}
    try:
        connection.send_bytes(encoded([JOIN, VERSION, about]))
        if not connection.poll(LIMITS.join_answer_s):
            raise NoPlace(f"{run}: its launcher has not answered within {LIMITS.join_answer_s:g} s")
        _, welcome = received(connection)
    except (OSError, EOFError) as error:
        raise NoPlace(f"{run}: its launcher has not answered: {reason(error)}") from None
    if (why := welcome.get("why")) in (OVER, TOO_FEW):
        raise RunEnded(run, why)
    if "why" in welcome:
        raise NoPlace(f"{run}: {welcome['why']}")
    return dict(welcome)


def _send_end(connection: Connection, failure: Sequence[Any]) -> None:
    with suppress(OSError):
        connection.send_bytes(encoded([ENDED, *failure]))


def _failure(exit_codes: Sequence[int], rank: int, why: str) -> RanksFailed:
    return RanksFailed([*map(int, exit_codes)], int(rank), reason=str(why))


def _why(connection: Connection) -> str:
    try:
        _, why = received(connection)
    except (OSError, EOFError, ValueError):
        return "the run's launcher has ended"
    return str(why)
