"""The manifest of a checkpoint: what is in which file. A folder is the checkpoint that its manifest names, no more.

Files are written under new names first; replacing the manifest, one atomic step, is what makes them the checkpoint.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from avgpipe.errors import CheckpointError
from avgpipe.files import write_atomically

_NAME = "manifest.json"
_FORMAT = 1
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Manifest:
    """batches: begun so far. bounds: see ``Model``. signature: shape and dtype by tensor name. files: one per
    replica of each stage, with size in bytes and CRC-32.
    """

    plan: dict[str, Any]
    batches: int
    bounds: list[int]
    signature: dict[str, list[Any]]
    files: list[tuple[str, int, int]]

    def write(self, directory: Path) -> None:
        write_atomically(directory / _NAME, json.dumps({"format": _FORMAT, **asdict(self)}) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        path = directory / _NAME
        if not path.is_file():
            raise CheckpointError(f"no checkpoint in {directory}: it has no {_NAME}")
        try:
            values = json.loads(path.read_text())
            version = values.pop("format")
            if version != _FORMAT:
                raise CheckpointError(
                    f"{path} has format {version!r}; this version reads {_FORMAT}: use the version that wrote it"
                )
            files = [(str(n), int(s), int(c)) for n, s, c in values.pop("files")]
            return cls(**values, files=files)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"corrupt checkpoint: {path} is damaged ({error}); use another one"
            ) from error

    def check_model(self, signature: Mapping[str, list[Any]], directory: Path) -> None:
        """Refuse a checkpoint whose tensors are not the model's."""
        for name in sorted(self.signature.keys() | signature.keys()):
            theirs, ours = self.signature.get(name), signature.get(name)
            if theirs != ours:
                raise CheckpointError(
                    f"{directory} is the checkpoint of another model: {name!r} is {_spell(theirs)} there and "
                    f"{_spell(ours)} here; build the model that was saved, or choose another checkpoint"
                )

    def check_file(self, directory: Path, number: int, *, content: bool) -> Path:
        """One of the files, refused if it is missing, short, or (``content``) altered."""
        name, size, crc = self.files[number]
        path = directory / name
        if not path.is_file():
            raise CheckpointError(
                f"corrupt checkpoint: {path} is missing; on several hosts the folder must be on a shared file system"
            )
        found = path.stat().st_size
        if found != size:
            raise CheckpointError(
                f"corrupt checkpoint: {path} has {found} bytes instead of {size}; use another one"
            )
        if content and crc_of(path) != crc:
            raise CheckpointError(f"corrupt checkpoint: the content of {path} has changed; use another one")
        return path


def verify_checkpoint(directory: str | Path, signature: Mapping[str, list[Any]] | None = None) -> Manifest:
    """Check that a checkpoint is whole, and of the model with ``signature``; ``CheckpointError`` says what is wrong."""
    directory = Path(directory)
    manifest = Manifest.read(directory)
    if signature is not None:
        manifest.check_model(signature, directory)
    for number in range(len(manifest.files)):
        manifest.check_file(directory, number, content=True)
    return manifest


def crc_of(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def _spell(entry: list[Any] | None) -> str:
    return "absent" if entry is None else f"{entry[1]} of shape {tuple(entry[0])}"
