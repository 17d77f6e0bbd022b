"""The manifest of a checkpoint: the content of each file. A checkpoint is the files that its manifest names.

Files are written under new names first; replacing the manifest, one atomic step, makes them the checkpoint. A
manifest is validated field by field: it may be damaged, or from an untrusted source.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import shutil
import stat
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import IO, Any, TypeVar

import numpy as np
import torch

from avgpipe.errors import CheckpointError
from avgpipe.files import write_atomically
from avgpipe.plan import Plan
from avgpipe.runtime.placement import StageReplica

NAME = "manifest.json"
_FORMAT = 3
_LATER_OPTIONS = {"placement", "batch", "correction"}  # of a plan, optional in checkpoints of this format
_TRIES = 20  # to open the files of a checkpoint that is replaced repeatedly meanwhile


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
        """Invert :meth:`to_json`; CheckpointError names the wrong field."""
        path = directory / NAME
        try:
            values = json.loads(text)
            version = values.get("format") if isinstance(values, dict) else None
            if type(version) is int and version != _FORMAT:
                raise CheckpointError(
                    f"{path} has format {version}; this version reads {_FORMAT}: use the version that wrote it"
                )
            names = {field.name for field in fields(cls)}
            expect("manifest", values, {"format": is_count, **dict.fromkeys(names, object), "crc32": object})
            found = cls(**{name: values[name] for name in names})
            _check_fields(found)
            if found.to_json() != text:
                raise ValueError("'crc32', its checksum, does not fit the rest")
        except CheckpointError:
            raise
        except (ValueError, RecursionError) as error:
            raise _corrupt(f"{path} is damaged: {error}") from error
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

    def open(self, directory: Path, number: int) -> IO[bytes]:
        """Open a file; refuse one that is missing, short or altered. It stays readable if it is replaced."""
        name, size, checksum = self.files[number]
        path = directory / str(name)
        missing = f"{path} is missing; on several hosts the folder must be on a shared file system"
        with ExitStack() as failing:
            file = failing.enter_context(_open_file(path, Gone(f"corrupt checkpoint: {missing}")))
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise _corrupt(f"{path} has {found} bytes instead of {size}")
            if checksum_of(file) != checksum:
                raise _corrupt(f"the content of {path} has changed")
            file.seek(0)
            failing.pop_all()
        return file


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
    for _ in range(_TRIES):
        manifest = Manifest.parse(text, directory)
        if signature is not None:
            manifest.check_model(signature, directory)
        try:
            for number in range(len(manifest.files)):
                manifest.open(directory, number).close()
            return manifest
        except Gone:
            before, text = text, read_text(directory)
            if text == before:
                raise
    raise CheckpointError(f"{directory} is replaced faster than it can be read")


def file_name(of: StageReplica, token: int) -> str:
    return f"stage-{of.stage}-{of.replica}-{of.group}-{token:012x}.pt"


def _open_file(path: Path, missing: CheckpointError) -> IO[bytes]:
    """Open a file, and refuse others: a pipe would block the reader for ever, a device has no end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise missing from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _corrupt(f"{path} is no ordinary file")
    return os.fdopen(descriptor, "rb")


def _corrupt(what: str) -> CheckpointError:
    return CheckpointError(f"corrupt checkpoint: {what}; use another one")


# ---- values from files, which may be anything --------------------------------------------------------------------


def expect(name: str, value: Any, pattern: Any) -> None:
    """Raise ValueError with the name of a value that no save has written.

    ``pattern``: an object's patterns by key, a list's in order, a type, or a function that tests a value.
    """
    kind = type(pattern) if isinstance(pattern, dict | list) else pattern
    if not (isinstance(value, kind) if isinstance(kind, type | UnionType) else kind(value)):
        raise ValueError(f"{name!r} cannot be {reprlib.repr(value)}")
    if isinstance(pattern, list):
        value, pattern = dict(enumerate(value)), dict(enumerate(pattern))
    if isinstance(pattern, dict):
        for key in sorted(pattern.keys() ^ value.keys(), key=str):
            raise ValueError(f"{name!r} has {'no' if key in pattern else 'an unknown'} {key!r}")
        for key, part in pattern.items():
            expect(f"{name}.{key}", value[key], part)


def _check_fields(found: Manifest) -> None:
    """Raise ValueError for the first field that no save has written."""
    plan, bounds = found.plan, found.bounds
    expect("plan", plan, dict)
    options = {field.name for field in fields(Plan)} - (_LATER_OPTIONS - plan.keys())
    counts = dict.fromkeys(("stages", "pipelines", "micro_batches"), _is_positive)
    expect("plan", plan, {**dict.fromkeys(options, object), **counts, "spread": bool})
    expect("batches", found.batches, is_count)
    expect("bounds", bounds, _are_counts)
    stages, replication = plan["stages"], plan["replication"]
    if len(bounds) != stages + 1 or bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(f"'bounds' are {reprlib.repr(bounds)}, not the rising numbers of {stages} stages")
    if replication is not None:
        expect("plan.replication", replication, [_is_positive] * stages)
    expect("signature", found.signature, dict)
    expect("signature", found.signature, {name: [_are_counts, _is_dtype] for name in found.signature})
    count = sum(replication or [stages]) * (plan["pipelines"] if plan["spread"] else 1)
    expect("files", found.files, list)
    if len(found.files) != count:
        raise ValueError(f"'files' are {len(found.files)}, not {count} as the plan's stages and replicas")
    expect("files", found.files, [[str, is_count, is_count]] * count)
    for (name, *_), replica in zip(found.files, found.replicas):
        pattern = file_name(replica, 0).replace("0" * 12 + ".", r"[0-9a-f]{12}\.")
        if not re.fullmatch(pattern, name):  # so that none is outside of the folder
            raise ValueError(f"'files' cannot have {name!r} for stage {replica.stage}")


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_positive(value: Any) -> bool:
    return is_count(value) and value > 0


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_count, values))


def _is_dtype(value: Any) -> bool:
    name = str(value).removeprefix("torch.")
    return isinstance(value, str) and isinstance(getattr(torch, name, None), torch.dtype)


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


def checksum_of(file: IO[bytes]) -> int:
    """Read an open file to its end, and return its checksum: the CRC-32 of the sums of each 4 KiB, as 64-bit numbers.

    Any flipped bit changes it. A CRC-32 of the bytes would take as long as to write them. The end counts as if
    zeros followed.
    """
    found, block = 0, np.zeros(_BLOCK, "u1")
    while count := file.readinto(block):  # type: ignore[attr-defined]
        block[count:] = 0
        parts = block[: -(-count // _PART) * _PART].view("<u8").reshape(-1, _PART // 8)
        found = zlib.crc32(parts.sum(axis=1, dtype="<u8"), found)
    return found
