"""Adds one more pipeline to a run of isolated ones, by another command, on the launcher's host or elsewhere.

On its host the launcher leaves its address and a token in a folder that only its user can read; commands of other
hosts know an address and a secret. A command that joins asks there, gets the job to start, and stays
connected: each end notices when the other has ended. It starts the processes, which connect to the launcher
themselves, and ends them when the launcher asks for it.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from avgpipe.errors import PipelineError, reason
from avgpipe.fault.door import ENDED, JOIN, VERSION, connect, encoded, parse_address, received
from avgpipe.fault.group import OVER
from avgpipe.fault.membership import environment
from avgpipe.files import json_object, reading
from avgpipe.ranks.environment import RESTART
from avgpipe.ranks.launch import Job, RanksFailed, as_here
from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.process import host_here
from avgpipe.ranks.supervisor import ending, keeping_handlers, pass_on_questions

ADDRESS = "join.json"


TOO_FEW = "too few pipelines are left"  # why the last ones are ended
LEFT = "has ended before its last step"  # the run, by a signal or an error of its launcher
_CUT = "cannot be reached any more"
TRAINS = "trains"  # the name of the script and its arguments, or of the workload, among a job's options


class RunEnded(PipelineError):
    """The run that a command joins has ended.

    Attributes:
        is_done: whether all its work is done; else too few pipelines were left.
    """

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")
        self.is_done = why == OVER


class RunLost(PipelineError):
    """The run of which a pipeline was a part has ended before its last step, or cannot be reached any more."""


class NoPlace(ValueError):
    """A run accepts no other pipeline just now, or its host does not answer; it may later."""


def leave_address(folder: Path, address: str, token: str) -> None:
    """Write what :func:`join` needs."""
    with open(os.open(folder / ADDRESS, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"address": address, "token": token}, file)


class Joined:
    """The launcher's end: processes that another command has started, and reports on."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._limit = float("inf")  # on the monotonic clock, for their end
        self._has_ended = self._is_cut = False

    def poll_or_kill(self) -> bool | None:
        """Return None while they run; True once all have ended, or the connection to their command."""
        try:
            if not self._has_ended and self._connection.poll(0):
                self._has_ended = received(self._connection)[0] == ENDED
        except (OSError, EOFError, ValueError):
            self._has_ended = self._is_cut = True
        return True if self._has_ended or time.monotonic() > self._limit else None

    @property
    def is_cut(self) -> bool:
        """Whether their command has ended without a word."""
        return self._is_cut

    def kill(self, why: str, blamed: int | None = None) -> None:
        """Have the command end all, and send it the reason."""
        self._limit = min(self._limit, time.monotonic() + LIMITS.join_end_s)
        with suppress(OSError):
            self._connection.send_bytes(encoded(["end", why]))

    def close(self, number: int) -> None:
        """End all as the launcher ends."""
        self.kill(LEFT)

    def release(self) -> None:
        self._connection.close()


@dataclass(frozen=True)
class _Target:
    """A run to join.

    Attributes:
        name: in messages.
        address, secret: where it is found, and what it requires.
        is_far: whether it may be on another host.
        options: what the command gives to train, as :attr:`Job.options`; empty where it gives nothing.
    """

    name: str
    address: str
    secret: str
    is_far: bool
    options: Mapping[str, str] = field(default_factory=dict)


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
    try:
        return _join(_Target(str(folder), address, token, False), say)
    except (FileNotFoundError, ConnectionRefusedError):
        raise ValueError(f"{folder}: no run with --isolate is active there") from None


def join_far(
    address: str, secret: str, say: Callable[[str], None], options: Mapping[str, str] | None = None
) -> int:
    """Do the same as :func:`join`, for a launcher that listens at ``address`` ("host:port").

    The job must exist here as there: under the same names, relative to the current folder of this process.
    ``options``: those that it must have (:attr:`Job.options`), else ValueError.
    """
    return _join(_Target(address, address, secret, True, options or {}), say)


def _join(run: _Target, say: Callable[[str], None]) -> int:
    try:
        connection = connect(run.address, run.secret.encode())
    except (ConnectionRefusedError, FileNotFoundError):
        if not run.is_far:
            raise
        raise NoPlace(f"{run.name}: no run is active there") from None
    except AuthenticationError as error:
        why = "the run there has another secret: AVGPIPE_JOIN_TOKEN must be the same on all hosts"
        why = why if run.is_far else f"its launcher cannot be asked: {reason(error)}"
        raise ValueError(f"{run.name}: {why}") from None
    except socket.gaierror:
        raise NoPlace(f"host {parse_address(run.address)[0]} is not known here") from None
    except (OSError, EOFError) as error:
        raise NoPlace(f"{run.name}: its launcher cannot be reached: {reason(error)}") from None
    with connection:
        welcome = _ask(connection, run)
        job = Job(**welcome["job"])
        if run.is_far:
            job = as_here(job)
            program, *_ = shlex.split(job.options.get(TRAINS, "")) or [""]
            file = program.rpartition(":")[0] or program
            if file.endswith(".py") and not Path(file).is_file():
                raise ValueError(
                    f"{file} does not exist in {os.getcwd()}: begin in a folder with the run's script"
                )
        else:
            os.chdir(welcome["folder"])
        place = environment(run.address, run.secret, welcome["group"], welcome["pipeline"])
        place[RESTART] = welcome["restart"]
        return _run(job, welcome["pipeline"], place, connection, run.name, say)


def _ask(connection: Connection, run: _Target) -> dict[str, Any]:
    """Ask to start one more pipeline; NoPlace where the run accepts none."""
    about = {"host": host_here(), "name": socket.gethostname(), "options": dict(run.options)}
    try:
        connection.send_bytes(encoded([JOIN, VERSION, about]))
        if not connection.poll(LIMITS.join_answer_s):
            raise NoPlace(f"{run.name}: its launcher has not answered within {LIMITS.join_answer_s:g} s")
        _, welcome = received(connection)
    except (OSError, EOFError) as error:
        raise NoPlace(f"{run.name}: its launcher has not answered: {reason(error)}") from None
    if (why := welcome.get("why")) in (OVER, TOO_FEW):
        raise RunEnded(run.name, why)
    if "options" in welcome:
        raise ValueError(_difference(run, welcome["options"]))
    if "why" in welcome:
        raise NoPlace(f"{run.name}: {welcome['why']}")
    return dict(welcome)


def _difference(run: _Target, its: Mapping[str, str]) -> str:
    """Return the error of a command that gives other options than the run has."""
    own = run.options
    names = [name for name in {**its, **own} if name != TRAINS and its.get(name) != own.get(name)]

    def text(of: Mapping[str, str]) -> str:
        words = ", ".join(f"{name} {of[name]}".rstrip() if name in of else f"no {name}" for name in names)
        return f'"{of[TRAINS]}"' + f" with {words}" * bool(words)

    return f"the run at {run.name} trains {text(its)}, and this command says {text(own)}: give the same"


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
                if connection.poll(LIMITS.poll_s):
                    processes.kill()
                    why = _why(connection)
                    if why == OVER:
                        say(f"pipeline {pipeline} is ended: nothing was left to train")
                        return pipeline
                    if why in (LEFT, _CUT):
                        raise RunLost(f"the run at {run} {why}")
                    if why == TOO_FEW:
                        raise RunEnded(f"pipeline {pipeline} was ended", why)
                    if why:  # else their exit codes say it
                        raise PipelineError(f"pipeline {pipeline} was ended: {why}")
        if isinstance(end, RanksFailed):
            raise PipelineError(f"pipeline {pipeline}: rank {end.rank} {end.reason}")
        return pipeline


def _send_end(connection: Connection) -> None:
    with suppress(OSError):
        connection.send_bytes(encoded([ENDED]))


def _why(connection: Connection) -> str:
    try:
        _, why = received(connection)
    except EOFError:
        return LEFT
    except (OSError, ValueError):
        return _CUT
    return str(why)
