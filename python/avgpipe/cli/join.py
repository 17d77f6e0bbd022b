"""``avgpipe join``: one more pipeline for a run of isolated ones."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from avgpipe.cli.config import JoinConfig
from avgpipe.cli.isolated import secret
from avgpipe.cli.output import CommandFailed, arguments, note
from avgpipe.errors import PipelineError
from avgpipe.fault.joining import NoPlace, join, join_far
from avgpipe.ranks.launch import Interrupted

_ASK_S, _LIMIT_S = (
    1.0,
    60.0,
)  # to be let in again, the launcher must have seen that the pipeline before is gone


def run(config: JoinConfig) -> None:
    try:
        with arguments():
            pipeline = _join_again(config)
    except Interrupted as interrupted:
        raise CommandFailed(
            f"{interrupted}: its processes are ended; the run goes on without them", interrupted.exit_code
        ) from None
    if config.json:
        print(json.dumps({"run": config.run, "pipeline": pipeline}))


def _join_again(config: JoinConfig) -> int:
    """Join, and again when the pipeline is lost; return the number of the one that came to the run's end."""
    left, until, here = config.restarts, 0.0, Path.cwd()
    while True:
        try:
            os.chdir(here)  # the one before has gone to its launcher's
            return _join(config.run)
        except NoPlace:
            if time.monotonic() > until:
                raise
            time.sleep(_ASK_S)
        except PipelineError as error:
            if not left:
                raise
            left, until = left - 1, time.monotonic() + _LIMIT_S
            note(f"{error}; it is started again")


def _join(run: str) -> int:
    if ":" in run and not Path(run).is_dir():
        return join_far(run, secret(), note)
    return join(Path(run), note)
