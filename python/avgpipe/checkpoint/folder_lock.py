"""One run saves into a folder: each would delete the files that the other one has not named yet."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from avgpipe.errors import CheckpointError

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing is locked there
    fcntl = None  # type: ignore[assignment]

_NAME = ".lock"


@dataclass
class _Held:
    """By this process. ``holders``: how many of its Pipelines save there."""

    descriptor: int
    holders: int = 0
    saving: threading.Lock = field(default_factory=threading.Lock)


_held: dict[tuple[int, int], _Held] = {}  # by device and number of the locked file
_guard = threading.Lock()


class FolderLocks:
    """The folders that one Pipeline saves into, until ``release``. A process that ends releases what it holds."""

    def __init__(self) -> None:
        self._keys: set[tuple[int, int]] = set()

    @contextmanager
    def saving(self, folder: Path) -> Iterator[None]:
        """Inside nobody else saves into ``folder``, and no other process until ``release`` unless this is left by an
        error. CheckpointError if somebody else does. Where the file system has no locks, nobody is kept out.
        """
        key, is_new = self._take(folder)
        held = _held[key]
        try:
            if not held.saving.acquire(blocking=False):
                raise CheckpointError(f"another Pipeline of this process saves into {folder} at this moment")
            try:
                yield
            finally:
                held.saving.release()
        except BaseException:
            if is_new:
                self._drop(key)
            raise

    def release(self) -> None:
        for key in list(self._keys):
            self._drop(key)

    def _take(self, folder: Path) -> tuple[tuple[int, int], bool]:
        """What is held, and whether it was not before."""
        with _guard:
            descriptor = _open(folder, os.O_RDONLY)
            status = os.fstat(descriptor)
            key = status.st_dev, status.st_ino
            if key in _held:
                os.close(descriptor)
            else:
                _lock(descriptor, folder)
                _held[key] = _Held(descriptor)
            is_new = key not in self._keys
            if is_new:
                _held[key].holders += 1
                self._keys.add(key)
            return key, is_new

    def _drop(self, key: tuple[int, int]) -> None:
        with _guard:
            self._keys.remove(key)
            _held[key].holders -= 1
            if not _held[key].holders:
                os.close(_held.pop(key).descriptor)


def _open(folder: Path, mode: int) -> int:
    # Closed to other users, who might lock it to keep this one out; the folder itself they may be able to read.
    return os.open(folder / _NAME, mode | os.O_CREAT, 0o600)


def _lock(descriptor: int, folder: Path) -> None:
    """CheckpointError, and ``descriptor`` closed, if another process has locked it."""
    if fcntl is None:
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            writing = _open(folder, os.O_RDWR)  # NFS locks only what is open for writing
            os.dup2(writing, descriptor, inheritable=False)
            os.close(writing)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            os.close(descriptor)
            message = f"another run saves into {folder}: end it, or save into another folder"
            raise CheckpointError(message) from None
