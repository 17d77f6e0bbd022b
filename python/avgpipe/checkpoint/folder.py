"""Locks a checkpoint's folder for one run, and makes all of its ranks write or none.

Another run's save would delete the files that this one has not named yet.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from avgpipe.errors import CheckpointError, reason
from avgpipe.ranks.world import World

_LOCK = ".lock"


class NotFinite(CheckpointError):
    """Weights with infinities or NaN, which another disk would not change."""


def agreed(world: World, what: str, action: Callable[[], Any]) -> list[Any]:
    """Return what ``action`` returns on every rank, in rank order, sent as JSON.

    If it fails on some ranks, CheckpointError on all, with their reasons after ``what``. Collectives inside
    would hang.
    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as error:
        failure = error
    outcomes = world.gather([failure and _in_one_line(failure), isinstance(failure, NotFinite), result])
    failed = [(rank, why, kind) for rank, (why, kind, _) in enumerate(outcomes) if why]
    if failed:
        reasons = "; ".join(
            f"(rank {rank}): {why}" if world.size > 1 else f": {why}" for rank, why, _ in failed
        )
        kind = NotFinite if all(is_not_finite for *_, is_not_finite in failed) else CheckpointError
        raise kind(f"{what}{' ' * (world.size > 1)}{reasons}") from failure
    return [value for _, _, value in outcomes]


def _in_one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return reason(error)


class _FolderLock:
    """A folder that this process has locked, until the last reference to this object is gone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self.saving = descriptor, threading.Lock()

    @property
    def is_gone(self) -> bool:
        """Whether the folder has been deleted."""
        return os.fstat(self._descriptor).st_nlink == 0

    def __del__(self) -> None:
        os.close(self._descriptor)


# By device and number of the locked file. The system would let each Pipeline of one process lock the folder.
_locked: WeakValueDictionary[tuple[int, int], _FolderLock] = WeakValueDictionary()
_guard = threading.Lock()


class FolderLocks:
    """Holds the folders that one Pipeline saves into, until ``release`` or the end of the process."""

    def __init__(self) -> None:
        self._kept: set[_FolderLock] = set()

    @contextmanager
    def saving(self, folder: Path) -> Iterator[None]:
        """Keep others from saving into ``folder`` inside, and other processes until ``release``.

        After an error inside, the folder is released at once. CheckpointError if another run saves there. On
        a file system without locks, nothing is kept out.
        """
        lock = _lock_of(folder)
        if not lock.saving.acquire(blocking=False):
            raise CheckpointError(f"another Pipeline of this process saves into {folder} at this moment")
        try:
            yield
            with _guard:
                # deleted folders would each keep a file open
                self._kept = {kept for kept in self._kept if not kept.is_gone} | {lock}
        finally:
            lock.saving.release()
            with _guard:
                del lock  # a traceback keeps the variables of this function

    def release(self) -> None:
        with _guard:
            self._kept.clear()


def is_saved_into(folder: Path) -> bool:
    """Whether a process of this machine keeps ``folder``, as a run does from its first checkpoint to its end.

    It asks the system, and takes no lock: that could collide with a run that begins at this moment.
    """
    try:
        inode = (folder / _LOCK).stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    # "1: FLOCK  ADVISORY  WRITE PID MAJOR:MINOR:INODE 0 EOF"; some file systems number devices differently
    # from stat.
    fields = (line.split() for line in locks.splitlines())
    return any(of[1] == "FLOCK" and of[5].rpartition(":")[2] == str(inode) for of in fields if len(of) > 5)


def _lock_of(folder: Path) -> _FolderLock:
    with _guard:
        descriptor = _open(folder, os.O_RDONLY)
        status = os.fstat(descriptor)
        key = status.st_dev, status.st_ino
        lock = _locked.get(key)
        if lock is not None:
            os.close(descriptor)
            return lock
        _acquire(descriptor, folder)
        return _locked.setdefault(key, _FolderLock(descriptor))


def _open(folder: Path, mode: int) -> int:
    # Closed to other users, who might lock it to block this one; they may be able to read the folder itself.
    return os.open(folder / _LOCK, mode | os.O_CREAT, 0o600)


def _acquire(descriptor: int, folder: Path) -> None:
    """Lock the file; if another process has locked it, close ``descriptor`` and raise CheckpointError."""
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            writing = _open(folder, os.O_RDWR)  # NFS locks only files that are open for writing
            os.dup2(writing, descriptor, inheritable=False)
            os.close(writing)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            os.close(descriptor)
            message = f"another run saves into {folder}: end it, or save into another folder"
            raise CheckpointError(message) from None
