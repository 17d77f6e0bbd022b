"""Main memory that training frees and takes again, batch after batch, stays with the process.

glibc gives large blocks back to the system when they are freed and gets them anew, page by page, which was measured as
up to a quarter of a batch's time. Torch has a cache of its own on CUDA, but none on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT_BYTES = 2**31 - 1  # free at the end of the heap: the largest int
_LARGE_BYTES = 2**30  # larger blocks go back at once
_USERS_CHOICE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


@functools.cache
def keep_freed_memory() -> bool:
    """Whether that was arranged: not without glibc, nor where the environment chooses how memory is allocated."""
    if not sys.platform.startswith("linux") or any(os.environ.get(name) for name in _USERS_CHOICE):
        return False
    try:
        os.confstr("CS_GNU_LIBC_VERSION")
        mallopt = ctypes.CDLL(None).mallopt
    except (ValueError, OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
