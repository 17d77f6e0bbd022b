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
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        plan: the options of the plan that wrote it.
        batches: begun so far.
        bounds: see :class:`avgpipe.runtime.model.Model`.
        signature: shape and dtype by tensor name.
        files: one per replica of each stage, with size in bytes and CRC-32.
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
        check = _FieldChecks(directory / NAME)
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise check.damaged(str(error)) from error
        if not isinstance(values, dict):
            raise check.damaged(f"it holds {_short(values)}")
        version = values.get("format")
        if type(version) is int and version != _FORMAT:
            raise CheckpointError(
                f"{check.path} has format {version}; this version reads {_FORMAT}: use the version that wrote it"
            )
        expected = {"format", *(field.name for field in fields(cls)), "crc32"}
        for name in sorted(expected ^ values.keys()):
            raise check.damaged(f"{name!r} is {'missing' if name in expected else 'unknown'}")
        found = cls(**{field.name: values[field.name] for field in fields(cls)})
        check.all_of(found)
        if found.to_json() != text:
            raise check.damaged("'crc32', its checksum, does not fit the rest")
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
        try:
            file = _open_file(path)
        except FileNotFoundError:
            raise Gone(
                f"corrupt checkpoint: {path} is missing; on several hosts the folder must be on a shared file system"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        try:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise CheckpointError(
                    f"corrupt checkpoint: {path} has {found} bytes instead of {size}; use another one"
                )
            if _crc(file) != crc:
                raise CheckpointError(
                    f"corrupt checkpoint: the content of {path} has changed; use another one"
                )
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file


class Gone(CheckpointError):
    """A file of the manifest is not there: if the manifest is another one by now, it was replaced, else it is lost."""


def read_text(directory: Path) -> str:
    path = directory / NAME
    try:
        with _open_file(path) as file:
            return file.read().decode()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"no checkpoint in {directory}: it has no {NAME}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _FieldChecks(path).damaged(str(error)) from error


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


class _FieldChecks:
    """Checks the fields of the manifest at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"corrupt checkpoint: {self.path} is damaged: {what}; use another one")

    def all_of(self, manifest: Manifest) -> None:
        self._plan(manifest.plan)
        self._is("batches", manifest.batches, _is_count(manifest.batches), "a number of batches")
        bounds = manifest.bounds
        rising = (
            isinstance(bounds, list)
            and all(map(_is_count, bounds))
            and all(a < b for a, b in pairwise(bounds))
        )
        fits = rising and len(bounds) == manifest.plan["stages"] + 1 and bounds[0] == 0
        self._is("bounds", bounds, fits, f"the rising layer numbers of {manifest.plan['stages']} stages")
        self._is("signature", manifest.signature, isinstance(manifest.signature, dict), "an object")
        for name, entry in manifest.signature.items():
            self._is(f"signature of {name}", entry, _is_shape_and_dtype(entry), "a shape and a dtype")
        self._files(manifest)

    def _plan(self, plan: Any) -> None:
        self._is("plan", plan, isinstance(plan, dict), "an object")
        names = {field.name for field in fields(Plan)}
        for name in sorted((names ^ plan.keys()) - _LATER_OPTIONS):
            raise self.damaged(f"'plan' has {'no' if name in names else 'an unknown'} {name!r}")
        for name in ("stages", "pipelines", "micro_batches"):
            self._is(
                f"plan: {name}",
                plan[name],
                _is_count(plan[name]) and plan[name] > 0,
                "a number of at least 1",
            )
        self._is("plan: spread", plan["spread"], isinstance(plan["spread"], bool), "true or false")
        replication = plan["replication"]
        of_each = isinstance(replication, list) and len(replication) == plan["stages"]
        fits = replication is None or (of_each and all(_is_count(r) and r > 0 for r in replication))
        self._is("plan: replication", replication, fits, "a number of replicas for each stage")

    def _files(self, manifest: Manifest) -> None:
        files, plan = manifest.files, manifest.plan
        self._is("files", files, isinstance(files, list), "a list")
        count = sum(plan["replication"] or [plan["stages"]]) * (plan["pipelines"] if plan["spread"] else 1)
        self._is(
            "files", files, len(files) == count, f"{count} of them, as the plan's stages and replicas are"
        )
        for entry, replica in zip(files, manifest.replicas):
            fits = isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], str)
            fits = fits and is_file_of(entry[0], replica) and all(map(_is_count, entry[1:]))
            self._is(
                f"file of {'-'.join(map(str, replica))}",
                entry,
                fits,
                "the name of its file, its size and its CRC-32",
            )

    def _is(self, name: str, value: Any, fits: bool, what: str) -> None:
        if not fits:
            raise self.damaged(f"{name!r} is {_short(value)}, not {what}")


def file_name(of: StageReplica, token: int) -> str:
    return f"stage-{of.stage}-{of.replica}-{of.group}-{token:012x}.pt"


def is_file_of(name: str, of: StageReplica) -> bool:
    """Whether this is a name that :func:`file_name` gives, so that none leads out of the folder."""
    return re.fullmatch(rf"stage-{of.stage}-{of.replica}-{of.group}-[0-9a-f]{{12}}\.pt", name) is not None


def crc_of(path: Path) -> int:
    with path.open("rb") as file:
        return _crc(file)


def _open_file(path: Path) -> IO[bytes]:
    """Open, and refuse what is no file: a pipe would keep the reader for ever, a device has no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"corrupt checkpoint: {path} is no ordinary file; use another one")
    return os.fdopen(descriptor, "rb")


def _crc(file: IO[bytes]) -> int:
    crc = 0
    while chunk := file.read(_CHUNK):
        crc = zlib.crc32(chunk, crc)
    return crc


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_shape_and_dtype(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], str):
        return False
    shape, dtype = entry
    is_dtype = isinstance(getattr(torch, dtype.removeprefix("torch."), None), torch.dtype)
    return isinstance(shape, list) and all(map(_is_count, shape)) and is_dtype


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _in_words(entry: list[Any] | None) -> str:
    return "absent" if entry is None else f"{entry[1]} of shape {tuple(entry[0])}"
