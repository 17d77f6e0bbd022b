"""Worker processes that start in milliseconds: forked from one that has imported everything already."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.runner import torchrun_environment

_LONG_S = 45  # a rank that runs longer shows where all its threads are

_context: Any = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.runtime.imported"])


class Workers:
    """Runs ``function(**arguments)``, of a module, on every rank; the parent holds the store."""

    def __init__(self, world: int, function: Callable[..., Any], **arguments: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: list[BaseProcess] = []
        for rank in range(world):
            env = torchrun_environment(rank, world, self.port())
            process = _context.Process(target=_run, args=(function, arguments, env, str(self.folder)))
            process.start()
            self.processes.append(process)

    def port(self) -> int:
        """Of the store."""
        return int(self._store.port)

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.processes[rank].pid or 0, signal.SIGKILL)

    def wait_for(self, count: int, name: str, limit_s: float = 60) -> None:
        """Until ``count`` ranks have called ``touch(name)``."""
        deadline = time.monotonic() + limit_s
        while len(list(self.folder.glob(f"{name}-*"))) < count:
            assert time.monotonic() < deadline, self.outputs()
            assert self.alive, self.outputs()
            time.sleep(0.01)

    @property
    def alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def outputs(self) -> list[str]:
        return [
            (self.folder / f"{rank}.txt").read_text(errors="replace")
            if (self.folder / f"{rank}.txt").exists()
            else ""
            for rank in range(len(self.processes))
        ]

    def join(self, timeout_s: float = 60) -> list[tuple[int, str]]:
        """Exit code and output of every rank; those that outlast the limit are killed."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.05, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        return [(p.exitcode or 0, text) for p, text in zip(self.processes, self.outputs())]

    def results(self, timeout_s: float = 60) -> list[Any]:
        """What the function returned on every rank."""
        for rank, (code, output) in enumerate(self.join(timeout_s)):
            assert code == 0, f"rank {rank} exited with {code}:\n{output[-4000:]}"
        return [torch.load(self.folder / f"{r}.pt", weights_only=False) for r in range(len(self.processes))]


def run(world: int, function: Callable[..., Any], timeout_s: float = 60, **arguments: Any) -> list[Any]:
    return Workers(world, function, **arguments).results(timeout_s)


def touch(name: str) -> None:
    """Tell the parent that this rank has got there."""
    Path(os.environ["TEST_FOLDER"], f"{name}-{os.environ['RANK']}").touch()


def _run(function: Callable[..., Any], arguments: dict[str, Any], env: dict[str, str], folder: str) -> None:
    rank = env["RANK"]
    output = os.open(f"{folder}/{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(env, TEST_FOLDER=folder)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(_LONG_S)
    result = function(**arguments)
    torch.save(result, f"{folder}/{rank}.pt")
    sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
