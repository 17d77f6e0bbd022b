"""Files that are either written completely or not at all, and values read from them."""

from __future__ import annotations

import errno
import json
import math
import os
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from avgpipe.errors import nearest


def write_atomically(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write ``data`` (text as UTF-8) to ``path`` so that readers find the old or the new content whole.

    The data goes to a hidden temporary file in the same folder, is synced to disk, and then replaces
    ``path`` in one step; a symbolic link stays one and its target is replaced. Several processes may write
    the same path: the last one wins. Raises OSError, and leaves no temporary file, if the folder is
    missing or cannot be written.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder, make it first", str(target.parent))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder, give the path of a file", str(target))
    # Not tempfile: its files are private to the owner; this one must get the mode that any new file gets.
    temporary = target.parent / f".{target.name[:100]}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # some network file systems refuse to sync a folder; the content is safe all the same
    with suppress(OSError):
        descriptor = os.open(target.parent, os.O_RDONLY)  # so that the new name survives a power cut too
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def strict_json(value: Any, indent: int | None = None) -> str:
    """Return JSON that every parser reads: infinities and NaN become null."""
    return json.dumps(finite(value), allow_nan=False, indent=indent)


def finite(value: Any) -> Any:
    """Return a value of lists, dicts and numbers with None in place of infinities and NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


# ---- values in files -------------------------------------------------------------------------------------------------


def json_object(what: str, text: str) -> dict[str, Any]:
    """Read a JSON object; ValueError for anything else."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} must be JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{what} must be a JSON object, not {type(values).__name__}")
    return values


def check_keys(where: str, values: dict[str, Any], known: Sequence[str], needed: Iterable[str] = ()) -> None:
    """Raise ValueError for an unknown key, and for a needed key that is missing."""
    for key in values:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}: {nearest(key, tuple(known))}")
    for key in needed:
        if key not in values:
            raise ValueError(f"{where}: {key} is missing")


def dataclass_of(where: str, kind: Any, values: Any) -> Any:
    """Make a dataclass from its object in a file; ValueError names what is wrong in it."""
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a JSON object, not {type(values).__name__}")
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    check_keys(where, values, [field.name for field in fields(kind)], needed)
    try:
        return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error
