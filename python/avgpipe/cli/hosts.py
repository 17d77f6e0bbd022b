"""One line, the same on every host: the first command begins the run, the others wait for it and join.

Also ``avgpipe join``, the secret that all hosts know, and the way back into Slurm's queue.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from avgpipe.cli.config import IsolationOptions, JoinConfig, LearningOptions, PlanOptions, RunConfig
from avgpipe.cli.options import words
from avgpipe.cli.output import FAILED, CommandFailed, arguments, note
from avgpipe.errors import PipelineError, reason
from avgpipe.fault.door import parse_address
from avgpipe.fault.joining import TRAINS, NoPlace, RunEnded, RunLost, join, join_far
from avgpipe.ranks.environment import cores, launch_environment
from avgpipe.ranks.hosts import RANK_VARIABLES, HostPlace, place_of
from avgpipe.ranks.queues import queue_environment
from avgpipe.ranks.supervisor import Interrupted, Signalled, raising_on_signals

JOIN_TOKEN, TOKEN_FILE = "AVGPIPE_JOIN_TOKEN", "AVGPIPE_JOIN_TOKEN_FILE"
_LEAST = 16  # characters of a secret
_MOST_PIPELINES = 1024  # of a run whose number of hosts is not known
_ASK_S = 1.0
_LIMIT_S = 60.0  # the launcher admits a pipeline again once it has noticed the loss of the one before
# Options of which all hosts have the first one's; any other one is each host's own.
_DECIDE = {f.name for group in (LearningOptions, PlanOptions) for f in fields(group)} | {"shares"}
_DECIDE -= {"workload", "isolate", "json", "given"}
_TERMINATED = 128 + signal.SIGTERM
_T = TypeVar("_T")


class Beginning(NamedTuple):
    """What the first command begins the run with.

    Attributes:
        listening: the socket at which the others find it.
        token: what they must know.
        most: how many pipelines the run may have, unless an option says it.
    """

    listening: socket.socket
    token: str
    most: int


def place_here(at: str | None) -> HostPlace | None:
    """Return this command's place by ``--at``, else by the environment; None where it is the only one."""
    if at is None:
        return place_of(os.environ)
    host, port = parse_address(at)
    if port == 0:
        raise ValueError(f"--at {at}: all hosts must know the port, so write another one than 0")
    return HostPlace(host, port, "--at")


def check_several(place: HostPlace | None, config: IsolationOptions) -> None:
    """Refuse options that do not fit this command's place among several, or that it is the only one. ValueError."""
    if place is None:
        if "wait_s" in config.given and "SLURM_JOB_ID" not in os.environ:  # a job may have one task
            raise ValueError(
                "--wait without --at, or commands on several hosts: there is no other one to wait for"
            )
    elif config.min_pipelines > 1:
        raise ValueError(f"a run by {place.source} begins with one pipeline: --min-pipelines must be 1")
    elif config.listen is not None:
        raise ValueError(f"a run by {place.source} listens at {place.address}: leave out --listen")


def training_of(config: IsolationOptions, *program: str) -> dict[str, str]:
    """Return what the commands of all hosts must give alike: the program, and options with their texts."""
    names = _DECIDE - {"pipelines"} if isinstance(config, RunConfig) else _DECIDE
    given = {**config.complete, **({"seed": "none"} if config.complete.get("seed") == -1 else {})}
    found = [words({name: value}) for name, value in given.items() if name in names]
    return {TRAINS: shlex.join(program), **{option: " ".join(text) for option, *text in found}}


def begin_or_join(
    place: HostPlace, config: IsolationOptions, options: Mapping[str, str], stack: ExitStack
) -> Beginning | None:
    """Return what to begin the run with, as the first command; None once this one has joined the run and it has ended.

    ``options``: of :func:`training_of`. A file with the secret, if one was made, is removed at the end of ``stack``.
    Raises CommandFailed.
    """

    def attempt(is_again: bool) -> socket.socket | int:
        listening = None if is_again else listening_at(place)  # it may be another one's after the run's end
        return join_far(place.address, token, note, options) if listening is None else listening

    with joining(), arguments():
        token = secret(place, config.wait_s, stack)
        found = attempts(attempt, config.restarts, config.wait_s, config.wait_s)
    if isinstance(found, socket.socket):
        note(f"the run begins here, and others join it at {place.address} ({place.source})")
        return Beginning(found, token, place.count or _MOST_PIPELINES)
    if config.json:
        print(json.dumps({"run": place.address, "pipeline": found}))
    return None


def listening_at(place: HostPlace) -> socket.socket | None:
    """Listen as the first command; None where the address is another host's, or another command has it here.

    ValueError where the first command cannot listen.
    """
    if place.number:
        return None
    try:
        return _listening(place)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and place.number is None:
            return None
        what, *_ = (error.strerror or str(error)).partition(" (while")
        hint = "; MASTER_PORT gives another port" if place.job else ""
        raise ValueError(f"cannot listen at {place.address} ({place.source}): {what}{hint}") from None


def _listening(place: HostPlace) -> socket.socket | None:
    found: list[Any] = []
    with suppress(socket.gaierror):  # its name is not known, or not yet
        found = socket.getaddrinfo(place.head, place.port, type=socket.SOCK_STREAM)
    for family, *_, address in found:
        # Debian gives a host's own name a loopback address, and others find it at another one.
        if ipaddress.ip_address(address[0]).is_loopback and not _means_loopback(place):
            return socket.create_server(("", place.port), backlog=64)
        try:
            return socket.create_server(address[:2], family=family, backlog=64)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    # The first command's address may be that of a service in front of it.
    return socket.create_server(("", place.port), backlog=64) if place.number == 0 else None


def _means_loopback(place: HostPlace) -> bool:
    """Whether a loopback address is meant, and is not only what this host takes its own name for."""
    try:
        return bool(ipaddress.ip_address(place.head))
    except ValueError:
        return place.head == "localhost" and place.number is None


# ---- stages on several hosts -----------------------------------------------------------------------------------------


def become_rank(command: Sequence[str], place: HostPlace) -> NoReturn:
    """Run ``command`` in place of this process, as one rank of several hosts."""
    join_ranks(place)
    threads = min(
        cores(), max(1, (os.cpu_count() or 1) // place.local_count)
    )  # also where tasks have their own
    shared = {"OMP_NUM_THREADS": str(threads), **launch_environment(), **queue_environment()}
    os.execve(command[0], list(command), {**shared, **os.environ})


def join_ranks(place: HostPlace) -> None:
    """Set torchrun's variables in this process, where the scheduler has not set them."""
    for name, value in place.rank_environment().items():
        os.environ.setdefault(name, value)


def leave_ranks() -> None:
    """Remove torchrun's variables from this process, which is no rank but starts some."""
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)


# ---- joining ---------------------------------------------------------------------------------------------------------


def join_run(config: JoinConfig) -> None:
    """Run ``avgpipe join``."""
    is_far = ":" in config.run and not Path(config.run).is_dir()

    def attempt(is_again: bool) -> int:
        return join_far(config.run, token, note) if is_far else join(Path(config.run), note)

    with joining(), arguments():
        token = secret() if is_far else ""
        pipeline = attempts(attempt, config.restarts, config.wait_s if is_far else None, config.wait_s)
    if config.json:
        print(json.dumps({"run": config.run, "pipeline": pipeline}))


@contextmanager
def joining() -> Iterator[None]:
    """Name what an interrupt has ended in a command that waits for a run, or has joined it."""
    try:
        with raising_on_signals():
            yield
    except Interrupted as interrupted:
        raise CommandFailed(
            f"{interrupted}: its processes are ended; the run goes on without them", interrupted.exit_code
        ) from None
    except Signalled as early:
        raise CommandFailed(f"{early}: this command was waiting for a run", early.exit_code) from None


def attempts(attempt: Callable[[bool], _T], restarts: int, wait_s: float | None, again_s: float) -> _T | None:
    """Attempt to join, and again after a loss; return what an attempt has returned, None at the run's end.

    Args:
        attempt: gets whether it has joined before; raises NoPlace where it may succeed later, RunEnded
            where that is certain to fail, PipelineError where its pipeline was lost.
        restarts: how many times in a row it is tried again after a loss within a minute of the attempt.
        wait_s, again_s: how long a run is waited for, at first and after a loss; None: NoPlace is raised at first.
    """
    left, here, said, is_again = restarts, Path.cwd(), False, False
    waits_s = wait_s or 0.0
    until = time.monotonic() + waits_s
    while True:
        begin = time.monotonic()
        try:
            os.chdir(here)  # the attempt before has changed to its launcher's folder
            return attempt(is_again)
        except RunEnded as end:
            if not end.is_done:
                raise
            note(str(end))
            return None
        except NoPlace as error:
            if time.monotonic() > until:
                if wait_s is None and not is_again:
                    raise
                raise CommandFailed(f"{error}; given up after {waits_s:g} s", FAILED) from None
            if not said:
                note(f"{error}; it is waited for, up to {until - begin:.0f} s")
                said = True
            time.sleep(_ASK_S)
        except PipelineError as error:
            left = restarts if time.monotonic() - begin > _LIMIT_S else left
            if not left:
                raise
            left, said, is_again = left - 1, isinstance(error, RunLost), True
            waits_s = max(again_s, _LIMIT_S)
            until = time.monotonic() + waits_s
            waits = f"it is waited for, up to {waits_s:g} s (Ctrl-C ends this command)"
            note(f"{error}; {waits if said else 'it is started again'}")


# ---- the secret ------------------------------------------------------------------------------------------------------


def secret(place: HostPlace | None = None, wait_s: float = 0.0, stack: ExitStack | None = None) -> str:
    """Return the secret that commands on several hosts share.

    It is that of the environment, or of the file that the environment names. On Slurm, where neither is given,
    the first command makes a file in its folder, which the others wait for. ValueError for none, a short one,
    or a file that others may read.
    """
    token, file = os.environ.get(JOIN_TOKEN), os.environ.get(TOKEN_FILE)
    if token is None and file is None and place is not None and place.job and stack is not None:
        return _of_job(Path(f".avgpipe-{place.job}").absolute(), place.number == 0, wait_s, stack)
    if token is None and file is not None:
        token = _read(Path(file))
    if len(token or "") < _LEAST:
        has = "" if token is None else f"; the one given has {len(token)} characters"
        raise ValueError(
            f"{JOIN_TOKEN} must be set to a secret of {_LEAST} characters or more, the same on all hosts, or "
            f"{TOKEN_FILE} to a file with it that only you can read{has}"
        )
    return str(token)


def _read(path: Path) -> str:
    """Return the secret in a file; ValueError where others may read it, OSError where it cannot be read."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as file:  # a pipe would be waited for
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid not in (os.getuid(), 0):
            raise ValueError(
                f"{path} has mode {stat.S_IMODE(found.st_mode):03o} and belongs to user {found.st_uid}: a secret "
                f"must be a file of your own that others cannot read, so: chmod 600 {path}"
            )
        return file.read(4096).strip()


def _of_job(path: Path, is_first: bool, wait_s: float, stack: ExitStack) -> str:
    """Write the secret of a job, as its first command, or wait for it."""
    if is_first:
        token, new = secrets.token_hex(16), path.with_name(f"{path.name}.new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(token)
        new.replace(path)  # whole for those who wait for it
        stack.callback(path.unlink, missing_ok=True)
        return token
    until = time.monotonic() + wait_s
    while True:
        with suppress(FileNotFoundError):
            return _read(path)
        if time.monotonic() > until:
            raise CommandFailed(
                f"the first command has left no secret in {path} within {wait_s:g} s: begin in a folder that all hosts "
                f"share, or set {TOKEN_FILE}",
                FAILED,
            )
        time.sleep(_ASK_S)


# ---- Slurm's queue ---------------------------------------------------------------------------------------------------


def check_requeue(is_asked: bool) -> None:
    """Refuse ``--requeue`` where it cannot be done. ValueError."""
    if is_asked and "SLURM_JOB_ID" not in os.environ:
        raise ValueError("--requeue: this is no job of Slurm, SLURM_JOB_ID is not set; leave it out")
    if is_asked and shutil.which("scontrol") is None:
        raise ValueError(
            "--requeue: there is no scontrol in PATH on this host; leave it out, and requeue in the batch script"
        )


@contextmanager
def requeuing(is_asked: bool) -> Iterator[None]:
    """Put the job back into the queue where SIGTERM has ended the run, if that ``is_asked``."""
    try:
        yield
    except CommandFailed as failure:
        if is_asked and failure.exit_code == _TERMINATED:
            requeue()
        raise


def requeue() -> None:
    """Put this job back into Slurm's queue, which ends all that is left of it."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")  # an array's id alone would name all its jobs
    job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else os.environ["SLURM_JOB_ID"]
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    except OSError as error:
        raise CommandFailed(f"job {job} cannot be put back into the queue: {reason(error)}", FAILED) from None
    if done.returncode:
        why = (done.stderr or done.stdout).strip() or f"scontrol ended with {done.returncode}"
        raise CommandFailed(f"job {job} cannot be put back into the queue: {why}", FAILED)
    note(f"job {job} is in the queue again, and continues from its last checkpoint")
