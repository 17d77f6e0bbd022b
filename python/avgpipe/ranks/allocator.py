"""Main memory that training frees and takes again, batch after batch, stays with the process.

glibc gives large blocks back to the system when they are freed and gets them anew, page by page, which was measured as
up to a quarter of a batch's time. Torch has a cache of its own on CUDA, but none on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT_BYTES = 2**31 - 1  # free at the end of the heap: the largest int
_LARGE_BYTES = 2**30  # larger blocks go back at once
_TUNABLES, _WITHOUT_THREAD_CACHE = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"
_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", _TUNABLES, "LD_PRELOAD")


@functools.cache
def keep_freed_memory() -> bool:
    """Whether that was arranged: not without glibc, nor where the environment chooses how memory is allocated."""
    if _chosen():
        return False
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def launch_environment() -> dict[str, str]:
    """What a process that shall train finds in its environment, unless that chooses already.

    Torch asks for aligned blocks. The few bytes that glibc cuts off beside one go through its cache per thread to the
    next small object, and stay in the way when the block is freed: one of the same size does not fit there any more. A
    worker was seen to hold 570 MiB for 420. Without that cache the pieces grow together again, and a model's batches
    took no longer.
    """
    return {} if _chosen() else {_TUNABLES: _WITHOUT_THREAD_CACHE}


def return_freed_memory() -> None:
    """To the system, once, so that a process is as large as what it uses; nothing where that is not known how."""
    malloc_trim = _of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _chosen() -> bool:
    """Whether the environment says how memory is allocated, by another word than ours."""
    return any(os.environ.get(name) not in (None, "", _WITHOUT_THREAD_CACHE) for name in _CHOICES)


def _of_glibc(name: str) -> Any:
    """The function; None without glibc."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        os.confstr("CS_GNU_LIBC_VERSION")
        return getattr(ctypes.CDLL(None), name)
    except (ValueError, OSError, AttributeError):
        return None
