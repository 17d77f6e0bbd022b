"""This process: its place in a run, as its environment says, and what it uses of its machine.

glibc returns large blocks to the system when they are freed, and requests them again page by page, which was
measured as up to a quarter of a batch's time. Torch has a cache of its own on CUDA, but none on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# The number of this generation, where ranks are replaced; the folder in which a spare gets its place; and for
# isolated pipelines the address of the run, and this process's pipeline.
GENERATION, SPARE, RUN, PIPELINE = "AVGPIPE_GENERATION", "AVGPIPE_SPARE", "AVGPIPE_RUN", "AVGPIPE_PIPELINE"
HOST = "AVGPIPE_HOST"  # names this host, where emulated hosts are to count as several
# The path of the file in which ranks of one host meet; how isolated pipelines share a batch: by "pace", or "equal".
STORE_FILE, SHARES = "AVGPIPE_STORE", "AVGPIPE_SHARES"


def named(target: str) -> Any:
    """Return the object named "module:name"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def is_replaceable() -> bool:
    """Whether a rank that is killed is replaced here."""
    return GENERATION in os.environ


def generation() -> int:
    """Return how often the ranks have met again after one was replaced."""
    return int(os.environ.get(GENERATION, "0"))


def pipeline_here() -> int | None:
    """Return the pipeline of this process in a run of isolated ones; None elsewhere."""
    return int(os.environ[PIPELINE]) if RUN in os.environ else None


# ---- places of faults ------------------------------------------------------------------------------------------------


VARIABLE = "AVGPIPE_FAULTS"  # name of the variable with the faults of processes to start, as JSON
RESTART = "AVGPIPE_RESTART"  # name of the variable that counts how often a process was restarted


armed: list[Any] = []  # faults, each an ``avgpipe.faults.fault.Armed``


def at(phase: str, **place: Any) -> list[Any]:
    """Let the faults happen that are armed for this place; return those on which the place itself must act.

    Args:
        phase: One of ``avgpipe.faults.fault.PHASES``.
        place: The names of that table, as far as they are known here; a collection where the process has
            several, such as the stages that it holds. The rank is that of the environment unless it is given.
    """
    return [found for one in tuple(armed) if (found := one.reach(phase, place)) is not None]


if VARIABLE in os.environ:
    armed.extend(named("avgpipe.faults.fault:armed_by")(os.environ[VARIABLE]))


# ---- processors, threads and main memory -----------------------------------------------------------------------------


_log = logging.getLogger("avgpipe")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT_BYTES = 2**31 - 1  # free at the end of the heap: the largest int
_LARGE_BYTES = 2**30  # larger blocks go back at once
_TUNABLES, _ONE_HEAP = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"
_MEMORY_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", _TUNABLES, "LD_PRELOAD")
_THREAD_CHOICES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # variables of the user's choice
_warned = False  # about threads


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_model() -> str:
    """Return the name of the processor."""
    named = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return named[1] if named else platform.machine()


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep the main memory that it frees; return whether it will.

    It will not without glibc, nor where the environment configures the allocation of memory.
    """
    mallopt = None if _chooses_memory() else _glibc_function("mallopt")
    return mallopt is not None and bool(
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    )


def launch_environment() -> dict[str, str]:
    """Return the variables for a process that will train, unless the environment sets them already.

    Torch requests aligned blocks. The few bytes that glibc cuts off beside one go through its cache per
    thread to the next small object, and stay there when the block is freed: a block of the same size no
    longer fits. A worker was seen to hold 570 MiB instead of 420. Without that cache the pieces merge again,
    and a model's batches took no longer.

    Also, what the thread of a link receives is freed by the scheduler's thread: if each had a heap of its
    own, every heap would keep its own peak, and heaps of threads are too small for large messages.
    """
    return {} if _chooses_memory() else {_TUNABLES: _ONE_HEAP}


def return_freed_memory() -> None:
    """Return free main memory to the system, once (malloc_trim); without glibc nothing happens."""
    malloc_trim = _glibc_function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def warn_of_threads(threads: int) -> None:
    """Warn where a pipeline in this process alone uses ``threads`` threads for its operators on a busy machine.

    Small operators wait for each thread in turn; where a thread has lost its processor, that takes many times
    as long as the work. A process warns once.
    """
    global _warned
    if _warned or threads == 1 or any(name in os.environ for name in _THREAD_CHOICES):
        return
    if os.getloadavg()[0] >= (os.cpu_count() or 1):
        _warned = True
        _log.warning(
            "this machine is busy, and each operator of torch waits for %d threads: micro-batches may take many times "
            "as long as with one; set OMP_NUM_THREADS=1, or call torch.set_num_threads(1)",
            threads,
        )


def _chooses_memory() -> bool:
    """Whether the environment configures the allocation of memory, differently from us."""
    return any(os.environ.get(name) not in (None, "", _ONE_HEAP) for name in _MEMORY_CHOICES)


def _glibc_function(name: str) -> Any:
    """Return the function, or None without glibc."""
    try:
        os.confstr("CS_GNU_LIBC_VERSION")
        return getattr(ctypes.CDLL(None), name)
    except ValueError:
        return None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has used: of an accelerator, else resident in main memory."""
    if device.type != "cpu":
        import torch  # a launcher does without torch

        return int(torch.accelerator.max_memory_allocated(device))
    # Of this program alone; getrusage also counts the program that the process ran before exec.
    return status_bytes("VmHWM")


def status_bytes(field: str) -> int:
    """Return a number of bytes of this process from /proc/self/status, such as VmRSS, its resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
