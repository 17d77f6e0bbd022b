"""``avgpipe train``: checks everything first, then starts the workers, or runs as one of them."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import typer

from avgpipe.cli import hosts
from avgpipe.cli.config import CheckConfig, TrainConfig
from avgpipe.cli.folder import describe
from avgpipe.cli.output import (
    FAILED,
    WRONG_ARGUMENTS,
    CommandFailed,
    answer,
    arguments,
    note,
    running,
    say,
    show_status,
)
from avgpipe.cli.record import SharedRecord
from avgpipe.cli.resolve import (
    check_device,
    check_run,
    has_checkpoint,
    joined_ranks,
    pipeline_options,
    prepare,
    resolve,
)
from avgpipe.cli.run import isolation_of, refuse_isolation
from avgpipe.fault.replace import Replacing
from avgpipe.fault.supervise import Supervisor, TooFewLeft
from avgpipe.measure.check import Checked, check
from avgpipe.ranks.environment import SHARES
from avgpipe.ranks.launch import Job, RanksFailed, run_on_ranks, same_modules, tied
from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.process import run_folder
from avgpipe.ranks.signals import ending_on_signals
from avgpipe.ranks.supervisor import Signalled, raising_on_signals
from avgpipe.runtime.placement import Placement

_WORKER = "avgpipe.cli.training:run_worker"


def run(asked: TrainConfig) -> None:
    with ExitStack() as stack:
        with arguments(), ending_on_signals(_say_interrupted_early):
            place = hosts.place_here(asked.at)
            if place is not None and asked.isolate:
                hosts.leave_ranks()
            elif place is not None:
                hosts.join_ranks(place)
            config = resolve(asked)
            hosts.check_requeue(config.requeue)
            if not config.isolate:
                refuse_isolation(asked)
            else:
                hosts.check_several(place, asked)
        beginning = None
        joins = place if config.isolate else None
        if joins is not None:
            options = hosts.training_of(config, config.workload)
            if (beginning := hosts.begin_or_join(joins, config, options, stack)) is None:
                return
        with arguments(), ending_on_signals(_say_interrupted_early):
            if _is_first():  # the others would find the files that the first one has begun to write
                check_run(config)
        with hosts.requeuing(config.requeue and _is_first()):
            _train(config, asked.json, beginning)


def _train(config: TrainConfig, as_json: bool, beginning: hosts.Beginning | None) -> None:
    if config.isolate:
        is_preempted = train_isolated(config, beginning)
    elif joined_ranks() is None and config.to_plan().workers > 1:
        is_preempted = train_on_workers(config)
    else:
        is_preempted = _train_here(config)
    if not _is_first():
        return
    if is_preempted:
        note(f"preempted by SIGTERM: the run is saved; {resume_hint(config)}")
        text = '{"preempted": true}\n' if as_json else ""
    else:
        out = Path(config.out)
        text = (out / "summary.json").read_text() if as_json else describe(out) + "\n"
    print(text, end="", flush=True)
    if is_preempted and config.requeue:
        hosts.requeue()


def _say_interrupted_early(number: signal.Signals) -> None:
    say(f"interrupted by {number.name} before anything was written")


def resume_hint(config: TrainConfig) -> str:
    """Return the end of a message about a run that was interrupted or failed."""
    if not has_checkpoint(config.out):
        return "there is no checkpoint yet"
    command = ["avgpipe", "train", config.workload, "--out", config.out, "--resume"]
    return f"resume from the last checkpoint with: {shlex.join(command)}"


def train_on_workers(config: TrainConfig) -> bool:
    """Start a process for each rank and wait for them; return whether they were preempted. Raises CommandFailed."""
    plan = config.to_plan()
    asked = {"config": config.to_json()}
    try:
        preemption_s = config.preemption_seconds
        if config.spares is not None:
            command, added = tied("stderr", _WORKER), same_modules()
            replacing = Replacing(command, plan.workers, config.spares, added, note, asked)
            return replacing.run(preemption_s)
        ends = run_on_ranks(
            _WORKER, plan.workers, asked, threads=None, captures=False, preemption_s=preemption_s
        )
        return any(ends)
    except Signalled as interrupted:
        raise _interrupted(config, interrupted) from None
    except RanksFailed as failed:
        name = f"rank {failed.rank} ({Placement.of(plan, plan.workers).describe(failed.rank)})"
        if failed.exit_codes[failed.rank] == WRONG_ARGUMENTS:  # it wrote nothing, and printed the reason
            raise CommandFailed(f"{name} rejected its arguments (see above)", WRONG_ARGUMENTS) from None
        raise CommandFailed(f"{name} {failed.reason}; {resume_hint(config)}", FAILED) from None


def train_isolated(config: TrainConfig, beginning: hosts.Beginning | None = None) -> bool:
    """Start the processes of each pipeline, keep the run's record, and wait for them.

    ``beginning``: see :func:`avgpipe.cli.run.isolation_of`. Return whether they were preempted. Raises CommandFailed.
    """
    plan = config.to_plan()
    with arguments():
        isolation = isolation_of(config, plan.pipelines, beginning)
    variables = {**same_modules(), SHARES: config.shares}
    asked = {"config": config.to_json()}
    job = Job("stderr", [_WORKER], plan.workers, variables, asked, hosts.training_of(config, config.workload))
    try:
        with raising_on_signals(), run_folder() as folder:
            recorded = SharedRecord(config, folder)
            supervisor = Supervisor(job, isolation, folder, recorded.say, recorded)
            try:
                return supervisor.run(config.preemption_seconds)
            except TooFewLeft as few:
                if WRONG_ARGUMENTS in few.exit_codes:
                    raise CommandFailed(f"{few} (see above)", WRONG_ARGUMENTS) from None
                raise CommandFailed(f"{few}; {resume_hint(config)}", FAILED) from None
            except CommandFailed as failure:
                raise _with_hint(failure, config) from failure.__cause__
            finally:
                with running():
                    recorded.close(supervisor.history())
    except Signalled as interrupted:
        raise _interrupted(config, interrupted) from None


def _with_hint(failure: CommandFailed, config: TrainConfig) -> CommandFailed:
    if failure.exit_code != FAILED:
        return failure
    return CommandFailed(f"{str(failure).rstrip('.')}; {resume_hint(config)}", FAILED)


def _interrupted(config: TrainConfig, interrupted: Signalled) -> CommandFailed:
    said = f"interrupted by {interrupted}: all workers are ended; {resume_hint(config)}"
    return CommandFailed(said, interrupted.exit_code)


def _train_here(config: TrainConfig) -> bool:
    """Train as the only rank, or as one of torchrun's; return whether it was preempted."""
    from avgpipe.cli.training import run_rank  # imports torch, after signals are handled

    def on_signal(number: signal.Signals) -> None:
        sys.stderr.write("\x1b[?25h" if sys.stderr.isatty() else "")  # the progress bar has hidden the cursor
        if _is_first():
            say(f"interrupted by {number.name}; {resume_hint(config)}")

    joined = (joined_ranks() or 1) > 1
    with ending_on_signals(on_signal, LIMITS.grace_s if joined else 0.0):
        try:
            with redirect_stdout(sys.stderr):  # a script may print
                is_preempted = run_rank(config)
            with running():
                _leave_group()
        except CommandFailed as failure:
            raise (_with_hint(failure, config) if _is_first() else failure) from failure.__cause__
    return is_preempted


def _leave_group() -> None:
    import torch.distributed as dist

    from avgpipe.ranks.rendezvous import meet_at_the_end

    meet_at_the_end()
    if dist.is_initialized():
        dist.destroy_process_group()


def _is_first() -> bool:
    return int(os.environ.get("RANK", "0")) == 0 or joined_ranks() is None


# ---- avgpipe check ---------------------------------------------------------------------------------------------------


_OWN = ("batches", "alone", "json")


def check_command(asked: CheckConfig) -> None:
    with arguments():
        config = _resolved(asked)
    found: dict[str, dict[str, Any]] = {}
    with running():
        show_status("training in one process ...")
        here = checked(config, asked.batches)
        found["in one process"] = _summary(here)
        workers = here.plan.workers
        if here.strict.workers == workers > 1 and not asked.alone:
            show_status(f"training on {workers} workers ...")
            given = {"config": config.to_json(), "batches": asked.batches}
            found[f"on {workers} workers"] = run_on_ranks(f"{__name__}:on_rank", workers, given, threads=1)[0]
        show_status("")
    texts = [f"{where}: {result['text']}" for where, result in found.items()]
    answer(asked.json, {where: result["found"] for where, result in found.items()}, *texts)
    if not all(result["found"]["equal"] for result in found.values()):
        raise typer.Exit(FAILED)


def _resolved(asked: CheckConfig) -> TrainConfig:
    if joined_ranks() is not None:
        raise ValueError("check starts the plan's workers itself: run it once, without torchrun")
    if asked.isolate:
        raise ValueError(
            "--isolate: check trains in one process and on the plan's workers, which all pipelines share; leave it out"
        )
    options = {name: value for name, value in asked.explicit.items() if name not in _OWN}
    config = resolve(TrainConfig.of(**options, max_batches=asked.batches))
    check_device(config.device)
    return config


def checked(config: TrainConfig, batches: int) -> Checked:
    """Compare in this process, or as one of several processes."""
    workload, plan = prepare(config)
    return check(
        workload.layers,
        plan,
        loader=workload.train_batches(0),
        batches=batches,
        **pipeline_options(config, workload),
    )


def on_rank(config: str, batches: int) -> dict[str, Any]:
    """Compare as one of the processes that the command starts."""
    torch.set_num_threads(1)
    return _summary(checked(TrainConfig.from_json(config), batches))


def _summary(found: Checked) -> dict[str, Any]:
    return {"found": found.to_json(), "text": str(found)}
