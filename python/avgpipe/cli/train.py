"""``avgpipe train``: checks everything first, then starts the workers, or is one of them."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from avgpipe.cli import options
from avgpipe.cli.errors import FAILED, WRONG_ARGUMENTS, CommandFailed, arguments, reporting, say
from avgpipe.cli.launch import Interrupted, launch
from avgpipe.cli.process import ending_on_signals
from avgpipe.cli.settings import (
    SETTINGS,
    TrainSettings,
    has_checkpoint,
    joined_ranks,
    parse_advance,
    parse_replication,
    parse_staleness,
    resolve,
)
from avgpipe.plan import Plan
from avgpipe.runtime.placement import Placement


def train(
    workload: options.Workload,
    data: options.Data = None,
    preset: options.Preset = None,
    pretrained: options.Pretrained = None,
    loader_workers: options.LoaderWorkers = None,
    batch_size: options.BatchSize = None,
    seed: options.Seed = None,
    system: options.System = None,
    stages: options.Stages = None,
    pipelines: options.Pipelines = None,
    micro_batches: options.MicroBatches = None,
    schedule: options.Schedule = None,
    stages_per_worker: options.StagesPerWorker = None,
    replication: options.Replication = None,
    spread: options.Spread = False,
    weights: options.Weights = None,
    advance: options.Advance = None,
    rule: options.Rule = None,
    staleness: options.Staleness = None,
    alpha: options.Alpha = None,
    period: options.Period = None,
    recompute: options.Recompute = None,
    lr_scaling: options.LrScaling = None,
    plan: options.Plan = None,
    epochs: options.Epochs = None,
    max_batches: options.MaxBatches = None,
    target: options.Target = None,
    device: options.Device = None,
    link: options.Link = None,
    wire_dtype: options.WireDtype = None,
    autocast: options.Autocast = None,
    skip_nonfinite: options.SkipNonfinite = False,
    out: options.Out = None,
    resume: options.Resume = False,
    checkpoint_minutes: options.CheckpointMinutes = None,
    timeout: options.Timeout = None,
    json_output: options.Json = False,
) -> None:
    """Train WORKLOAD: start the plan's workers on this machine, or join those that torchrun started.

    Writes plan.json, metrics.jsonl, timeline.json, timeline.png, checkpoints/ and summary.json to the run's folder.
    """
    asked: dict[str, Any] = {
        "data": data,
        "preset": preset,
        "pretrained": pretrained,
        "loader_workers": loader_workers,
        "lr_scaling": lr_scaling,
        "autocast": autocast,
        "skip_nonfinite": skip_nonfinite or None,
        "batch_size": batch_size,
        "seed": seed,
        "system": system,
        "stages": stages,
        "pipelines": pipelines,
        "micro_batches": micro_batches,
        "schedule": schedule,
        "stages_per_worker": stages_per_worker,
        "weights": weights,
        "spread": spread or None,
        "rule": rule,
        "alpha": alpha,
        "period": period,
        "recompute": recompute,
        "epochs": epochs,
        "max_batches": max_batches,
        "target": target,
        "device": device,
        "link": link,
        "wire_dtype": wire_dtype,
        "out": out,
        "resume": resume,
        "checkpoint_minutes": checkpoint_minutes,
        "timeout_s": timeout,
    }
    with reporting(json_output):
        with arguments(), ending_on_signals(_say_interrupted_early):
            asked |= {"advance": parse_advance(advance), "staleness": parse_staleness(staleness)}
            asked["replication"] = parse_replication(replication)
            settings = resolve(workload, asked, plan)
            if _is_first():  # the others would find what the first one has begun to write
                from avgpipe.cli.checks import check_run

                check_run(settings)
        if joined_ranks() is None and settings.workers > 1:
            _train_on_workers(settings)
        else:
            _train_here(settings)
        if _is_first():
            _tell(settings, json_output)


def _say_interrupted_early(number: signal.Signals) -> None:
    say(f"interrupted by {number.name} before anything was written")


def resume_hint(settings: TrainSettings) -> str:
    """The end of a message about a run that did not end well."""
    if not has_checkpoint(settings.out):
        return "there is no checkpoint yet"
    command = ["avgpipe", "train", settings.workload, "--out", settings.out, "--resume"]
    return f"go on from the last checkpoint with: {shlex.join(command)}"


def _train_on_workers(settings: TrainSettings) -> None:
    command = [sys.executable, "-m", "avgpipe.cli.worker", str(os.getpid())]
    try:
        ended = launch(settings.workers, command, {SETTINGS: settings.to_json()})
    except Interrupted as interrupted:
        raise CommandFailed(
            f"interrupted by {interrupted}: all workers are ended; {resume_hint(settings)}",
            interrupted.exit_code,
        ) from None
    if ended.first is None:
        return
    rank = ended.first
    plan = Plan(**settings.plan)
    name = f"rank {rank} ({Placement.of(plan, plan.workers).describe(rank)})"
    if ended.exit_codes[rank] == WRONG_ARGUMENTS:  # found by a worker before it wrote anything; it said what
        raise CommandFailed(f"{name} refused to begin, see above", WRONG_ARGUMENTS)
    raise CommandFailed(f"{name} {ended.reason()}; {resume_hint(settings)}", FAILED)


def _train_here(settings: TrainSettings) -> None:
    from avgpipe.cli.worker import GRACE_S, leave_group, run_rank

    def tell(number: signal.Signals) -> None:
        sys.stderr.write("\x1b[?25h" if sys.stderr.isatty() else "")  # the progress bar has hidden the cursor
        if _is_first():
            say(f"interrupted by {number.name}; {resume_hint(settings)}")

    joined = (joined_ranks() or 1) > 1
    with ending_on_signals(tell, GRACE_S if joined else 0.0):
        try:
            run_rank(settings)
            leave_group()
        except CommandFailed as failure:
            if failure.exit_code == FAILED and _is_first():
                raise CommandFailed(
                    f"{str(failure).rstrip('.')}; {resume_hint(settings)}", FAILED
                ) from failure.__cause__
            raise


def _is_first() -> bool:
    return int(os.environ.get("RANK", "0")) == 0 or joined_ranks() is None


def _tell(settings: TrainSettings, json_output: bool) -> None:
    from avgpipe.cli.summary import describe

    text = (Path(settings.out) / "summary.json").read_text() if json_output else describe(settings.out) + "\n"
    sys.stdout.write(text)
    sys.stdout.flush()
