"""Writes and reads a checkpoint's files: in blocks, with a checksum, and bypassing the system's cache.

A checkpoint is seldom read. Its pages in the system's cache would cost more than to write them, and replace
data that training reads.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import zlib
from contextlib import suppress
from io import FileIO
from typing import IO, Any

import numpy as np

_BLOCK = 1 << 20  # bytes
_PART = 4096  # bytes that are summed for the checksum


def _checksum(block: memoryview, before: int) -> int:
    """Return the checksum of a file up to a block: the CRC-32 of the sums of each 4 KiB, as 64-bit numbers.

    Any flipped bit changes it. A CRC-32 of the bytes would take as long as to write them.

    Args:
        block: whole parts of 4 KiB, except at the end of the file, which counts as if zeros followed.
        before: the result for the block before; 0 at the beginning.
    """
    whole = len(block) // _PART * _PART
    end = bytes(block[whole:])
    for parts in (block[:whole], end.ljust(_PART, b"\0") if end else end):
        sums = np.frombuffer(parts, "<u8").reshape(-1, _PART // 8).sum(axis=1, dtype="<u8")
        before = zlib.crc32(sums.data, before)
    return before


def checksum_of(file: IO[bytes]) -> int:
    """Read an open file to its end; return its checksum."""
    found, block = 0, memoryview(bytearray(_BLOCK))
    while count := file.readinto(block):  # type: ignore[attr-defined]
        found = _checksum(block[:count], found)
    return found


class BlockFile:
    """Writes to ``file``, which is empty.

    Attributes:
        size: bytes written.
        checksum: of the file, once it is finished.
    """

    def __init__(self, file: FileIO) -> None:
        self._descriptor = file.fileno()
        self._block = memoryview(mmap.mmap(-1, _BLOCK))  # aligned to pages, as direct writes must be
        self._filled = 0
        self.size = self.checksum = 0
        with suppress(OSError):  # a file system that cannot bypass the cache
            self._set_direct(os.O_DIRECT)

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            taken = left[: _BLOCK - self._filled]
            self._block[self._filled : self._filled + len(taken)] = taken
            self._filled, left = self._filled + len(taken), left[len(taken) :]
            if self._filled == _BLOCK:
                self._put()
        self.size += size
        return size

    def flush(self) -> None:
        """Do nothing: a block that is not full waits for more."""

    def finish(self) -> None:
        """Write the rest, and sync all to the disk."""
        with suppress(OSError):
            self._set_direct(0)  # the rest is no whole block
        self._put()
        os.fsync(self._descriptor)

    def _put(self) -> None:
        left = self._block[: self._filled]
        self.checksum, self._filled = _checksum(left, self.checksum), 0
        while left:
            left = left[os.write(self._descriptor, left) :]

    def _set_direct(self, flag: int) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT | flag)
