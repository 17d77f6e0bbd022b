"""One run saves into a folder: each would delete the files that the other one has not named yet."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from avgpipe.errors import CheckpointError

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing is locked there
    fcntl = None  # type: ignore[assignment]

_NAME = ".lock"
_held: weakref.WeakValueDictionary[tuple[int, int], FolderLock] = (
    weakref.WeakValueDictionary()
)  # of this process


class FolderLock:
    """Held by this process for as long as the object, or another one of the same folder, lives."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._saving = threading.Lock()
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def take(cls, folder: Path) -> FolderLock:
        """CheckpointError if another process holds it. Where the file system has no locks, nobody is kept out."""
        # Closed to other users, who might lock it to keep this one out; the folder itself they may be able to read.
        descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT, 0o600)
        status = os.fstat(descriptor)
        known = _held.get((status.st_dev, status.st_ino))
        if known is not None:
            os.close(descriptor)
            return known
        lock = _held[status.st_dev, status.st_ino] = cls(descriptor)
        lock._lock(folder)
        return lock

    @contextmanager
    def saving(self, folder: Path) -> Iterator[None]:
        """CheckpointError while another thread of this process is inside."""
        if not self._saving.acquire(blocking=False):
            raise CheckpointError(f"another Pipeline of this process saves into {folder} at this moment")
        try:
            yield
        finally:
            self._saving.release()

    def _lock(self, folder: Path) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise CheckpointError(
                    f"another run saves into {folder}: end it, or save into another folder"
                ) from None
