"""``avgpipe run``: starts a script on several local workers, or runs it as one worker of several hosts."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import ExitStack
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path

import typer

from avgpipe.cli import hosts
from avgpipe.cli.config import NO_SPARES, IsolationOptions, RunConfig
from avgpipe.cli.options import Options, flag
from avgpipe.cli.output import FAILED, CommandFailed, arguments, note, say
from avgpipe.errors import PipelineError
from avgpipe.fault.door import called, listen, parse_address
from avgpipe.fault.replace import Replacing
from avgpipe.fault.supervise import IsolatedCounts, Supervisor, TooFewLeft
from avgpipe.ranks.environment import SHARES
from avgpipe.ranks.hosts import HostPlace
from avgpipe.ranks.launch import Job, RanksFailed, run_command, tied
from avgpipe.ranks.process import end_without_reader, has_reader, run_folder
from avgpipe.ranks.supervisor import Signalled, raising_on_signals

_PREEMPTION_S = 30.0  # for a script to save, before its job goes back into the queue


def run(config: RunConfig) -> None:
    with arguments():
        place = hosts.place_here(config.at)
        _check(config, place)
    command = [sys.executable, "-u", "-m", "avgpipe.ranks.seeded", str(config.seed)]
    command += [config.script, *config.args]
    if place is not None and not config.isolate:
        hosts.become_rank(command, place)
    failure, codes = "", (0,) * config.stages
    with hosts.requeuing(config.requeue):
        try:
            with raising_on_signals():
                if not config.isolate:
                    _run(config, command)
                elif not _run_isolated(config, command, place):
                    return
        except Signalled as interrupted:
            raise CommandFailed(f"{interrupted}: all workers are ended", interrupted.exit_code) from None
        except RanksFailed as failed:
            failure, codes = f"rank {failed.rank} {failed.reason}", failed.exit_codes
        except TooFewLeft as few:
            failure, codes = str(few), few.exit_codes
        except PipelineError as error:
            raise CommandFailed(str(error), FAILED) from None
    if -signal.SIGPIPE in codes and not has_reader():
        end_without_reader()
    if config.json:
        print(json.dumps({"script": config.script, "stages": config.stages, "exit_codes": codes}))
    if failure:
        say(failure)
        raise typer.Exit(FAILED)


def _check(config: RunConfig, place: HostPlace | None) -> None:
    """Refuse options that contradict each other, or this command's place among several. ValueError."""
    if not Path(config.script).is_file():
        if config.script.startswith("-"):  # typer passes on what it does not know
            name = config.script.partition("=")[0]
            known = [flag(f.name) for f in fields(config) if f.name not in ("script", "args", "given")]
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "see avgpipe run --help"
            raise ValueError(f"no option {name}; {hint}")
        raise ValueError(f"script {config.script!r} does not exist: give the path of a Python file")
    hosts.check_requeue(config.requeue)
    if not config.isolate:
        refuse_isolation(config, "pipelines")
        if place is not None:
            _check_rank(config, place)
    elif config.spares is not None:
        raise ValueError(f"--spares with --isolate: {NO_SPARES}")
    else:
        hosts.check_several(place, config)
        if place is not None and "pipelines" in config.given:
            raise ValueError(
                f"--pipelines with several commands ({place.source}): each starts one pipeline; start one more on a "
                "host for a second one there, and limit all by --max-pipelines"
            )


def _check_rank(config: RunConfig, place: HostPlace) -> None:
    if place.number is None or place.count is None:
        raise ValueError(f"{place.source}: workers of several hosts need numbers, start them by torchrun")
    what = f"this command is one worker of {place.count} ({place.source})"
    if "stages" in config.given and config.stages != place.count:
        raise ValueError(f"--stages {config.stages}: {what}; leave it out, or run without these variables")
    refused = [flag(name) for name in ("spares", "requeue", "json") if name in config.given]
    if refused:
        raise ValueError(f"{', '.join(refused)}: {what}, which has no launcher for that")


def _run(config: RunConfig, command: list[str]) -> None:
    out = "stderr" if config.json else "stdout"
    _tell_of_seed(config)
    if config.spares is None:
        run_command(command, config.stages, out=out)
    else:
        Replacing(tied(out, *command), config.stages, config.spares, {}, note).run()


def _run_isolated(config: RunConfig, command: list[str], place: HostPlace | None) -> bool:
    """Run isolated pipelines to the end; return whether this command began the run, and has not joined it."""
    options = hosts.training_of(config, str(Path(config.script)), *config.args)
    with ExitStack() as stack:
        beginning = None
        if place is not None and (beginning := hosts.begin_or_join(place, config, options, stack)) is None:
            return False
        with arguments():
            isolation = isolation_of(config, config.pipelines, beginning)
        folder = stack.enter_context(run_folder())
        out, added = "stderr" if config.json else "stdout", {SHARES: config.shares}
        job = Job(out, command, config.stages, added, options=options)
        if isolation.most > isolation.pipelines and beginning is None:
            note(f"one more pipeline is started by: avgpipe join {folder}")
        supervisor = Supervisor(job, isolation, folder, note)
        _tell_of_seed(config)
        is_preempted = supervisor.run(_PREEMPTION_S if config.requeue else None)
    if is_preempted:
        hosts.requeue()
    return True


def _tell_of_seed(config: RunConfig) -> None:
    if config.seed >= 0:
        note(
            f"torch, random and numpy are seeded with {config.seed} on each rank; --seed none leaves them unseeded"
        )


# ---- isolated pipelines ----------------------------------------------------------------------------------------------


def isolation_of(
    config: IsolationOptions, pipelines: int, beginning: hosts.Beginning | None = None
) -> IsolatedCounts:
    """Return the numbers of pipelines; ValueError for numbers that contradict each other.

    ``beginning``: with what this command begins a run to which others add their pipelines.
    """
    most, listening = config.max_pipelines or pipelines, None
    if beginning is not None:
        pipelines, most = 1, config.max_pipelines or beginning.most
        listening = beginning.listening, beginning.token
    if not config.min_pipelines <= pipelines <= most:
        raise ValueError(
            f"--min-pipelines {config.min_pipelines}, --max-pipelines {most}: the {pipelines} pipelines that the run "
            "begins with must lie between the two"
        )
    if config.listen is not None:
        token = hosts.secret()
        listening = listen(parse_address(config.listen)), token
        note(f"other hosts start pipelines by: avgpipe join {called(listening[0])}")
    return IsolatedCounts(
        pipelines, config.min_pipelines, most, config.restarts, config.spare_pipelines, listening
    )


def refuse_isolation(config: IsolationOptions, *more: str) -> None:
    """Refuse options that only isolated pipelines have, and the options in ``more``."""
    own = {f.name for f in fields(IsolationOptions)} - {f.name for f in fields(Options)}
    given = [flag(name) for name in config.given if name in own or name in more]
    if given:
        raise ValueError(f"{', '.join(given)} without --isolate: only isolated pipelines have this option")
