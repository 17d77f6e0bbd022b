"""Starts the ranks of a run on this machine, by torch's own process launcher, and reports how they ended."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from avgpipe.errors import PipelineError
from avgpipe.ranks.environment import SPARE, STORE_FILE, cores, launch_environment
from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.process import (
    ARGUMENTS,
    PEER_LOST,
    PROGRESS,
    WRONG_ARGUMENTS,
    error_of,
    has_missed,
    run_folder,
    unready,
)
from avgpipe.ranks.queues import queue_environment
from avgpipe.ranks.supervisor import Interrupted, raising_on_signals, signal_name, watch

STOPPED = "was stopped by a signal"
NOT_READY = "did not reach its Pipeline while others waited for it there"
LEFT = "ended with exit code 0 before the others were done"


class RanksFailed(PipelineError):
    """A launched rank failed, and the others were ended.

    Attributes:
        exit_codes: of every rank, negative for a signal.
        rank: the one that failed by itself; the others missed it, or were ended for it.
        said: its last line, or its error, if the launcher has it.
        reason: what happened to it, as the end of a sentence; by default from its exit code.
    """

    def __init__(
        self, exit_codes: Sequence[int], rank: int, said: str = "", reason: str | None = None
    ) -> None:
        self.exit_codes, self.rank, self.said = tuple(exit_codes), rank, said
        code = self.exit_codes[rank]
        self.reason = reason or (f"failed with exit code {code}" if code else LEFT)
        if code < 0 and reason is None:
            hint = " (by hand, or by the system when memory runs out)" if -code == signal.SIGKILL else ""
            self.reason = f"was killed by {signal_name(-code)}{hint}"
        super().__init__(f"worker {rank} of {len(self.exit_codes)} {self.reason}{': ' * bool(said)}{said}")


def run_on_ranks(
    target: str,
    world_size: int,
    arguments: Mapping[str, Any],
    *,
    timeout_s: float | None = None,
    threads: int | None = 1,
    environment: Mapping[str, str] | None = None,
    prefixes: Sequence[Sequence[str]] = (),
    say: Callable[[str], None] = lambda line: None,
    captures: bool = True,
    preemption_s: float | None = None,
) -> list[Any]:
    """Call the function named "module:function" on every rank, a process of this machine; return its results.

    The function runs with torchrun's environment and without a process group. The ranks meet in a file that
    only this user can read, and look for each other on this host alone: nothing listens beyond it. When one
    fails the others are ended; nothing is restarted, and in any case no process is left.

    Args:
        arguments: the function's keyword arguments, which travel as JSON, as do the results.
        threads: of torch in each process. None: the user's choice, or an equal share of the cores.
        environment: variables beside or in place of those of the launcher.
        prefixes: words before the command of each rank, such as those that enter a network namespace.
        say: called with each line that rank 0 reports by ``progress``.
        captures: whether the output of the processes is kept back, except the last line of a failure; else it
            goes to standard error.
        preemption_s: on the first SIGTERM the ranks get a signal of their own, and then have this many
            seconds to end by themselves. None: SIGTERM ends them.

    Raises:
        RanksFailed: a rank failed.
        PipelineError: the ranks were not done after ``timeout_s``.
        Interrupted: SIGINT, SIGTERM, SIGHUP or SIGQUIT arrived, and the ranks have been ended.
    """
    added = {**same_modules(), **(environment or {})}
    if threads is not None:
        added["OMP_NUM_THREADS"] = str(threads)
    job = Job("stderr", [target], world_size, added, arguments)
    with raising_on_signals(), ExitStack() as stack:
        folder = _run(stack, job, prefixes, captures, timeout_s, say, preemption_s)
        results = [folder / f"{rank}.json" for rank in range(world_size)]
        for rank, result in enumerate(results):
            if not result.exists():  # by os._exit
                raise RanksFailed(
                    [0] * world_size, rank, reason="ended with exit code 0 and without a result"
                )
        return [json.loads(result.read_text()) for result in results]


def run_command(command: Sequence[str], world_size: int, *, out: str = "stdout") -> None:
    """Run a command once per rank, as ``run_on_ranks`` does a function; it may make torch's process group itself.

    Its standard output goes to this process's ``out``, "stdout" or "stderr".
    """
    with raising_on_signals(), ExitStack() as stack:
        _run(stack, Job(out, command, world_size, {}))


def same_modules() -> dict[str, str]:
    """Return the variable by which a process finds the modules that this one does."""
    return {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}


def tied(out: str, *command: str) -> list[str]:
    """Return the words that run a command as a child that ends with this process; see ``ranks.process``."""
    return [sys.executable, "-m", "avgpipe.ranks.process", str(os.getpid()), out, *command]


def rank_environment(rank: int, world_size: int) -> dict[str, str]:
    """Return the variables by which torchrun places a rank of one host."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return {"GROUP_RANK": "0", **{name: str(value) for name, value in place.items()}}


def private_meeting(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return the environment of ranks that meet in ``folder``, closed to other users, on this host alone."""
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    listening = {name: "lo" for name in variables if name not in os.environ}
    # A rank that starts torchrun passes this environment on; torchrun sets the run id, so the file is not used.
    return {STORE_FILE: os.path.join(folder, "store"), "TORCHELASTIC_RUN_ID": "", **listening}


@contextmanager
def loopback_store() -> Iterator[dict[str, str]]:
    """Hold a store for ranks that join torch's process group by themselves; yield its address as variables.

    Any process of this host can reach it. avgpipe's own ranks neither write to it nor trust it.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, listening = "127.0.0.1", socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listening.detach())
    yield {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    del store


@dataclass(frozen=True)
class Job:
    """What each process of a pipeline runs.

    Attributes:
        out: where standard output goes, "stdout" or "stderr".
        command: its words, or the name of a function as in :func:`run_on_ranks`.
        size: how many processes a pipeline has.
        added: variables beside the launcher's.
        arguments: of the function.
        options: those of the command line that decide it, each with its text.
    """

    out: str
    command: Sequence[str]
    size: int
    added: Mapping[str, str]
    arguments: Mapping[str, Any] | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def start(
        self,
        stack: ExitStack,
        place: Mapping[str, str],
        prefixes: Sequence[Sequence[str]] = (),
        captures: bool = False,
    ) -> Started:
        """Start the processes of a pipeline; their resources are kept until the end of ``stack``.

        With SPARE in ``place`` they are spares, which wait for their place in the folder in which they meet.
        ``prefixes`` and ``captures``: see :func:`run_on_ranks`.
        """
        folder = stack.enter_context(run_folder())
        if SPARE in place:
            place = {**place, SPARE: str(folder)}
        if self.arguments is None:
            address = stack.enter_context(loopback_store())
        else:
            address = {}
            # In a file, because every user can read a command line.
            (folder / ARGUMENTS).write_text(json.dumps(dict(self.arguments)))
        commands = [[*words, *tied(self.out, *self.command)] for words in prefixes or [()] * self.size]
        return start(commands, folder, {**self.added, **address, **place}, captures)


def as_here(job: Job) -> Job:
    """Return another host's job for this host: with its own Python, and the path to its modules."""
    added = {**job.added, **(same_modules() if "PYTHONPATH" in job.added else {})}
    command = job.command if job.arguments is not None else [sys.executable, *job.command[1:]]
    return replace(job, command=command, added=added)


class Started:
    """Processes started together by torch's launcher; each leads a session of its own.

    Attributes:
        folder: in which they meet.
    """

    def __init__(self, processes: Any, count: int, captures: bool, folder: Path) -> None:
        self._processes, self._count, self._captures, self.folder = processes, count, captures, folder
        self._first: int | None = None  # the rank that failed first, when the others were killed
        self._stopped: list[int] = []  # ranks that were killed because they were stopped
        self._left: list[int] = []  # ranks that ended with 0, in their order
        self._awaited: list[int] = []  # ranks that were not ready when others had missed one
        self._reported: dict[int, float] = {}  # when a rank had reported its last error (monotonic clock)
        self._deadline = float("inf")  # on the monotonic clock, for a missed rank to end

    def poll(self) -> RanksFailed | bool | None:
        """Return None while they run, True once all have succeeded, or the failure once all have ended."""
        codes = self._exit_codes()
        if len(codes) < self._count and not self._is_blame_known(codes):
            return None
        self._kill_stopped()
        result = self._processes.wait(0)
        if not (failed := result.failures):
            return True
        codes = {rank: end.exitcode for rank, end in failed.items()}
        first = self._first
        if first is None:
            ends = {rank: (self._code(rank, end.exitcode), end.timestamp) for rank, end in failed.items()}
            first = self._to_blame(ends)
        said = _last_line(result.stderrs[first]) if self._captures else error_of(self.folder, first)
        all_codes = [codes.get(rank, 0) for rank in range(self._count)]
        why = STOPPED if first in self._stopped else NOT_READY if first in self._awaited else None
        return RanksFailed(all_codes, first, said, why)

    def poll_or_kill(self) -> RanksFailed | bool | None:
        """Do the same as :meth:`poll`, but once one has failed kill the others, without waiting for them."""
        codes = self._exit_codes()
        if self._first is None and self._is_blame_known(codes):
            ends = {rank: (self._code(rank, code), 0) for rank, code in codes.items() if code}
            ends |= dict.fromkeys(self._kill_stopped(), (-signal.SIGKILL, 0))
            self.kill(blamed=self._to_blame(ends))
        return self.poll()

    def _is_blame_known(self, codes: Mapping[int, int]) -> bool:
        """Whether the rank to blame is known: failed by itself, or stopped and missed, or after LIMITS.blame_s."""
        failed = [rank for rank, code in codes.items() if code]
        if failed and self._deadline == float("inf"):
            self._deadline = time.monotonic() + LIMITS.blame_s
        missed = all(self._code(rank, codes[rank]) == PEER_LOST for rank in failed)
        return bool(failed) and (not missed or bool(self.stopped()) or time.monotonic() > self._deadline)

    def _to_blame(self, ends: Mapping[int, tuple[int, int]]) -> int:
        """Return the rank to blame: if others have only missed one, the first that left, or is not ready."""
        first = first_to_fail(ends, self._stopped)
        if ends[first][0] != PEER_LOST:
            return first
        self._awaited = [rank for rank in unready(self.folder, range(self._count)) if rank not in self._left]
        return [*self._left, *self._awaited, first][0]

    def _code(self, rank: int, code: int) -> int:
        """Return the exit code of a failed rank; PEER_LOST also for a script that has missed a peer."""
        return PEER_LOST if code and has_missed(self.folder, rank) else code

    def stopped(self) -> list[int]:
        """Return the ranks that a signal has stopped."""
        return [rank for rank, process in self._processes.pids().items() if is_stopped(process)]

    def all_stopped(self) -> list[int]:
        """Return the ranks that a signal has stopped, if they are all that have not ended."""
        stopped = self.stopped()
        return stopped if len(stopped) + len(self._exit_codes()) == self._count else []

    def _kill_stopped(self) -> list[int]:
        """Kill and return stopped ranks, which do not handle signals and would be waited for."""
        stopped = self.stopped()
        for rank in stopped:
            os.killpg(self._processes.pids()[rank], signal.SIGKILL)
        self._stopped += stopped
        return stopped

    def _exit_codes(self) -> dict[int, int]:
        """Return the exit codes of ended ranks, unnoticed by torch's launcher, which would end the others."""
        codes = {}
        for rank, process in self._processes.pids().items():
            try:
                end = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # torch's launcher knows how it ended
                codes[rank] = 0
            else:
                if end is not None:
                    codes[rank] = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        self._left += [rank for rank, code in codes.items() if code == 0 and rank not in self._left]
        self._kill_stuck(codes)
        return codes

    def _kill_stuck(self, codes: Mapping[int, int]) -> None:
        """Kill ranks that do not end after the error that ends them: a destructor may wait for ever."""
        for rank, process in self._processes.pids().items():
            if rank not in codes and (has_missed(self.folder, rank) or error_of(self.folder, rank)):
                since = self._reported.setdefault(rank, time.monotonic())
                if time.monotonic() > since + LIMITS.reported_end_s:
                    os.killpg(process, signal.SIGKILL)

    def kill(self, why: str = "", blamed: int | None = None) -> None:
        """Kill all; ``blamed``: the rank that was the first to fail, if it is known."""
        self._first = blamed if self._first is None else self._first
        for process in self._processes.pids().values():
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)

    def send_signal(self, number: int, sent: set[int]) -> None:
        """Send a signal to the ranks that handle it and are not in ``sent``, to which they are added."""
        for rank, process in self._processes.pids().items():
            if rank not in sent and _handles(process, number):
                with suppress(ProcessLookupError):
                    os.kill(process, number)
                sent.add(rank)

    def close(self, number: int) -> None:
        """End all by a signal, and wait."""
        self._kill_stopped()
        self._processes.close(signal.Signals(number))


class StoppedTimer:
    """Detects stopped processes that no peer is left to report."""

    def __init__(self) -> None:
        self._looked_at, self._for_s = time.monotonic(), 0.0

    def expired(self, now: bool) -> bool:
        """Note, many times a second, whether they are stopped ``now``; return whether for too long."""
        looked_at, self._looked_at = self._looked_at, time.monotonic()
        # This process may have been stopped too, with all others of its terminal: that time does not count.
        self._for_s = self._for_s + min(self._looked_at - looked_at, 2 * LIMITS.poll_s) if now else 0.0
        return self._for_s > LIMITS.stopped_s


def start(
    commands: Sequence[Sequence[str]],
    folder: Path,
    added: Mapping[str, str],
    captures: bool = False,
    size: int = 0,
) -> Started:
    """Start a command for each rank; they meet in ``folder``. ``size``: of all ranks, if others are started apart."""
    from torch.distributed.elastic import multiprocessing as elastic

    count = len(commands)
    shared = {
        "OMP_NUM_THREADS": str(max(1, cores() // (size or count))),
        **launch_environment(),
        **queue_environment(),
    }
    shared = {name: value for name, value in shared.items() if name not in os.environ}
    environment = {**shared, **private_meeting(folder), **added}
    _quieten_torch()
    # As with nohup; torch would install a handler.
    outlives_terminal = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    processes = elastic.start_processes(
        "avgpipe",
        commands[0][0],
        {rank: tuple(command[1:]) for rank, command in enumerate(commands)},
        {rank: {**rank_environment(rank, count), **environment} for rank in range(count)},
        elastic.DefaultLogsSpecs(str(folder), elastic.Std.ALL if captures else elastic.Std.NONE),
    )
    if outlives_terminal and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return Started(processes, count, captures, folder)


def _run(
    stack: ExitStack,
    job: Job,
    prefixes: Sequence[Sequence[str]] = (),
    captures: bool = False,
    timeout_s: float | None = None,
    say: Callable[[str], None] = lambda line: None,
    preemption_s: float | None = None,
) -> Path:
    """Run a job on each rank and wait for the end of all; return the folder of its processes."""
    ranks = _EndAll(lambda: job.start(stack, {}, prefixes, captures), job.size, timeout_s, say)
    try:
        is_preempted = watch(ranks, preemption_s)
    finally:
        if sys.stderr.isatty():  # a progress bar that was killed has left the cursor hidden
            print("\x1b[?25h", end="", file=sys.stderr, flush=True)
    (started,) = ranks.all_started()
    if isinstance(end := ranks.end, RanksFailed):
        if is_preempted and end.exit_codes[end.rank] in (-signal.SIGTERM, 128 + signal.SIGTERM):
            raise Interrupted(signal.SIGTERM) from end  # it has ended itself, as it was not done in time
        raise end
    return started.folder


class _EndAll:
    """The policy that ends all ranks with the first that fails.

    Args:
        start: starts the ``size`` processes.
        timeout_s, say: see :func:`run_on_ranks`.

    Attributes:
        end: how they ended, as of ``Started.poll``.
    """

    def __init__(
        self,
        start: Callable[[], Started],
        size: int,
        timeout_s: float | None,
        say: Callable[[str], None],
    ) -> None:
        self._start, self._size, self._timeout_s, self._say = start, size, timeout_s, say
        self._started: list[Started] = []
        self._stopped_timer, self._said = StoppedTimer(), ""
        self._deadline = time.monotonic() + (timeout_s or float("inf"))
        self.end: RanksFailed | bool | None = None

    def begin(self) -> None:
        self._started.append(self._start())

    def look(self) -> bool:
        (started,) = self._started
        self.end = started.poll()
        self._said = _pass_on(started.folder / PROGRESS, self._said, self._say)
        if self.end is not None:
            return False
        if self._stopped_timer.expired(bool(started.stopped())) and (still := started.all_stopped()):
            codes = [-signal.SIGKILL if rank in still else 0 for rank in range(self._size)]
            raise RanksFailed(codes, still[0], reason=STOPPED)
        if time.monotonic() > self._deadline:
            late = f"the workers were not done after {self._timeout_s:.0f} s and were ended"
            if missing := unready(started.folder, range(self._size)):
                late += f"; rank {', '.join(map(str, missing))} {NOT_READY}"
            raise PipelineError(f"{late}; rank 0 was at: {self._said or 'its start'}")
        return True

    def all_started(self) -> Sequence[Started]:
        return self._started

    def close(self, number: int) -> None:
        for started in self._started:
            started.close(number)


def _handles(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _pass_on(path: Path, said: str, say: Callable[[str], None]) -> str:
    """Pass on the line of rank 0's ``progress`` unless it is ``said``; return the last line passed on."""
    line = path.read_text(errors="replace") if path.is_file() else ""
    if line in ("", said):
        return said
    say(line)
    return line


def first_to_fail(failures: Mapping[int, tuple[int, int]], stopped: Collection[int] = ()) -> int:
    """Return the rank to blame, from exit codes and times by rank; the others missed it, or were ended.

    ``stopped``: ranks that were killed because they were stopped. A script that missed one of these may end
    with any exit code.
    """

    def blame(rank: int) -> tuple[int, int]:
        code, timestamp = failures[rank]
        order = {WRONG_ARGUMENTS: 1, PEER_LOST: 4, -signal.SIGTERM: 5, 128 + signal.SIGTERM: 5}
        return 2 if rank in stopped else order.get(code, 0 if code < 0 else 3), timestamp

    return min(failures, key=blame)


def is_stopped(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:  # it has ended
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def _last_line(log: str) -> str:
    lines = Path(log).read_text(errors="replace").splitlines() if log else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def _quieten_torch() -> None:
    """Silence the launcher's long log, as the error says the same in a line; LOGLEVEL brings it back."""
    if "LOGLEVEL" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
