"""``avgpipe join``: one more pipeline for a run of isolated ones."""

from __future__ import annotations

import json
from pathlib import Path

from avgpipe.cli.config import JoinConfig
from avgpipe.cli.output import CommandFailed, arguments, note
from avgpipe.ranks.joining import join
from avgpipe.ranks.launch import Interrupted


def run(config: JoinConfig) -> None:
    try:
        with arguments():
            pipeline = join(Path(config.run), note)
    except Interrupted as interrupted:
        raise CommandFailed(
            f"{interrupted}: its processes are ended; the run goes on without them", interrupted.exit_code
        ) from None
    if config.json:
        print(json.dumps({"run": config.run, "pipeline": pipeline}))
