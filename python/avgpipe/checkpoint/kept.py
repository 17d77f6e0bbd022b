"""The folders of a training loop's checkpoints: the newest, those before it that are kept, and the best."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from avgpipe.checkpoint.manifest import NAME
from avgpipe.errors import CheckpointError

T = TypeVar("T")

LAST, BEST, _KEPT = "last", "best", "batch-"


def kept_name(batches: int) -> str:
    """Return the folder of a checkpoint that is kept when the next one is ``last``."""
    return f"{_KEPT}{batches:09d}"


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, the newest first, without the best."""
    return [path for path in (folder / LAST, *_kept_in(folder)) if (path / NAME).is_file()]


def newest(folder: Path, look: Callable[[Path], T]) -> T:
    """Return what ``look`` returns for the newest checkpoint for which it raises no CheckpointError."""
    failure: CheckpointError | None = None
    for path in checkpoints_in(folder):
        try:
            return look(path)
        except CheckpointError as error:
            failure = failure or error
    raise failure or CheckpointError(f"no checkpoint in {folder}")


def delete_old(folder: Path, keep: int, following: str, source: str | None = None) -> None:
    """Delete all but ``keep`` of those before ``following``, beside ``last``, ``best`` and ``source``.

    Those after it are from a course of training that was abandoned.
    """
    found = _kept_in(folder)
    stay = [path for path in found if path.name < following][:keep]
    for path in found:
        if path not in stay and path.name != source:
            with suppress(OSError):  # the next save tries again
                (path / NAME).unlink(missing_ok=True)  # without it the rest is no checkpoint
                shutil.rmtree(path)


def _kept_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_KEPT}*"), reverse=True)
