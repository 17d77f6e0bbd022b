"""``avgpipe run``: starts a user's own script on several local workers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from avgpipe.cli.config import RunConfig
from avgpipe.cli.isolated import isolation_of, refuse_isolation
from avgpipe.cli.output import FAILED, CommandFailed, arguments, note, say
from avgpipe.fault.replace import Replacing
from avgpipe.fault.supervise import Supervisor, TooFewLeft
from avgpipe.ranks.launch import Interrupted, Job, RanksFailed, run_command, tied


def run(config: RunConfig) -> None:
    with arguments():
        if not Path(config.script).is_file():
            raise ValueError(f"script {config.script!r} does not exist: give the path of a Python file")
        if not config.isolate:
            refuse_isolation(config, "pipelines")
        elif config.spares is not None:
            raise ValueError(
                "--spares with --isolate: isolated pipelines replace each other, use one of the two"
            )
        isolation = isolation_of(config, config.pipelines)
    command, codes = [sys.executable, "-u", config.script, *config.args], (0,) * config.stages
    failure, out = "", "stderr" if config.json else "stdout"
    if config.seed >= 0:
        command[2:2] = ["-m", "avgpipe.ranks.seeded", str(config.seed)]
    try:
        if not config.isolate:
            _tell_of_seed(config)
        if config.spares is not None:
            Replacing(tied(out, *command), config.stages, config.spares, {}, say).run()
        elif config.isolate:
            with TemporaryDirectory(prefix="avgpipe-") as folder:
                job = Job(out, command, config.stages, {})
                if isolation.most > isolation.pipelines:
                    note(f"one more pipeline is started by: avgpipe join {folder}")
                with arguments():
                    supervisor = Supervisor(job, isolation, Path(folder), note)
                _tell_of_seed(config)
                supervisor.run()
        else:
            run_command(command, config.stages, out=out)
    except Interrupted as interrupted:
        raise CommandFailed(f"{interrupted}: all workers are ended", interrupted.exit_code) from None
    except RanksFailed as failed:
        failure, codes = f"rank {failed.rank} {failed.reason}", failed.exit_codes
    except TooFewLeft as few:
        failure, codes = str(few), few.exit_codes
    if config.json:
        print(json.dumps({"script": config.script, "stages": config.stages, "exit_codes": codes}))
    if failure:
        say(failure)
        raise typer.Exit(FAILED)


def _tell_of_seed(config: RunConfig) -> None:
    if config.seed >= 0:
        note(
            f"torch, random and numpy are seeded with {config.seed} on each rank; --seed none leaves them unseeded"
        )
