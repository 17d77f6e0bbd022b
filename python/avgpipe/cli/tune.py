"""``avgpipe tune``: a good plan for a workload, predicted from a profile and, where the devices are here, measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from rich.table import Table

from avgpipe.cli.config import TuneConfig
from avgpipe.cli.measuring import check_target, cluster_of, link_of, profile_of, trial_of
from avgpipe.cli.output import answer, arguments, check_file, grid, running, show_status
from avgpipe.cli.resolve import check_device
from avgpipe.measure.search import Space, check_sizes, profiled_sizes
from avgpipe.measure.tune import TunedPlan, TuningResult, advice, study
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.profile import Profile
from avgpipe.ranks.environment import cores
from avgpipe.tasks import check_workload

_MIB = 2**20
_MOST_NAMED = 6  # longest list that is printed in full


def run(config: TuneConfig, **baselines: bool) -> None:
    """Print the best plans; ``baselines``: what ``study`` times besides, for a comparison."""
    with arguments():
        profile = Profile.load(config.profile) if config.profile is not None else None
        batch_size, not_timed = _check(config)
        cluster = Cluster.load(config.cluster) if config.cluster is not None else None
        check_file(config.out)
    profile_s = None
    if profile is None:
        with running():
            show_status(f"profiling for about {config.budget_s:g} s ...")
            begin = time.perf_counter()
            at_once = min(config.workers or 1, cores()) if cluster is None and config.device == "cpu" else 1
            profile = profile_of(config, profiled_sizes(batch_size), at_once)
            profile_s = time.perf_counter() - begin
    with arguments():  # what fits into the memory is known from the profile only
        cluster = cluster or cluster_of(config, profile)
        found = study(
            Space(profile, cluster, batch_size, config.pipelines, config.micro_batches),
            None if not_timed else partial(trial_of, config),
            trials=config.trials,
            say=show_status,
            profile_s=profile_s,
            **baselines,
        )
        show_status("")
    with running():
        found.plan.save(config.out)
    said = [f"not timed: {not_timed}"] if not_timed and config.trials else []
    answer(config.json, found.to_json(), *said, table(found), *lines(found), f"plan: {config.out}")


def _check(config: TuneConfig) -> tuple[int, str]:
    """Return the samples of a batch, and why plans cannot be timed ("" if they can). ValueError for bad options."""
    if not config.workload and (config.profile is None or config.batch_size is None):
        raise ValueError("name a WORKLOAD to profile, or give --profile FILE and --batch-size NUMBER")
    check_target(config)
    if config.trials < 0:
        raise ValueError(f"--trials {config.trials}: must be at least 0")
    batch_size = config.batch_size
    if config.workload:
        check_device(config.device)
        batch_size = check_workload(config.workload, config.build_options()).batch_size
    assert batch_size is not None
    check_sizes(batch_size, config.pipelines, config.micro_batches)
    return batch_size, _why_not_timed(config)


def _why_not_timed(config: TuneConfig) -> str:
    if not config.workload:
        return "there is no workload"
    if config.cluster is not None or link_of(config) is not None:
        return "the plan is for links that this machine does not have"
    on_host = config.device == "cpu"
    here, kind = (cores(), "cores") if on_host else (torch.accelerator.device_count(), "devices")
    if config.workers is not None and config.workers > here:
        return f"{config.workers} workers are more than the {here} {kind} here"
    return "--trials is 0" if config.trials == 0 else ""


# ---- printed tables --------------------------------------------------------------------------------------------------


def table(found: TuningResult) -> Table:
    made = grid([_cells(found, row) for row in found.rows])
    made.columns[0].no_wrap = True
    made.columns[4].justify, made.columns[4].no_wrap = "left", False  # a long cut is wrapped
    return made


def _cells(found: TuningResult, row: TunedPlan) -> dict[str, str]:
    plan, trial = row.plan, row.trial
    width = (plan.replication or [1])[0]
    advance = plan.advance
    return {
        "plan": row.what,
        "stages": f"{plan.stages} x {width}" if width > 1 else str(plan.stages),
        "pipelines": str(plan.pipelines),
        "micro-\nbatches": str(plan.micro_batches),
        "cut": _some(plan.partition or ()),
        "advance": _some(advance)
        if isinstance(advance, tuple)
        else str("default" if advance is None else advance),
        "recompute": plan.recompute,
        "predicted\nms/batch": f"{1e3 * row.forecast.batch_s:.1f}",
        "measured\nms/batch": "-" if trial is None else f"{1e3 * trial.batch_s:.1f}",
        "error": "-" if row.error is None else f"{100 * row.error:+.1f} %",
        "samples/s": f"{found.samples_per_s(row):.4g}",
        "predicted\nMiB": f"{max(row.forecast.memory_bytes) / _MIB:.0f}",
        "measured\nMiB": "-"
        if not trial or not trial.memory_bytes
        else f"{max(trial.memory_bytes) / _MIB:.0f}",
    }


def _some(numbers: Sequence[object]) -> str:
    """Format all of a short list, or the first numbers of a long one."""
    shown = ",".join(map(str, numbers[:_MOST_NAMED]))
    return shown + (f",... ({len(numbers)})" if len(numbers) > _MOST_NAMED else "") or "-"


def lines(found: TuningResult) -> list[str]:
    """Return the lines printed after the table."""
    said = [
        f"{found.considered} sizes of plans were considered"
        + (f", {found.excluded} of those simulated do not fit into the memory" if found.excluded else "")
        + "; "
        + ", ".join(f"{name.removesuffix('_s')} {seconds:.1f} s" for name, seconds in found.seconds.items())
    ]
    said += [f"{name}: {row.what}, {_memory(row)}" for name, row in zip(("best", "runner-up"), found.rows)]
    said += [f"{row.what} was not timed: {row.failure}" for row in found.rows if row.failure]
    return [*said, advice(found)]


def _memory(row: TunedPlan) -> str:
    """Return the line with the peak memory of each worker."""

    def sizes(peaks: Sequence[float]) -> str:
        return _some([f" {peak / _MIB:.0f}" for peak in peaks]).strip()

    measured = row.trial.memory_bytes if row.trial is not None else ()
    also = f", {sizes(measured)} MiB measured" if measured else ""
    return f"peak memory per worker {sizes(row.forecast.memory_bytes)} MiB predicted{also}"
