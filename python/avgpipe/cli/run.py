"""``avgpipe run``: a user's own script on several local workers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from avgpipe.cli.config import RunConfig
from avgpipe.cli.output import FAILED, CommandFailed, arguments, say
from avgpipe.ranks.launch import Interrupted, RanksFailed, run_command, tied
from avgpipe.ranks.replace import Replacing
from avgpipe.ranks.supervise import Isolation, Supervisor

_OF_ISOLATED = ("pipelines", "min_pipelines", "restarts")


def run(config: RunConfig) -> None:
    with arguments():
        if not Path(config.script).is_file():
            raise ValueError(f"script {config.script!r} does not exist: give the path of a Python file")
        if config.min_pipelines > config.pipelines:
            raise ValueError(
                f"--min-pipelines {config.min_pipelines} is more than --pipelines {config.pipelines}"
            )
        apart = [f"--{name.replace('_', '-')}" for name in _OF_ISOLATED if name in config.given]
        if config.spares is not None and config.isolate:
            raise ValueError(
                "--spares with --isolate: pipelines that are isolated stand in for each other, use one"
            )
        if apart and not config.isolate:
            raise ValueError(
                f"{', '.join(apart)} without --isolate: the script's plan says how many pipelines there are"
            )
    command, codes = [sys.executable, "-u", config.script, *config.args], (0,) * config.stages
    failure, out = None, "stderr" if config.json else "stdout"
    try:
        if config.spares is not None:
            Replacing(tied(out, *command), config.stages, config.spares, {}, say).run()
        elif config.isolate:
            isolation = Isolation(config.pipelines, config.min_pipelines, config.restarts)
            Supervisor(tied(out, *command), config.stages, isolation, {}, say).run()
        else:
            run_command(command, config.stages, out=out)
    except Interrupted as interrupted:
        raise CommandFailed(f"{interrupted}: all workers are ended", interrupted.exit_code) from None
    except RanksFailed as failed:
        failure, codes = failed, failed.exit_codes
    if config.json:
        print(json.dumps({"script": config.script, "stages": config.stages, "exit_codes": codes}))
    if failure is not None:
        say(f"rank {failure.rank} {failure.reason}")
        raise typer.Exit(FAILED)
