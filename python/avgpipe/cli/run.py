"""``avgpipe run``: a user's own script on several local workers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from avgpipe.cli.errors import FAILED, CommandFailed, arguments, reporting
from avgpipe.ranks.launch import Interrupted, RanksFailed, run_command


def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The Python file that every worker runs.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")
    ] = None,
    stages: Annotated[int, typer.Option("--stages", help="How many workers to start, one per stage.")] = 2,
    json_output: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object; what the script prints goes to standard error."),
    ] = False,
) -> None:
    """Start SCRIPT on K local workers through torch's launcher, with torchrun's environment variables.

    Options first, then the script and its arguments. When a worker fails the others are ended and the exit code is 1.
    """
    with reporting(json_output):
        with arguments():
            if stages < 1:
                raise ValueError(f"--stages {stages}: must be at least 1")
            if not Path(script).is_file():
                raise ValueError(f"script {script!r} does not exist: give the path of a Python file")
        command = [sys.executable, "-u", script, *(args or [])]
        failure = None
        try:
            run_command(command, stages, out="stderr" if json_output else "stdout")
        except Interrupted as interrupted:
            raise CommandFailed(f"{interrupted}: all workers are ended", interrupted.exit_code) from None
        except RanksFailed as failed:
            failure = failed
        if json_output:
            codes = [0] * stages if failure is None else failure.exit_codes
            print(json.dumps({"script": script, "stages": stages, "exit_codes": codes}))
        if failure is not None:
            print(f"avgpipe: error: rank {failure.rank} {failure.reason}", file=sys.stderr)
            raise typer.Exit(FAILED)
