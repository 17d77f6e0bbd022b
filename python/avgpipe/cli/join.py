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
)  # the launcher admits a pipeline again once it has noticed the loss of the one before


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
    """Join, and again after a loss; return the number of the pipeline that reached the end of the run."""
    left, until, here = config.restarts, 0.0, Path.cwd()
    while True:
        try:
            os.chdir(here)  # the attempt before has changed to its launcher's folder
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
