"""Print the output of commands, and end them.

Results are on standard output, as tables and JSON. Progress goes to standard error, and so does every
failure, in one line. Exit codes: 0 success, 1 a failed run, 2 wrong arguments.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from avgpipe.errors import PipelineError
from avgpipe.ranks.process import FAILED as FAILED
from avgpipe.ranks.process import WRONG_ARGUMENTS as WRONG_ARGUMENTS
from avgpipe.ranks.process import end_without_reader, has_reader

_FILE_COLUMNS = 160  # width of tables that are not printed on a terminal


def answer(as_json: bool, found: Mapping[str, Any], *items: RenderableType) -> None:
    """Print the result of a command: one JSON object, or texts and tables."""
    if as_json:
        print(json.dumps(found))
    else:
        show(*items)


def show(*items: RenderableType) -> None:
    """Print texts and tables."""
    screen = _Screen(highlight=False, markup=False)
    if not screen.is_terminal:
        screen.width = _FILE_COLUMNS
    for item in items:
        screen.print(item, soft_wrap=isinstance(item, str))  # the terminal wraps texts


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        end_without_reader()


def grid(rows: Sequence[Mapping[str, str]], texts: int = 1, styles: Sequence[str] = ()) -> Table:
    """Make a table of rows of cells with headings: columns of text, then of numbers, which never wrap.

    A cell that a row lacks shows "-", and a column that all rows lack is left out.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    for place, heading in enumerate(headings):
        number = place >= texts
        made.add_column(heading, justify="right" if number else "left", no_wrap=number)
    for row, style in zip_longest(rows, styles):
        made.add_row(*(row.get(heading, "-") for heading in headings), style=style)
    return made


def show_status(line: str) -> None:
    """Show a line on a terminal, which the next one replaces.

    No spinner: its thread would take processor time from the measurement.
    """
    if sys.stderr.isatty():
        width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
        print(f"\r\x1b[K{line[:width]}", end="", file=sys.stderr, flush=True)


def check_file(out: str) -> None:
    """Refuse an ``--out`` that cannot be written, before anything is measured."""
    folder = Path(out).absolute().parent
    if Path(out).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--out {out}: cannot be written, name a file in a folder that you may write to")


# ---- how commands end ------------------------------------------------------------------------------------------------


class CommandFailed(Exception):
    """Ends a command with ``exit_code``; the message is printed for the user."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code


_TOO_LARGE: dict[type[Exception], str] = {
    MemoryError: "this needs more memory than there is",
    RecursionError: "something is nested too deeply",
    OverflowError: "a number is too large",
}


def arguments() -> AbstractContextManager[None]:
    """Check arguments in this context: a refusal ends the command with 2, before anything was written."""
    # CheckpointError and StageError are ValueErrors; a worker may already have failed, or the package is not
    # built. The last three are of numbers that no check has found too large.
    wrong: tuple[type[Exception], ...] = (ValueError, TypeError, OSError, *_TOO_LARGE)
    return _ending(
        dict.fromkeys(wrong, WRONG_ARGUMENTS) | dict.fromkeys((PipelineError, ImportError), FAILED)
    )


def running() -> AbstractContextManager[None]:
    """Run in this context: a failure ends the command with 1."""
    return _ending(dict.fromkeys((PipelineError, OSError), FAILED))


@contextmanager
def _ending(codes: dict[type[Exception], int]) -> Iterator[None]:
    """End the command with the code of the first class that the error is an instance of."""
    try:
        yield
    except tuple(codes) as error:
        if isinstance(error, BrokenPipeError) and not has_reader():
            raise
        code = next(code for kind, code in codes.items() if isinstance(error, kind))
        message = str(error) or _TOO_LARGE.get(type(error), "")
        if isinstance(error, OSError) and error.strerror and error.filename:
            message = f"{error.filename}: {error.strerror}"
        raise CommandFailed(message, code) from error


@contextmanager
def reporting(json_output: bool) -> Iterator[None]:
    """Run a command: print its failure and exit. With ``--json`` standard output gets an object, too.

    If the reader of standard output has ended, as in ``| head -1``, the command ends quietly.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # of a socket: an error like others
        if has_reader():
            raise
        end_without_reader()
    except CommandFailed as failure:
        say(str(failure))
        if json_output:
            print(json.dumps({"error": str(failure), "exit_code": failure.exit_code}))
        raise typer.Exit(failure.exit_code) from failure


def say(message: str) -> None:
    note(f"error: {message}")


def note(message: str) -> None:
    """Print a line, for which no reader may be left: that is no reason to end a run."""
    with suppress(OSError):
        print(f"avgpipe: {message}", file=sys.stderr, flush=True)
