"""Run a function on several ranks, each a process of its own that starts in milliseconds.

They are forked from a server that has imported everything already; no thread may run in it, so it computes nothing. The
parent holds the store, as torchrun's agent does. A rank that fails ends no other one: what the others then do is what
many tests look at.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from avgpipe.ranks.launch import rank_environment
from tests.happens_before import plugin
from tests.patience import Deadline, limit

ROOT = Path(__file__).parent.parent
_TELLS_S = 5  # in which a rank that outlasts its limit shows where all its threads are

_context: Any = multiprocessing.get_context("forkserver")
# The first optimizer of a process would import torch._dynamo, which takes a second.
_context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "avgpipe.pipeline", "avgpipe_ext"])


class Ranks:
    """Runs ``function(**arguments)``, of a module, on every rank. ``port``: of a store that another process holds."""

    def __init__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        self._store = None
        if port is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared = {**address, "TORCHELASTIC_USE_AGENT_STORE": "True", "TEST_FOLDER": self._folder.name}
        passed_on = (plugin.VARIABLE, "COVERAGE_PROCESS_START", "PYTEST_CURRENT_TEST")
        shared |= {name: os.environ[name] for name in passed_on if name in os.environ}
        self._shared = {**shared, **(environment or {})}
        self._called = function, arguments
        self.processes: list[BaseProcess] = [self._start(rank, world_size) for rank in range(world_size)]

    def _start(self, rank: int, world_size: int) -> BaseProcess:
        environment = {**rank_environment(rank, world_size), **self._shared}
        process: BaseProcess = _context.Process(target=_run, args=(*self._called, environment))
        process.start()
        return process

    def replace(self, rank: int, environment: Mapping[str, str]) -> None:
        """Start another process as a rank that has ended, with some variables changed from now on."""
        self._shared |= environment
        self.processes[rank] = self._start(rank, len(self.processes))

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(self.processes[rank].pid or 0, signal.SIGKILL)

    def wait_for(self, count: int, name: str, limit_s: float = 60) -> None:
        """Until ``count`` ranks have called ``touch(name)``."""
        deadline = Deadline(limit_s)
        while len(list(self.folder.glob(f"{name}-*"))) < count:
            assert not deadline.has_passed, self.outputs()
            assert any(process.is_alive() for process in self.processes), self.outputs()
            time.sleep(0.01)

    def outputs(self) -> list[str]:
        """What every rank has printed so far."""
        files = [self.folder / f"{rank}.txt" for rank in range(len(self.processes))]
        return [file.read_text(errors="replace") if file.exists() else "" for file in files]

    def join(self, timeout_s: float = 100) -> list[tuple[int, str]]:
        """Exit code and output of every rank; those that outlast the limit show where they are, and end."""
        deadline = Deadline(timeout_s)
        for process in self.processes:
            while process.exitcode is None and not deadline.has_passed:
                process.join(min(1.0, max(0.05, deadline.left_s)))
            if process.exitcode is None:
                os.kill(process.pid or 0, signal.SIGUSR1)
                process.join(limit(_TELLS_S))
                process.kill()
                process.join()
        return [(p.exitcode or 0, text) for p, text in zip(self.processes, self.outputs())]

    def results(self, timeout_s: float = 100) -> list[Any]:
        """What the function returned on every rank."""
        for rank, (code, output) in enumerate(self.join(timeout_s)):
            assert code == 0, f"rank {rank} exited with {code}:\n{output[-4000:]}"
        return [torch.load(self.folder / f"{r}.pt", weights_only=False) for r in range(len(self.processes))]


def run(world_size: int, function: Callable[..., Any], timeout_s: float = 100, **arguments: Any) -> list[Any]:
    return Ranks(world_size, function, **arguments).results(timeout_s)


def touch(name: str) -> None:
    """Tell the parent that this rank has got there."""
    Path(os.environ["TEST_FOLDER"], f"{name}-{os.environ['RANK']}").touch()


def _measured() -> AbstractContextManager[None]:
    if "COVERAGE_PROCESS_START" not in os.environ:
        return nullcontext()
    from tests import covering

    return covering.in_rank()


def _run(function: Callable[..., Any], arguments: dict[str, Any], environment: dict[str, str]) -> None:
    rank, folder = environment["RANK"], environment["TEST_FOLDER"]
    output = os.open(f"{folder}/{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    # Not by faulthandler.dump_traceback_later: its thread reads frames that change meanwhile, which can crash.
    faulthandler.register(signal.SIGUSR1, chain=True)  # which ends the process afterwards
    with plugin.reporting(), _measured():
        result = function(**arguments)
    torch.save(result, f"{folder}/{rank}.pt")
    sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
