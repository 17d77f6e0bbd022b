"""Memory: what a micro-batch holds between its forward and its backward, and what a process has used."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class SavedBytes:
    """Counts what autograd saves for a backward; memory that several tensors share counts once.

    ``known``: addresses of memory that is there anyway, such as weights.
    """

    def __init__(self, known: Iterable[int]) -> None:
        self._seen = set(known)
        self.bytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept):
            yield

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count(tensor)
        return tensor.detach()  # the tensor itself may own the graph that would own it then


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has used: on ``device`` where that is CUDA, else resident in main memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        # Of this program alone; getrusage counts what the process was before it became this program, too.
        status = Path("/proc/self/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
