"""Run a function on several ranks, each a process of its own, the parent holding the store as torchrun's agent does."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent


def torchrun_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun sets where its agent holds the store."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
    }


class Ranks:
    """``start`` the function named "module:function" with JSON arguments on every rank, then ``join``."""

    def __init__(self, world: int, target: str, **arguments: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = []
        for rank in range(world):
            env = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT)]),
                **torchrun_environment(rank, world, self._store.port),
                "OMP_NUM_THREADS": "1",
            }
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.runner", target, json.dumps(arguments), self._folder.name],
                    env=env,
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    def join(self, timeout_s: float = 100) -> list[tuple[int, str]]:
        """Exit code and output of every rank; those that outlast the limit are killed."""
        deadline = time.monotonic() + timeout_s
        ends = []
        for process in self.processes:
            try:
                output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                output, _ = process.communicate()
                output += "\n(killed: over the time limit)"
            ends.append((process.returncode, output))
        return ends

    def results(self, timeout_s: float = 100) -> list[Any]:
        """What the function returned on every rank."""
        ends = self.join(timeout_s)
        for rank, (code, output) in enumerate(ends):
            assert code == 0, f"rank {rank} exited with {code}:\n{output[-4000:]}"
        return [
            torch.load(Path(self._folder.name) / f"{rank}.pt", weights_only=False)
            for rank in range(len(ends))
        ]


def run_ranks(world: int, target: str, timeout_s: float = 100, **arguments: Any) -> list[Any]:
    return Ranks(world, target, **arguments).results(timeout_s)


def main() -> None:
    target, arguments, folder = sys.argv[1:]
    module, function = target.split(":")
    torch.set_num_threads(1)
    result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    torch.save(result, Path(folder) / f"{os.environ['RANK']}.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
