"""``avgpipe join``: one more pipeline for a run of isolated ones."""

from __future__ import annotations

import json
from pathlib import Path

from avgpipe.cli.config import JoinConfig
from avgpipe.cli.isolated import secret
from avgpipe.cli.output import CommandFailed, arguments, note
from avgpipe.errors import PipelineError
from avgpipe.ranks.joining import join, join_far
from avgpipe.ranks.launch import Interrupted


def run(config: JoinConfig) -> None:
    with arguments():
        if config.restarts < 0:
            raise ValueError(f"--restarts {config.restarts}: not below 0")
    left = config.restarts
    while True:
        try:
            with arguments():
                pipeline = _join(config.run)
            break
        except PipelineError as error:
            if not left:
                raise
            left -= 1
            note(f"{error}; it is started again")
        except Interrupted as interrupted:
            raise CommandFailed(
                f"{interrupted}: its processes are ended; the run goes on without them", interrupted.exit_code
            ) from None
    if config.json:
        print(json.dumps({"run": config.run, "pipeline": pipeline}))


def _join(run: str) -> int:
    if ":" in run and not Path(run).is_dir():
        return join_far(run, secret(), note)
    return join(Path(run), note)
