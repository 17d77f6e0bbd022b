"""``avgpipe tune``: a good plan for a workload, predicted from a profile and, where the devices are here, measured."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from avgpipe.cli.config import TuneConfig
from avgpipe.cli.errors import arguments, running
from avgpipe.cli.measuring import link_of, profile_of, trial_of
from avgpipe.cli.profile import check_file
from avgpipe.cli.resolve import check_device
from avgpipe.measure.search import Space, check_sizes, profiled_sizes
from avgpipe.measure.tune import TRAVERSAL, TunedPlan, TuningResult, advice, study
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.profile import Profile
from avgpipe.ranks.process import cores
from avgpipe.workloads import check_workload

_FILE_COLUMNS = 160  # of a table that is not for a terminal
_MIB = 2**20
_HEADINGS = (
    *("plan", "stages", "pipelines", "micro-\nbatches", "cut", "advance", "recompute"),
    *("predicted\nms/batch", "measured\nms/batch", "error", "samples/s", "predicted\nMiB", "measured\nMiB"),
)
_MOST_NAMED = 6  # numbers of a list that are all written


def run(config: TuneConfig) -> None:
    with arguments():
        tuning = _Tuning(config)
        check_file(config.out)
    with running():
        profile, profile_s = tuning.profiled()
    with arguments():  # only the profile tells what fits into the memory
        found = tuning.answer(profile, profile_s)
    with running():
        found.plan.save(config.out)
    if config.json:
        print(json.dumps(found.to_json()))
        return
    if tuning.not_timed and config.trials:
        print(f"not timed: {tuning.not_timed}")
    show(found, config.out)


class _Tuning:
    """What is tuned, with what the files and the workload say. Raises ValueError or OSError for what cannot be.

    Attributes:
        not_timed: Why plans cannot be timed; "" where they can.
    """

    def __init__(self, config: TuneConfig) -> None:
        _check(config)
        self.config = config
        self.link = link_of(config)
        self.profile = Profile.load(config.profile) if config.profile is not None else None
        self.cluster = Cluster.load(config.cluster) if config.cluster is not None else None
        batch_size = config.batch_size
        if config.workload:
            check_device(config.device)
            batch_size = check_workload(config.workload, config.build_options()).batch_size
        assert batch_size is not None
        self.batch_size = batch_size
        # What does not depend on the profile is refused before it is made.
        check_sizes(batch_size, config.pipelines, config.micro_batches)
        self.not_timed = self._why_not_timed()
        why_not = self.not_timed or ("--trials is 0" if config.trials == 0 else "")
        if why_not and (config.baselines or config.traversal):
            option = "--traversal" if config.traversal else "--baselines"
            raise ValueError(f"{option} times plans, but {why_not}: leave it out")

    def _why_not_timed(self) -> str:
        config = self.config
        if not config.workload:
            return "there is no workload"
        if config.cluster is not None or self.link is not None:
            return "the plan is for other links than those of this machine"
        assert config.workers is not None
        here, kind = (
            (torch.cuda.device_count(), "CUDA devices") if config.device == "cuda" else (cores(), "cores")
        )
        return (
            "" if config.workers <= here else f"{config.workers} workers are more than the {here} {kind} here"
        )

    def profiled(self) -> tuple[Profile, float | None]:
        """The profile that was given, else a new one and the seconds it took. PipelineError for a failed process."""
        if self.profile is not None:
            return self.profile, None
        config = self.config
        _say(f"profiling for about {config.budget_s:g} s")
        here = self.cluster is None and config.device == "cpu"
        begin = time.perf_counter()
        at_once = min(config.workers or 1, cores()) if here else 1
        found = profile_of(config, profiled_sizes(self.batch_size), at_once)
        return found, time.perf_counter() - begin

    def answer(self, profile: Profile, profile_s: float | None) -> TuningResult:
        """Search for the best plan. ValueError where nothing fits into the memory."""
        config, cluster = self.config, self.cluster
        if cluster is None:
            assert config.workers is not None
            cluster = Cluster.like(profile, config.workers, config.memory_limit_bytes, self.link)
        times = not self.not_timed and config.trials > 0
        return study(
            Space(profile, cluster, self.batch_size, config.pipelines, config.micro_batches),
            partial(trial_of, config) if times else None,
            trials=config.trials,
            baselines=config.baselines,
            traversal=config.traversal,
            say=_say,
            profile_s=profile_s,
        )


def _check(config: TuneConfig) -> None:
    if not config.workload and (config.profile is None or config.batch_size is None):
        raise ValueError("name a WORKLOAD to profile, or give --profile FILE and --batch-size NUMBER")
    if (config.workers is None) == (config.cluster is None):
        raise ValueError("say what the plan is for: --workers NUMBER, or --cluster FILE")
    if config.trials < 0:
        raise ValueError(f"--trials {config.trials}: must be at least 0")
    for option, value in (("--memory-limit", config.memory_limit_bytes), ("--bandwidth", config.bandwidth)):
        if config.cluster is not None and value is not None:
            raise ValueError(f"{option} with --cluster: write it into the file, or give only one of them")


def _say(line: str) -> None:
    """Progress, for whoever watches."""
    if sys.stderr.isatty():
        print(f"{line} ...", file=sys.stderr, flush=True)


# ---- for a reader ----------------------------------------------------------------------------------------------------


def show(found: TuningResult, out: str) -> None:
    screen = Console(highlight=False, markup=False)
    if not screen.is_terminal:
        screen.width = _FILE_COLUMNS
    screen.print(table(found))
    for line in lines(found):
        screen.print(line)
    screen.print(f"plan: {out}")


def table(found: TuningResult) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in _HEADINGS:
        text = heading in ("plan", "cut")
        made.add_column(heading, no_wrap=heading != "cut", justify="left" if text else "right")
    for row in (*found.rows, *found.baselines):
        made.add_row(*_cells(found, row))
    return made


def _cells(found: TuningResult, row: TunedPlan) -> list[str]:
    plan, trial = row.plan, row.trial
    width = (plan.replication or [1])[0]
    memory = f"{max(trial.memory_bytes) / _MIB:.0f}" if trial is not None and trial.memory_bytes else "-"
    return [
        row.what,
        f"{plan.stages} x {width}" if width > 1 else str(plan.stages),
        str(plan.pipelines),
        str(plan.micro_batches),
        _some(plan.partition or ()),
        _advance(plan.advance),
        plan.recompute,
        f"{1e3 * row.forecast.batch_s:.1f}",
        "-" if trial is None else f"{1e3 * trial.batch_s:.1f}",
        "-" if row.error is None else f"{100 * row.error:+.1f} %",
        f"{found.samples_per_s(row):.4g}",
        f"{max(row.forecast.memory_bytes) / _MIB:.0f}",
        memory,
    ]


def _advance(advance: object) -> str:
    if advance is None:
        return "default"
    return _some(advance) if isinstance(advance, tuple) else str(advance)


def _some(numbers: Sequence[int] | Sequence[str]) -> str:
    """All of a short list, the first of a long one."""
    shown = ",".join(map(str, numbers[:_MOST_NAMED]))
    return shown + (f",... ({len(numbers)})" if len(numbers) > _MOST_NAMED else "") or "-"


def lines(found: TuningResult) -> list[str]:
    """What else there is to say."""
    said = [
        f"{found.considered} sizes of plans were considered"
        + (f", {found.excluded} of those simulated do not fit into the memory" if found.excluded else "")
        + "; "
        + ", ".join(f"{name.removesuffix('_s')} {seconds:.1f} s" for name, seconds in found.seconds.items())
    ]
    for name, row in zip(("best", "runner-up"), found.rows):
        said.append(f"{name}: {row.what}, {_memory(row)}")
    said += [f"{row.what} was not timed: {row.failure}" for row in found.rows if row.failure]
    every = [row.batch_s for row in found.baselines if row.what == TRAVERSAL and row.trial is not None]
    if every:
        ratio = found.best.batch_s / min(every)
        said.append(
            f"traversal: the best of {len(every)} settings takes {1e3 * min(every):.1f} ms, the plan {ratio:.3f} of "
            f"it; measuring them took {found.seconds['traversal_s']:.0f} s"
        )
    return [*said, advice(found)]


def _memory(row: TunedPlan) -> str:
    """Peak of each worker."""
    predicted = _sizes(row.forecast.memory_bytes)
    if row.trial is None or not row.trial.memory_bytes:
        return f"peak memory per worker {predicted} MiB predicted"
    return f"peak memory per worker {predicted} MiB predicted, {_sizes(row.trial.memory_bytes)} MiB measured"


def _sizes(sizes: tuple[float, ...]) -> str:
    return _some([f" {size / _MIB:.0f}" for size in sizes]).strip()
