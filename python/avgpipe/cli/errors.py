"""Exit codes: 0 success, 1 a failed run, 2 wrong arguments; every failure is one line on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from avgpipe.errors import PipelineError
from avgpipe.ranks.process import FAILED as FAILED
from avgpipe.ranks.process import WRONG_ARGUMENTS as WRONG_ARGUMENTS


class CommandFailed(Exception):
    """Ends a command with ``exit_code``; the message is what the user reads."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code


@contextmanager
def arguments() -> Iterator[None]:
    """While arguments are checked: what is refused ends the command with 2, before anything was written."""
    try:
        yield
    except (ValueError, TypeError) as error:  # CheckpointError and StageError are ValueErrors
        raise CommandFailed(str(error), WRONG_ARGUMENTS) from error
    except OSError as error:
        raise CommandFailed(_spell(error), WRONG_ARGUMENTS) from error
    except (PipelineError, ImportError) as error:  # a worker died already, or the package is not built
        raise CommandFailed(str(error), FAILED) from error


@contextmanager
def running() -> Iterator[None]:
    """While a run goes on: its failure ends the command with 1."""
    try:
        yield
    except PipelineError as error:
        raise CommandFailed(str(error), FAILED) from error
    except OSError as error:
        raise CommandFailed(_spell(error), FAILED) from error


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


def _spell(error: OSError) -> str:
    if error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)
