"""Processes of one comparison: started with torchrun's environment, watched, and never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from avgpipe.bench.schedules.namespaces import Network
from avgpipe.errors import PipelineError
from avgpipe.ranks.allocator import launch_environment
from avgpipe.ranks.meeting import private_meeting

PROGRESS = "AVGPIPE_BENCH_PROGRESS"  # names the file in which rank 0 says what it does
ARGUMENTS = "arguments.json"  # in the folder that only this user may read, as anybody may a command line
PEER_LOST = 3  # exit code of a worker that failed only because another one did
_POLL_S = 0.05
_GRACE_S = 5.0  # for the others to say why they end, when one has failed
_PORT = 29500  # of the store of rank 0, in a namespace of its own


def run_workers(
    target: str,
    workers: int,
    arguments: dict[str, Any],
    *,
    timeout_s: float,
    network: Network | None = None,
    threads: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> list[Any]:
    """Call the function named "module:function" with JSON arguments on so many ranks; what they returned, as JSON.

    The function finds torchrun's environment and no process group yet. network: each rank in a namespace of it.
    threads: OMP_NUM_THREADS. say: is told what rank 0 says through `progress`. Raises PipelineError when a worker
    fails or the workers outlast `timeout_s`; whatever happens, none of them is left.
    """
    with tempfile.TemporaryDirectory(prefix="avgpipe-bench-") as name:
        folder, meeting = Path(name), _meeting(network, name)
        processes: list[subprocess.Popen[bytes]] = []
        (folder / ARGUMENTS).write_text(json.dumps(arguments))
        try:
            for rank in range(workers):
                words = [
                    sys.executable,
                    "-m",
                    "avgpipe.bench.schedules.worker",
                    str(os.getpid()),
                    target,
                    name,
                ]
                env = _environment(rank, workers, threads, meeting)
                if rank == 0:
                    env[PROGRESS] = str(folder / "progress")
                with (folder / f"{rank}.log").open("wb") as log:
                    processes.append(
                        subprocess.Popen(
                            [*(network.inside(rank) if network else []), *words],
                            env=env,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            start_new_session=True,  # a group of its own to kill; Ctrl-C comes to us
                        )
                    )
            _watch(processes, folder, timeout_s, say)
            return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]
        finally:
            _end(processes)


def progress(line: str) -> None:
    """In a worker: tell the parent what is going on. Of rank 0 alone."""
    if PROGRESS in os.environ:
        new = Path(os.environ[PROGRESS] + ".new")
        new.write_text(line)
        new.replace(os.environ[PROGRESS])


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP are a KeyboardInterrupt, as SIGINT is: what was started is ended, then we are."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _meeting(network: Network | None, folder: str) -> dict[str, str]:
    """Where the ranks meet, as variables of their environment. In namespaces rank 0 holds the store."""
    if network is None:
        return private_meeting(folder)
    meeting = {"MASTER_ADDR": network.address(0), "MASTER_PORT": str(_PORT)}
    return {**meeting, "GLOO_SOCKET_IFNAME": network.device}


def _environment(rank: int, workers: int, threads: int, meeting: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {
        **os.environ,
        **launch_environment(),
        **meeting,
        "PYTHONPATH": path,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "OMP_NUM_THREADS": str(threads),
    }


def _watch(
    processes: list[subprocess.Popen[bytes]], folder: Path, timeout_s: float, say: Callable[[str], None]
) -> None:
    deadline, said = time.monotonic() + timeout_s, ""
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            _wait(processes, _GRACE_S)
            break
        if time.monotonic() > deadline:
            raise PipelineError(
                f"the workers were not done after {timeout_s:.0f} s and were ended; rank 0 was at: "
                f"{said or 'its start'}"
            )
        if (line := _read(folder / "progress")) not in ("", said):
            say(said := line)
        time.sleep(_POLL_S)
    failed = [rank for rank, process in enumerate(processes) if process.poll()]
    if failed:
        if (line := _read(folder / "progress")) not in ("", said):
            say(line)  # where it failed
        # One that only missed its peer is not the one to blame.
        blamed = min(failed, key=lambda rank: processes[rank].returncode == PEER_LOST)
        raise PipelineError(_failure(processes, blamed, folder))


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and any(process.poll() is None for process in processes):
        time.sleep(_POLL_S)


def _failure(processes: list[subprocess.Popen[bytes]], rank: int, folder: Path) -> str:
    """The last line that a rank wrote."""
    code = processes[rank].returncode
    lines = [line for line in _read(folder / f"{rank}.log").splitlines() if line.strip()]
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    return f"worker {rank} of {len(processes)} failed ({how}): {lines[-1].strip() if lines else 'it said nothing'}"


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended meanwhile
    for process in processes:
        process.wait()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
