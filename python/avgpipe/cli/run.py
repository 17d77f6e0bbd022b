"""``avgpipe run`` and ``avgpipe join``: start a script on several local workers, and one more pipeline of a run."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import fields
from pathlib import Path

import typer

from avgpipe.cli.config import IsolationOptions, JoinConfig, RunConfig
from avgpipe.cli.options import Options, flag
from avgpipe.cli.output import FAILED, CommandFailed, arguments, note, say
from avgpipe.errors import PipelineError
from avgpipe.fault.joining import NoPlace, join, join_far
from avgpipe.fault.replace import Replacing
from avgpipe.fault.supervise import IsolatedCounts, Supervisor, TooFewLeft
from avgpipe.fault.trunk import parse_address
from avgpipe.ranks.launch import Job, RanksFailed, run_command, tied
from avgpipe.ranks.process import run_folder
from avgpipe.ranks.supervisor import Interrupted


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
            with run_folder() as folder:
                job = Job(out, command, config.stages, {})
                if isolation.most > isolation.pipelines:
                    note(f"one more pipeline is started by: avgpipe join {folder}")
                with arguments():
                    supervisor = Supervisor(job, isolation, folder, note)
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


# ---- isolated pipelines ----------------------------------------------------------------------------------------------


JOIN_TOKEN = "AVGPIPE_JOIN_TOKEN"
_LEAST = 16  # characters


def isolation_of(config: IsolationOptions, pipelines: int) -> IsolatedCounts:
    """Return the numbers of pipelines; ValueError for numbers that contradict each other."""
    most = config.max_pipelines or pipelines
    if not config.min_pipelines <= pipelines <= most:
        raise ValueError(
            f"--min-pipelines {config.min_pipelines}, --max-pipelines {most}: the {pipelines} pipelines that the run "
            "begins with must lie between the two"
        )
    listen = None if config.listen is None else (parse_address(config.listen), secret())
    return IsolatedCounts(
        pipelines, config.min_pipelines, most, config.restarts, config.spare_pipelines, listen
    )


def secret() -> str:
    """Return the secret that commands on several hosts share; ValueError if it is not set, or too short."""
    token = os.environ.get(JOIN_TOKEN, "")
    if len(token) < _LEAST:
        raise ValueError(
            f"{JOIN_TOKEN} must be set to a secret of {_LEAST} characters or more, the same on all hosts"
        )
    return token


def refuse_isolation(config: IsolationOptions, *more: str) -> None:
    """Refuse options that only isolated pipelines have, and the options in ``more``."""
    own = {f.name for f in fields(IsolationOptions)} - {f.name for f in fields(Options)}
    given = [flag(name) for name in config.given if name in own or name in more]
    if given:
        raise ValueError(f"{', '.join(given)} without --isolate: only isolated pipelines have this option")


# ---- avgpipe join ----------------------------------------------------------------------------------------------------


_ASK_S = 1.0
_LIMIT_S = 60.0  # the launcher admits a pipeline again once it has noticed the loss of the one before


def join_run(config: JoinConfig) -> None:
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
