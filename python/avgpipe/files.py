"""Files that are either written completely or not at all, and the one reader of text from outside.

Text that a person, another program or a damaged disk may have written is read here alone: as JSON, as TOML, or as it
stands. Its size, depth and numbers are limited, and whatever is wrong with it is a ValueError that names the place.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import IO, Any

from avgpipe.errors import nearest

MOST_BYTES = 64 * 2**20  # of a file that a person may write
MOST_BYTES_OF_A_TRACE = 2**30
_DEEPEST = 64  # lists and objects within each other; functions that call themselves for each reach Python's limit later
_LARGEST = 2**63  # whole numbers, as other programs read them
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_LONGEST = 600  # characters of a message
# Errors of a value, whatever it is read by: of its text or type, too large a number, too deep, too much.
_WRONG = ValueError, TypeError, ArithmeticError, RecursionError, MemoryError


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


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder, and those above it; one that exists stays. OSError says what is in its place."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        found = Path(error.filename)
        what = "is a file: name a folder"
        if found.is_symlink():
            what = (
                f"is a link to {os.readlink(found)}, where nothing is: make that folder, or remove the link"
            )
        raise NotADirectoryError(errno.ENOTDIR, what, str(found)) from None


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


# ---- text from outside -----------------------------------------------------------------------------------------------


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file for reading bytes, without ever waiting.

    Raises:
        ValueError: It is a pipe, a socket or a device, which may have no end or never answer.
        OSError: It cannot be opened, or is a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise ValueError("this is a pipe or a device, not a file: write its content to a file, and name that")


def read_text(path: str | os.PathLike[str], most_bytes: float = MOST_BYTES, errors: str = "strict") -> str:
    """Return the text of a file, UTF-8 with or without a byte-order mark; ValueError, or OSError as by ``open``.

    ``errors``: as of ``bytes.decode``.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most_bytes:
            raise ValueError(
                f"the file has {size} bytes, and at most {most_bytes} are read: name another file"
            )
        data = file.read()
    try:
        return data.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the file is no UTF-8 text, {error.reason} at byte {error.start}: save it as UTF-8"
        ) from None


@contextmanager
def reading(path: str | os.PathLike[str], most_bytes: float = MOST_BYTES) -> Iterator[str]:
    """Yield the text of a file; whatever is wrong with it, also inside, becomes a ValueError with its name."""
    try:
        yield read_text(path, most_bytes)
    except _WRONG as error:
        raise ValueError(f"{os.fspath(path)}: {in_short(error)}") from error


def in_short(error: BaseException) -> str:
    """Return an error's text, or its type where it has none; of a text with a file's whole content the beginning."""
    text = str(error) or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def parse_json(what: str, text: str, finite: bool = True) -> Any:
    """Return the value of a text of JSON; ValueError, with ``what`` it is of, for any other text.

    ``finite``: refuse infinities, NaN and whole numbers of more than 63 bits.
    """

    def parse() -> Any:
        value = json.loads(text)
        if _HALF.search(text):  # of a character, of which the other half may be missing: no text holds that
            json.dumps(value, ensure_ascii=False).encode()
        return value

    return _parsed(what, "JSON", parse, finite)


def parse_toml(what: str, text: str) -> dict[str, Any]:
    """Return the tables of a text of TOML, of any numbers; ValueError, with ``what`` it is of, for any other text."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # the same, for Python 3.10

    tables: dict[str, Any] = _parsed(what, "TOML", lambda: tomllib.loads(text), False)
    return tables


def _parsed(what: str, form: str, parse: Callable[[], Any], finite: bool) -> Any:
    try:
        value = parse()
    except RecursionError:
        raise ValueError(
            f"{what} is nested too deeply: at most {_DEEPEST} lists or objects in each other"
        ) from None
    except UnicodeEncodeError:
        raise ValueError(
            f"{what} has one half of a character, such as \\ud800: write characters whole"
        ) from None
    except MemoryError:
        raise ValueError(f"{what} needs more memory than there is: shorten it") from None
    except ValueError as error:
        # a number of thousands of digits is no syntax error, and the way out that Python names is not the user's
        place = "a number has thousands of digits" if "digits" in str(error) else str(error)
        raise ValueError(f"{what} must be {form}: {place}") from error
    _check_values(what, value, finite)
    return value


def _check_values(what: str, value: Any, finite: bool) -> None:
    """Refuse what is nested too deeply, and if ``finite`` numbers beyond the limits. Many values: no call for each."""
    level: list[Any] = [[value]]
    for _ in range(_DEEPEST + 1):
        inner: list[Any] = []
        for whole in level:
            for part in whole.values() if isinstance(whole, dict) else whole:
                kind = type(part)
                if kind is dict or kind is list:
                    inner.append(part)
                elif finite and (
                    (kind is float and not math.isfinite(part))
                    or (kind is int and not -_LARGEST <= part < _LARGEST)
                ):
                    name = (
                        next((key for key, v in whole.items() if v is part), "")
                        if isinstance(whole, dict)
                        else ""
                    )
                    place = f"{what}, {name}" if name else what
                    raise ValueError(
                        f"{place}: must be a finite number of less than 64 bits, not {part!s:.30}"
                    )
        if not inner:
            return
        level = inner
    raise ValueError(f"{what} is nested too deeply: at most {_DEEPEST} lists or objects in each other")


def json_object(what: str, text: str, finite: bool = True) -> dict[str, Any]:
    """Read a JSON object as :func:`parse_json` does; ValueError for anything else."""
    values = parse_json(what, text, finite)
    if not isinstance(values, dict):
        raise ValueError(f"{what} must be a JSON object, not {type(values).__name__}")
    return values


def read_json(path: str | os.PathLike[str], what: str = "the file", finite: bool = True) -> Any:
    """Return the value in a file of JSON; ValueError with its name for anything else, OSError as by ``open``."""
    with reading(path, MOST_BYTES_OF_A_TRACE) as text:
        return parse_json(what, text, finite)


def read_lines(path: str | os.PathLike[str]) -> list[Any]:
    """Return the values in a file with a line of JSON for each; blank lines are skipped."""
    with reading(path, math.inf) as text:
        lines = enumerate(text.splitlines(), start=1)
        return [parse_json(f"line {n}", line, finite=False) for n, line in lines if line.strip()]


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
