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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from avgpipe.errors import PipelineError, check_count, check_name, reason
from avgpipe.fault.door import (
    ALIVE,
    ENDED,
    GREET_S,
    JOIN,
    VERSION,
    Messages,
    connect,
    encoded,
    parse_address,
    received,
)
from avgpipe.fault.group import OVER, REFUSED
from avgpipe.fault.membership import environment
from avgpipe.files import check_keys, dataclass_of, in_short, json_object, reading
from avgpipe.ranks.environment import RESTART
from avgpipe.ranks.launch import Job, RanksFailed, as_here
from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.process import host_here
from avgpipe.ranks.supervisor import ending, keeping_handlers, pass_on_questions

ADDRESS = "join.json"


TOO_FEW = "too few pipelines are left"  # why the last ones are ended
LEFT = "has ended before its last step"  # the run, by a signal or an error of its launcher
_CUT = "cannot be reached any more"
_CLOSED = f"it closed the connection, or said nothing for {GREET_S:g} s"
_MOST_PROCESSES = 2**16
_PLACE = ("pipeline", "group", "restart", "folder", "job")  # what a launcher's answer says
TRAINS = "trains"  # the name of the script and its arguments, or of the workload, among a job's options


class RunEnded(PipelineError):
    """The run that a command joins has ended, or refuses its pipeline.

    Attributes:
        is_done: whether all its work is done.
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
    """The launcher's end: processes that another command has started, and reports on.

    Attributes:
        is_cut: whether their command has ended without a word.
        heard_at: time of its last message.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._inbox = connection, Messages(connection)
        self.heard_at = time.monotonic()
        self._limit = float("inf")  # on the monotonic clock, for their end
        self._end: RanksFailed | bool | None = None
        self.is_cut = False

    def poll_or_kill(self) -> RanksFailed | bool | None:
        """Return None while they run; how they failed, or True, once all have ended, or the connection to them."""
        try:
            for kind, *failure in (
                self._inbox.read() if self._end is None and self._connection.poll(0) else ()
            ):
                self.heard_at = time.monotonic()
                if kind == ENDED:
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
        self.kill(LEFT)


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
    return _join(str(folder), address, token, say, {})


def join_far(
    address: str, secret: str, say: Callable[[str], None], options: Mapping[str, str] | None = None
) -> int:
    """Do the same as :func:`join`, for a launcher that listens at ``address`` ("host:port").

    The job must exist here as there: under the same names, relative to the current folder of this process.
    ``options``: those that it must have (:attr:`Job.options`), else ValueError.
    """
    return _join(address, address, secret, say, options or {})


def _join(run: str, address: str, secret: str, say: Callable[[str], None], options: Mapping[str, str]) -> int:
    """Start the processes, and wait for their end, or for the launcher's order to end them.

    ``run``: its name in messages. ``options``: what the command gives to train, as :attr:`Job.options`; empty where it
    gives nothing.
    """
    is_far = not address.startswith("/")
    try:
        connection = connect(address, secret.encode())
    except (ConnectionRefusedError, FileNotFoundError):
        if is_far:
            raise NoPlace(f"{run}: no run is active there") from None
        raise ValueError(f"{run}: no run with --isolate is active there") from None
    except AuthenticationError as error:
        why = "the run there has another secret: AVGPIPE_JOIN_TOKEN must be the same on all hosts"
        why = why if is_far else f"its launcher cannot be asked: {reason(error)}"
        raise ValueError(f"{run}: {why}") from None
    except socket.gaierror:
        raise NoPlace(f"host {parse_address(address)[0]} is not known here") from None
    except (OSError, EOFError) as error:
        why = reason(error) if str(error) else _CLOSED
        if getattr(error, "errno", None) is None and not isinstance(error, TimeoutError):
            why += ": it may be no run of avgpipe"
        raise NoPlace(f"{run}: its launcher cannot be reached: {why}") from None
    with connection, keeping_handlers(), ExitStack() as stack:
        welcome = _ask(connection, run, options)
        job = _job_of(welcome, is_far)
        pipeline: int = welcome["pipeline"]
        place = environment(address, secret, welcome["group"], pipeline)
        failure = list[Any]()
        stack.callback(_send_end, connection, failure)
        processes = job.start(stack, {**place, RESTART: welcome["restart"]})
        pass_on_questions(lambda: [processes])
        with ending(processes.close):
            say(f"pipeline {pipeline} is started, and joins the others of {run}")
            said_at = 0.0
            while (end := processes.poll_or_kill()) is None:
                if time.monotonic() > said_at + LIMITS.join_alive_s:
                    said_at = time.monotonic()
                    with suppress(OSError):  # what has closed the connection is read next
                        connection.send_bytes(encoded([ALIVE]))
                if connection.poll(LIMITS.poll_s):
                    processes.kill()
                    why = _why(connection)
                    if why == OVER:
                        say(f"pipeline {pipeline} is ended: nothing was left to train")
                        return pipeline
                    if why in (LEFT, _CUT):
                        raise RunLost(f"the run at {run} {why}")
                    if why == TOO_FEW or why.startswith(REFUSED):
                        raise RunEnded(f"pipeline {pipeline} was ended", why)
                    if why:  # else their exit codes say it
                        raise PipelineError(f"pipeline {pipeline} was ended: {why}")
        if isinstance(end, RanksFailed):
            failure += [end.exit_codes, end.rank, end.reason]
            raise PipelineError(f"pipeline {pipeline}: rank {end.rank} {end.reason}")
        return pipeline


def _ask(connection: Connection, run: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Ask to start one more pipeline; NoPlace where the run accepts none."""
    about = {"host": host_here(), "name": socket.gethostname(), "options": dict(options)}
    try:
        connection.send_bytes(encoded([JOIN, VERSION, about]))
        if not connection.poll(LIMITS.join_answer_s):
            raise NoPlace(f"{run}: its launcher has not answered within {LIMITS.join_answer_s:g} s")
        welcome = _welcome(connection, run)
    except (OSError, EOFError) as error:
        cause = reason(error) if str(error) else "it closed the connection"
        raise NoPlace(f"{run}: its launcher has not answered: {cause}") from None
    if (why := welcome.get("why")) in (OVER, TOO_FEW):
        raise RunEnded(run, why)
    if "options" in welcome:
        raise ValueError(_difference(run, options, welcome["options"]))
    if "why" in welcome:
        raise NoPlace(f"{run}: {welcome['why']}")
    return welcome


def _welcome(connection: Connection, run: str) -> dict[str, Any]:
    """Read the launcher's answer, with a Job; ValueError for an invalid one, OSError or EOFError for none."""
    try:
        _, *values = received(connection)
        if len(values) != 1 or not isinstance(values[0], dict):
            raise ValueError("not an object")
        welcome: dict[str, Any] = values[0]
        if "why" in welcome:
            _check_texts("why", [welcome["why"]])
        elif "options" in welcome:
            _check_texts("options", welcome["options"], dict)
        else:
            check_keys("it", welcome, _PLACE, _PLACE)
            check_count("pipeline", welcome["pipeline"], least=0)
            check_count("group", welcome["group"], least=0)
            _check_texts("restart and folder", [welcome["restart"], welcome["folder"]])
            int(welcome["restart"])
            welcome["job"] = _checked_job(welcome["job"])
    except ValueError as error:
        raise ValueError(f"{run}: its launcher has sent an invalid answer: {in_short(error)}") from None
    return welcome


def _checked_job(values: Any) -> Job:
    job: Job = dataclass_of("job", Job, values)
    check_name("out", job.out, ("stdout", "stderr"))
    check_count("size", job.size, most=_MOST_PROCESSES)
    _check_texts("command", job.command, tuple)
    for name in ("added", "options"):
        _check_texts(name, getattr(job, name), dict)
    if not job.command or not isinstance(job.arguments, dict | None):
        raise ValueError("command is empty" if not job.command else "arguments must be an object")
    shlex.split(job.options.get(TRAINS, ""))
    return job


def _check_texts(name: str, values: Any, kind: type[Any] = list) -> None:
    """Refuse what has other parts than texts that commands and variables can have."""
    if not isinstance(values, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, not {values!r:.30}")
    for text in [*values, *(values.values() if isinstance(values, dict) else ())]:
        if not isinstance(text, str) or "\0" in text:
            raise ValueError(f"{name} must be texts without NUL, not {text!r:.30}")
        os.fsencode(text)


def _job_of(welcome: Mapping[str, Any], is_far: bool) -> Job:
    """Return the run's job, in the folder where it is started. ValueError if its script does not exist here."""
    job: Job = welcome["job"]
    if not is_far:
        os.chdir(welcome["folder"])
        return job
    program, *_ = shlex.split(job.options.get(TRAINS, "")) or [""]
    file = program.rpartition(":")[0] or program
    if file.endswith(".py") and not Path(file).is_file():
        raise ValueError(f"{file} does not exist in {os.getcwd()}: begin in a folder with the run's script")
    return as_here(job)


def _difference(run: str, own: Mapping[str, str], its: Mapping[str, str]) -> str:
    """Return the error of a command that gives other options than the run has."""
    names = [name for name in {**its, **own} if name != TRAINS and its.get(name) != own.get(name)]

    def text(of: Mapping[str, str]) -> str:
        words = ", ".join(f"{name} {of[name]}".rstrip() if name in of else f"no {name}" for name in names)
        return f'"{of.get(TRAINS, "")}"' + f" with {words}" * bool(words)

    return f"the run at {run} trains {text(its)}, and this command says {text(own)}: give the same"


def _send_end(connection: Connection, failure: Sequence[Any]) -> None:
    with suppress(OSError):
        connection.send_bytes(encoded([ENDED, *failure]))


def _failure(exit_codes: Sequence[int], rank: int, why: str) -> RanksFailed:
    return RanksFailed([*map(int, exit_codes)], int(rank), reason=str(why))


def _why(connection: Connection) -> str:
    try:
        _, why = received(connection)
    except EOFError:
        return LEFT
    except (OSError, ValueError):
        return _CUT
    return str(why)
