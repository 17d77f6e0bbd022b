"""Errors of a run. Wrong arguments raise ValueError or TypeError; a failed run raises PipelineError."""

from __future__ import annotations

import importlib
import traceback
from pathlib import PurePath
from typing import Any


class PipelineError(RuntimeError):
    """A run failed. The message names the rank, pipeline, stage and action where they are known."""


class ScheduleError(PipelineError, ValueError):
    """A schedule is not executable. The message names the stage, the position and the reason."""


class StageError(PipelineError, ValueError):
    """A stage's layers or the loss function failed on their inputs."""


class PeerLost(PipelineError):
    """Another worker died, failed or closed its connection.

    Attributes:
        has_waited: Whether this one waited for it up to a time limit, as for a process that a signal has stopped.
    """

    has_waited = False


class PipelineTimeout(PipelineError, TimeoutError):
    """A wait lasted longer than the pipeline's time limit."""


class CheckpointError(PipelineError, ValueError):
    """A checkpoint is missing, damaged, or belongs to another model; or it cannot be written, or must not be."""


class LibraryNotFound(ImportError, ValueError):
    """A library that a feature needs is not installed. The message names it and how to install it."""


def library(name: str, user: str, packages: str) -> Any:
    """Import module ``name`` for ``user``; LibraryNotFound, with the way to install it, if missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = f"{user} needs {name.split('.')[0]}, which cannot be imported ({error})"
        raise LibraryNotFound(f"{missing}: pip install {packages}") from None


def check_count(name: str, value: object, least: int = 1, most: int = 2**31 - 1) -> None:
    """Raise ValueError unless ``value`` is an int of at least ``least``, and at most ``most``."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r}: must be an int of at least {least}")
    if value > most:
        raise ValueError(f"{name}={value}: must be at most {most}")


def check_name(what: str, value: object, valid: tuple[str, ...]) -> None:
    """Raise ValueError, with the nearest valid name, unless ``value`` is one of them."""
    if value not in valid:
        raise ValueError(f"unknown {what} {value!r}: {nearest(str(value), valid)}")


def nearest(name: str, valid: list[str] | tuple[str, ...]) -> str:
    """Return the end of an error message about an unknown name: the nearest valid one, and all of them."""
    import difflib

    if not valid:
        return "there is none"
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}valid names: {', '.join(valid)}"


def text_of(error: BaseException) -> str:
    """Return an error's text as every file can hold it; "" where the error itself fails to make one."""
    try:
        return str(error).encode(errors="backslashreplace").decode()
    except Exception:
        return ""


def reason(error: BaseException) -> str:
    """Return the first line of an error's text that is not empty, or else its type and origin."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" in {frame.name}, {PurePath(frame.filename).name}:{frame.lineno}" for frame in last)
    lines = filter(None, map(str.strip, text_of(error).splitlines()))
    return next(lines, f"{type(error).__name__}{where}")
