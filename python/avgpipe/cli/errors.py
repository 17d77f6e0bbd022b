"""Exit codes: 0 success, 1 a failed run, 2 wrong arguments; every failure is one line on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import typer

from avgpipe.errors import PipelineError
from avgpipe.ranks.process import FAILED as FAILED
from avgpipe.ranks.process import WRONG_ARGUMENTS as WRONG_ARGUMENTS


class CommandFailed(Exception):
    """Ends a command with ``exit_code``; the message is what the user reads."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code


def arguments() -> AbstractContextManager[None]:
    """While arguments are checked: what is refused ends the command with 2, before anything was written."""
    # CheckpointError and StageError are ValueErrors; a worker may have died already, or the package is not built.
    wrong = (ValueError, TypeError, OSError)
    return _ending(
        dict.fromkeys(wrong, WRONG_ARGUMENTS) | dict.fromkeys((PipelineError, ImportError), FAILED)
    )


def running() -> AbstractContextManager[None]:
    """While a run goes on: its failure ends the command with 1."""
    return _ending(dict.fromkeys((PipelineError, OSError), FAILED))


@contextmanager
def _ending(codes: dict[type[Exception], int]) -> Iterator[None]:
    """End the command with the code of the first kind that an error is of."""
    try:
        yield
    except tuple(codes) as error:
        code = next(code for kind, code in codes.items() if isinstance(error, kind))
        message = str(error)
        if isinstance(error, OSError) and error.strerror and error.filename:
            message = f"{error.filename}: {error.strerror}"
        raise CommandFailed(message, code) from error


@contextmanager
def reporting(json_output: bool) -> Iterator[None]:
    """Around a command: say what failed and exit. With ``--json`` standard output gets an object all the same."""
    try:
        yield
    except CommandFailed as failure:
        say(str(failure))
        if json_output:
            print(json.dumps({"error": str(failure), "exit_code": failure.exit_code}))
        raise typer.Exit(failure.exit_code) from failure


def say(message: str) -> None:
    print(f"avgpipe: error: {message}", file=sys.stderr, flush=True)
