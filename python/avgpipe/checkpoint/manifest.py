"""The manifest of a checkpoint: the content of each file. A checkpoint is the files that its manifest names.

Files are written under new names first; replacing the manifest, one atomic step, makes them the checkpoint.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from io import FileIO
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from avgpipe.errors import CheckpointError, reason
from avgpipe.files import json_object, open_regular, write_atomically
from avgpipe.runtime.placement import StageReplica

NAME = "manifest.json"
_FORMAT = 3


class Gone(CheckpointError):
    """A file of a checkpoint is missing. If the manifest has changed, it was replaced, else it is lost."""


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        plan: The options of the plan that wrote it.
        batches: How many had begun.
        bounds: See :class:`avgpipe.model.model.Model`.
        signature: Shape and dtype by tensor name.
        files: One per replica of each stage, with size in bytes and checksum.
    """

    plan: dict[str, Any]
    batches: int
    bounds: list[int]
    signature: dict[str, list[Any]]
    files: list[list[Any]]

    def to_json(self) -> str:
        """Return the manifest as text, with a CRC-32 of the rest. ``parse`` accepts exactly this text."""
        body = {"format": _FORMAT, **asdict(self)}
        return json.dumps({**body, "crc32": zlib.crc32(json.dumps(body).encode())}) + "\n"

    def write(self, directory: Path) -> None:
        write_atomically(directory / NAME, self.to_json())

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        return cls.parse(read_text(directory), directory)

    @classmethod
    def parse(cls, text: str, directory: Path) -> Manifest:
        """Invert :meth:`to_json`; CheckpointError for any other text."""
        path = directory / NAME
        try:
            values = json_object("it", text)
            if type(values["format"]) is int and values["format"] != _FORMAT:
                raise CheckpointError(
                    f"{path} has format {values['format']}; this version reads {_FORMAT}: use the version that wrote it"
                )
            found = cls(**{field.name: values[field.name] for field in fields(cls)})
            if found.to_json() != text:
                raise ValueError("'crc32', its checksum, does not fit the rest")
            for (name, _, _), replica in zip(found.files, found.replicas, strict=True):
                pattern = file_name(replica, 0).replace("0" * 12 + ".", r"[0-9a-f]{12}\.")
                if not re.fullmatch(pattern, name):  # so that none is outside of the folder
                    raise ValueError(f"'files' cannot have {name!r} for stage {replica.stage}")
        except CheckpointError:
            raise
        except Exception as error:
            raise _corrupt(f"{path} is damaged: {reason(error)}") from error
        return found

    @property
    def replicas(self) -> list[StageReplica]:
        """The stage replicas that the files hold, in their order."""
        replication = self.plan["replication"] or [1] * self.plan["stages"]
        groups = range(self.plan["pipelines"] if self.plan["spread"] else 1)
        return [StageReplica(k, r, g) for g in groups for k, n in enumerate(replication) for r in range(n)]

    def pipelines_in(self, number: int) -> Sequence[int]:
        """Return the pipelines in one of the files."""
        return [self.replicas[number].group] if self.plan["spread"] else range(self.plan["pipelines"])

    def check_model(self, signature: Mapping[str, list[Any]], directory: Path) -> None:
        """Refuse a checkpoint whose tensors are not the model's."""
        for name in sorted(self.signature.keys() | signature.keys()):
            theirs, ours = self.signature.get(name), signature.get(name)
            if theirs != ours:
                raise CheckpointError(
                    f"{directory} is the checkpoint of another model: {name!r} is {_in_words(theirs)} there and "
                    f"{_in_words(ours)} here; build the model that was saved, or choose another checkpoint"
                )

    @contextmanager
    def opened(self, directory: Path, number: int) -> Iterator[IO[bytes]]:
        """Open a file; refuse one that is missing, short or altered. It stays readable if it is replaced."""
        name, size, checksum = self.files[number]
        path = directory / name
        missing = f"{path} is missing; on several hosts the folder must be on a shared file system"
        with _open_file(path, Gone(f"corrupt checkpoint: {missing}")) as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise _corrupt(f"{path} has {found} bytes instead of {size}")
            if checksum_of(file) != checksum:
                raise _corrupt(f"the content of {path} has changed")
            file.seek(0)
            yield file


def read_text(directory: Path) -> str:
    """Return the text of the manifest in a folder."""
    path = directory / NAME
    with _open_file(path, CheckpointError(f"no checkpoint in {directory}: it has no {NAME}")) as file:
        try:
            return file.read().decode()
        except UnicodeDecodeError as error:
            raise _corrupt(f"{path} is damaged: {error}") from error


def verify_checkpoint(directory: str | Path, signature: Mapping[str, list[Any]] | None = None) -> Manifest:
    """Check that a checkpoint is complete, and of the model with ``signature``; or raise CheckpointError."""
    directory = Path(directory)
    text = read_text(directory)
    while True:
        manifest = Manifest.parse(text, directory)
        if signature is not None:
            manifest.check_model(signature, directory)
        try:
            for number in range(len(manifest.files)):
                with manifest.opened(directory, number):
                    pass
            return manifest
        except Gone:
            before, text = text, read_text(directory)
            if text == before:
                raise


def file_name(of: StageReplica, token: int) -> str:
    return f"stage-{of.stage}-{of.replica}-{of.group}-{token:012x}.pt"


def _open_file(path: Path, missing: CheckpointError) -> IO[bytes]:
    try:
        return open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise missing from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _corrupt(what: str) -> CheckpointError:
    return CheckpointError(f"corrupt checkpoint: {what}; use another one")


def _in_words(entry: list[Any] | None) -> str:
    return "absent" if entry is None else f"{entry[1]} of shape {tuple(entry[0])}"


# ---- several checkpoints of a run ------------------------------------------------------------------------------------


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


# ---- checksums of files ----------------------------------------------------------------------------------------------


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
