"""Injected faults of disks: of the files that a save writes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from avgpipe.ranks import environment as probe


def writing(file: Any, **place: Any) -> Any:
    """Return ``file``, which a save is about to write, or its replacement where a test wants a full disk."""
    for fault in probe.at("save", action="write", **place):
        if fault.kind == "full disk":
            return _FullDisk(file, fault.room_bytes)
    return file


def written(path: Path, **place: Any) -> None:
    """Flip a bit of the file ``path``, which a save has written, where that fault is armed."""
    for fault in probe.at("save", action="written", **place):
        if fault.kind == "flipped bit":
            byte, bit = divmod(fault.bit % (8 * path.stat().st_size), 8)
            with path.open("r+b") as file:
                file.seek(byte)
                (value,) = file.read(1)
                file.seek(byte)
                file.write(bytes([value ^ 1 << bit]))


class _FullDisk:
    """A file on a disk with room for ``room_bytes`` bytes."""

    def __init__(self, file: Any, room_bytes: int) -> None:
        self._file, self._room_bytes = file, room_bytes

    def write(self, data: Any) -> int:
        taken = memoryview(data).cast("B")[: self._room_bytes]
        self._file.write(taken)
        self._room_bytes -= len(taken)
        if len(taken) < memoryview(data).nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(taken)
