"""The manifest of a checkpoint: what is in which file. A folder is the checkpoint that its manifest names, no more.

Files are written under new names first; replacing the manifest, one atomic step, is what makes them the checkpoint. A
manifest is believed field by field: it may have been damaged, or made by somebody else.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import torch

from avgpipe.errors import CheckpointError
from avgpipe.files import write_atomically
from avgpipe.plan import Plan
from avgpipe.runtime.placement import StageReplica

NAME = "manifest.json"
_FORMAT = 2
_CHUNK = 1 << 20
_LATER_OPTIONS = {"placement"}  # of a plan, which checkpoints of this format may lack
_TRIES = 20  # of opening the files of a checkpoint that is replaced again and again meanwhile


class Gone(CheckpointError):
    """A file of a checkpoint is missing. If the manifest is another one by now, it was replaced, else it is lost."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        plan: The options of the plan that wrote it.
        batches: Begun so far.
        bounds: See :class:`avgpipe.runtime.model.Model`.
        signature: Shape and dtype by tensor name.
        files: One per replica of each stage, with size in bytes and CRC-32.
    """

    plan: dict[str, Any]
    batches: int
    bounds: list[int]
    signature: dict[str, list[Any]]
    files: list[list[Any]]

    def to_json(self) -> str:
        """Write it down, with a CRC-32 of the rest. ``parse`` takes exactly this text, to the last blank."""
        body = {"format": _FORMAT, **asdict(self)}
        return json.dumps({**body, "crc32": zlib.crc32(json.dumps(body).encode())}) + "\n"

    def write(self, directory: Path) -> None:
        write_atomically(directory / NAME, self.to_json())

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        return cls.parse(read_text(directory), directory)

    @classmethod
    def parse(cls, text: str, directory: Path) -> Manifest:
        """Invert :meth:`to_json`; CheckpointError names the field that is wrong."""
        path = directory / NAME
        try:
            values = json.loads(text)
            version = values.get("format") if isinstance(values, dict) else None
            if type(version) is int and version != _FORMAT:
                raise CheckpointError(
                    f"{path} has format {version}; this version reads {_FORMAT}: use the version that wrote it"
                )
            names = {field.name for field in fields(cls)}
            _expect_keys("manifest", values, {"format", *names, "crc32"})
            _expect("format", version, type(version) is int, f"{_FORMAT}")
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
        return [
            StageReplica(k, r, g) for g in groups for k, count in enumerate(replication) for r in range(count)
        ]

    def pipelines_in(self, number: int) -> Sequence[int]:
        """Return the pipelines that one of the files has."""
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
        """Open a file; refused if it is missing, short or altered. Open, it stays readable if it is replaced."""
        name, size, crc = self.files[number]
        path = directory / str(name)
        missing = f"{path} is missing; on several hosts the folder must be on a shared file system"
        file = _open_file(path, Gone(f"corrupt checkpoint: {missing}"))
        try:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise _corrupt(f"{path} has {found} bytes instead of {size}")
            if _crc(file) != crc:
                raise _corrupt(f"the content of {path} has changed")
            file.seek(0)
        except BaseException:
            file.close()
            raise
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
    """Check that a checkpoint is whole, and of the model with ``signature``; ``CheckpointError`` says what is wrong."""
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


def crc_of(path: Path) -> int:
    with path.open("rb") as file:
        return _crc(file)


def _crc(file: IO[bytes]) -> int:
    crc = 0
    while chunk := file.read(_CHUNK):
        crc = zlib.crc32(chunk, crc)
    return crc


def _open_file(path: Path, missing: CheckpointError) -> IO[bytes]:
    """Open, and refuse what is no file: a pipe would keep the reader for ever, a device has no end."""
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


# ---- fields, which may have any value ----------------------------------------------------------------------------


def _check_fields(found: Manifest) -> None:
    """Raise ValueError for the first field that no save has written."""
    plan, bounds, files = found.plan, found.bounds, found.files
    _expect_keys("plan", plan, {field.name for field in fields(Plan)}, _LATER_OPTIONS)
    for name in ("stages", "pipelines", "micro_batches"):
        _expect(f"plan: {name}", plan[name], _is_count(plan[name], 1), "a number of at least 1")
    _expect("plan: spread", plan["spread"], isinstance(plan["spread"], bool), "true or false")
    stages, replication = plan["stages"], plan["replication"]
    fits = replication is None or (_are_counts(replication, 1) and len(replication) == stages)
    _expect("plan: replication", replication, fits, "a number of replicas for each stage")
    _expect("batches", found.batches, _is_count(found.batches), "a number of batches")
    rising = _are_counts(bounds) and all(a < b for a, b in pairwise(bounds))
    fits = rising and len(bounds) == stages + 1 and bounds[0] == 0
    _expect("bounds", bounds, fits, f"the rising layer numbers of {stages} stages")
    _expect("signature", found.signature, isinstance(found.signature, dict), "an object")
    for name, entry in found.signature.items():
        _expect(f"signature of {name}", entry, _is_shape_and_dtype(entry), "a shape and a dtype")
    count = sum(replication or [stages]) * (plan["pipelines"] if plan["spread"] else 1)
    fits = isinstance(files, list) and len(files) == count
    _expect("files", files, fits, f"a list of {count}, as the plan's stages and replicas are")
    for entry, replica in zip(files, found.replicas):
        what = "the name of its file, its size and its CRC-32"
        _expect(f"file of {'-'.join(map(str, replica))}", entry, _is_file_of(entry, replica), what)


def _expect(name: str, value: Any, fits: bool, what: str) -> None:
    if not fits:
        text = repr(value)
        raise ValueError(f"{name!r} is {text if len(text) <= 80 else f'{text[:80]}...'}, not {what}")


def _expect_keys(name: str, value: Any, keys: Set[str], optional: Set[str] = frozenset()) -> None:
    _expect(name, value, isinstance(value, dict), "an object")
    for key in sorted((keys ^ value.keys()) - optional):
        raise ValueError(f"{name!r} has {'no' if key in keys else 'an unknown'} {key!r}")


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 63


def _are_counts(values: Any, least: int = 0) -> bool:
    return isinstance(values, list) and all(_is_count(value, least) for value in values)


def _is_shape_and_dtype(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], str):
        return False
    is_dtype = isinstance(getattr(torch, entry[1].removeprefix("torch."), None), torch.dtype)
    return _are_counts(entry[0]) and is_dtype


def _is_file_of(entry: Any, of: StageReplica) -> bool:
    """Whether this is a name that :func:`file_name` gives, so that none leads out of the folder, with two numbers."""
    if not isinstance(entry, list) or len(entry) != 3 or not isinstance(entry[0], str):
        return False
    pattern = rf"stage-{of.stage}-{of.replica}-{of.group}-[0-9a-f]{{12}}\.pt"
    return re.fullmatch(pattern, entry[0]) is not None and _are_counts(entry[1:])


def _in_words(entry: list[Any] | None) -> str:
    return "absent" if entry is None else f"{entry[1]} of shape {tuple(entry[0])}"
