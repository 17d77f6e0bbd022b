"""What a process of a run takes of its machine: processors, threads and main memory.

glibc gives large blocks back to the system when they are freed and gets them anew, page by page, which was measured as
up to a quarter of a batch's time. Torch has a cache of its own on CUDA, but none on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_log = logging.getLogger("avgpipe")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT_BYTES = 2**31 - 1  # free at the end of the heap: the largest int
_LARGE_BYTES = 2**30  # larger blocks go back at once
_TUNABLES, _ONE_HEAP = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"
_MEMORY_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", _TUNABLES, "LD_PRELOAD")
_THREAD_CHOICES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # variables by which a user chooses
_warned = False  # of threads


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    """Name of the processor."""
    with suppress(OSError):
        named = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if named:
            return named[1]
    return platform.processor() or platform.machine()


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep the main memory that it frees; returns whether it will.

    It will not without glibc, nor where the environment chooses how memory is allocated.
    """
    if _chooses_memory():
        return False
    mallopt = _glibc_function("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def launch_environment() -> dict[str, str]:
    """Return the variables for a process that will train, unless the environment chooses already.

    Torch asks for aligned blocks. The few bytes that glibc cuts off beside one go through its cache per thread to the
    next small object, and stay in the way when the block is freed: one of the same size does not fit there any more. A
    worker was seen to hold 570 MiB for 420. Without that cache the pieces grow together again, and a model's batches
    took no longer.

    And what the thread of a link receives the scheduler's thread frees: where each had a heap of its own, every one
    would keep its own peak, and heaps of threads are too small for large messages.
    """
    return {} if _chooses_memory() else {_TUNABLES: _ONE_HEAP}


def return_freed_memory() -> None:
    """Give free main memory back to the system, once (malloc_trim); without glibc nothing happens."""
    malloc_trim = _glibc_function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def warn_of_threads(threads: int) -> None:
    """Warn where operators of a pipeline in this process alone use ``threads`` of a busy machine.

    Small operators wait for each thread in turn, which takes many times as long as the work where a thread has lost its
    processor. A process warns once.
    """
    global _warned
    if _warned or threads == 1 or any(name in os.environ for name in _THREAD_CHOICES):
        return
    if hasattr(os, "getloadavg") and os.getloadavg()[0] >= (os.cpu_count() or 1):
        _warned = True
        _log.warning(
            "this machine is busy, and each operator of torch waits for %d threads: micro-batches may take many times "
            "as long as with one; set OMP_NUM_THREADS=1, or call torch.set_num_threads(1)",
            threads,
        )


def _chooses_memory() -> bool:
    """Whether the environment says how memory is allocated, by another word than ours."""
    return any(os.environ.get(name) not in (None, "", _ONE_HEAP) for name in _MEMORY_CHOICES)


def _glibc_function(name: str) -> Any:
    """Return the function, or None without glibc."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        os.confstr("CS_GNU_LIBC_VERSION")
        return getattr(ctypes.CDLL(None), name)
    except (ValueError, OSError, AttributeError):
        return None
