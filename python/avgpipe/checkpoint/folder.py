"""Who writes into a checkpoint's folder: all ranks of a run or none, and one run only.

Another run's save would delete the files that this one has not named yet.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from avgpipe.errors import CheckpointError, reason
from avgpipe.ranks.world import World

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing is locked there
    fcntl = None  # type: ignore[assignment]

_LOCK = ".lock"


# ---- all ranks or none --------------------------------------------------------------------------------------------


class NotFinite(CheckpointError):
    """Weights with infinities or NaN, which no other disk would take either."""


def agreed(world: World, what: str, action: Callable[[], Any]) -> list[Any]:
    """Return what ``action`` returns on every rank, in rank order, as JSON carries it.

    Where it fails on one rank, CheckpointError on all, with the first one's reason behind ``what``. Collectives inside
    would hang.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as failure:
        error = failure
    mine = ["" if error is None else _in_one_line(error), isinstance(error, NotFinite), result]
    outcomes = world.gather(mine)
    for rank, (failed, is_not_finite, _) in enumerate(outcomes):
        if failed:
            where = f"{what} (rank {rank})" if world.size > 1 else what
            raise (NotFinite if is_not_finite else CheckpointError)(f"{where}: {failed}") from error
    return [value for _, _, value in outcomes]


def _in_one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return reason(error)


# ---- one run ------------------------------------------------------------------------------------------------------


@dataclass
class _FolderLock:
    """A folder that this process has locked. ``holders``: how many of its Pipelines save there."""

    descriptor: int
    holders: int = 0
    saving: threading.Lock = field(default_factory=threading.Lock)


_held: dict[tuple[int, int], _FolderLock] = {}  # by device and number of the locked file
_guard = threading.Lock()


class FolderLocks:
    """Keeps the folders that one Pipeline saves into, until ``release``. A process that ends releases what it holds."""

    def __init__(self) -> None:
        self._keys: set[tuple[int, int]] = set()

    @contextmanager
    def saving(self, folder: Path) -> Iterator[None]:
        """Keep everybody else from saving into ``folder`` inside, and other processes until ``release``.

        Left by an error, it lets go at once. CheckpointError if somebody else saves there. Where the file system has no
        locks, nobody is kept out.
        """
        key, is_new = self._take(folder)
        lock = _held[key]
        try:
            if not lock.saving.acquire(blocking=False):
                raise CheckpointError(f"another Pipeline of this process saves into {folder} at this moment")
            try:
                yield
            finally:
                lock.saving.release()
        except BaseException:
            if is_new:
                self._drop(key)
            raise

    def release(self) -> None:
        for key in list(self._keys):
            self._drop(key)

    def _take(self, folder: Path) -> tuple[tuple[int, int], bool]:
        """Return the key of a folder's lock, and whether this is new."""
        with _guard:
            descriptor = _open(folder, os.O_RDONLY)
            status = os.fstat(descriptor)
            key = status.st_dev, status.st_ino
            if key in _held:
                os.close(descriptor)
            else:
                _lock(descriptor, folder)
                _held[key] = _FolderLock(descriptor)
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
    return os.open(folder / _LOCK, mode | os.O_CREAT, 0o600)


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
