"""A comparison of systems: the plan of each, the order of their runs, and what the runs result in."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from avgpipe import systems
from avgpipe.cli.config import LearningOptions, ProfilingOptions, TrainConfig, WorkloadOptions
from avgpipe.cli.measuring import profile_of
from avgpipe.cli.options import words
from avgpipe.cli.output import show_status
from avgpipe.cli.resolve import resolve
from avgpipe.files import make_folder, read_json
from avgpipe.measure.search import profiled_sizes
from avgpipe.plan import Plan
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.profile import Profile
from avgpipe.ranks.environment import cores
from avgpipe.report.course import read_metrics
from avgpipe.systems import SYSTEMS
from avgpipe.tasks import check_workload, find_workload
from avgpipe.units import duration, format_bytes, format_seconds
from avgpipe_lab.commands import CompareConfig
from avgpipe_lab.compare.comparison import (
    DOES_NOT_FIT,
    INTERRUPTED,
    NOT_RUN,
    OK,
    REFUSED,
    Comparison,
    Figures,
    SystemResult,
)
from avgpipe_lab.compare.process import Caught, Runner, run_in_process, verdict
from avgpipe_lab.planning.of_system import best_of_system

_COMMON = tuple(f.name for f in fields(LearningOptions) if f.name not in ("json", "given"))


def options_of(config: CompareConfig, system: str, seed: int | None = None) -> dict[str, Any]:
    """Return the options of a run: those that were given and that the system does not set, and its folder."""
    found = {name: value for name, value in config.explicit.items() if name in _COMMON}
    found |= {**sizes_of(config, system), "system": system, "stages": config.stages}
    # The copy for a thread that writes the checkpoint would count as the system's memory.
    return {**found, "wait_for_checkpoints": True, "out": str(folder_of(config, system, seed))}


def sizes_of(config: CompareConfig, system: str) -> dict[str, int]:
    """Return the pipelines and micro-batches that were given and that the system leaves open."""
    found, wanted = {}, config.micro_batches
    if config.pipelines is not None:
        found["pipelines"] = config.pipelines
    # PipeDream also has whole batches in flight.
    if wanted is not None and systems.micro_batches(system, config.stages, None, wanted) >= wanted:
        found["micro_batches"] = wanted
    return {name: value for name, value in found.items() if name not in SYSTEMS[system]}


def folder_of(config: CompareConfig, system: str, seed: int | None = None) -> Path:
    """Return the folder of a run; with several seeds each has one within the system's folder."""
    home = Path(config.out) / system
    return home if seed is None or config.seeds == 1 else home / f"seed-{seed}"


def words_of(config: CompareConfig, system: str, seed: int, plan: Path | None = None) -> list[str]:
    """Return the words after ``avgpipe`` of a run; ``plan``: the file with the tuned plan."""
    options = options_of(config, system, seed)
    if config.seeds > 1:
        options["seed"] = seed
    if plan is not None:
        options["plan"] = str(plan)
    return ["train", options.pop("workload"), *words(options)]


Plans = dict[str, Plan | SystemResult]  # of each system, or why it cannot run


class Study:
    """Runs systems one after the other, each as ``avgpipe train`` in a process and a folder of its own.

    Attributes:
        caught: The signals that have arrived; the remaining runs are then left out.
    """

    def __init__(self, config: CompareConfig, runner: Runner = run_in_process) -> None:
        self.config, self._runner = config, runner
        self._known: Mapping[str, Any] = {}  # summary of the first run that finished
        self.caught: Caught = []

    def say(self, line: str) -> None:
        show_status("")
        print(line, file=sys.stderr, flush=True)

    def profile(self) -> tuple[Profile, int]:
        """Profile the workload, and write the profile to the folder."""
        config = self.config
        batch_size = check_workload(config.workload, config.build_options()).batch_size
        asked = {
            f.name: getattr(config, f.name) for f in fields(WorkloadOptions) if f.name in config.explicit
        }
        profiling = ProfilingOptions.of(**{**asked, "workload": config.workload})
        self.say(f"profiling for about {profiling.budget_s:g} s, to choose plans")
        at_once = min(config.stages, cores()) if config.device == "cpu" else 1
        profile = profile_of(profiling, profiled_sizes(batch_size), at_once)
        profile.save(Path(config.out) / "profile.json")
        return profile, batch_size

    def asked_plans(self) -> Plans:
        """Return the plan of each system without the tuner's choices, or why it cannot run."""
        found: Plans = {}
        for system in self.config.systems:
            try:
                asked = TrainConfig.of(**options_of(self.config, system))
                found[system] = resolve(asked).to_plan()  # as far as known without the data
            except (ValueError, TypeError) as error:
                found[system] = SystemResult(system, REFUSED, reason=str(error))
        return found

    def plans(self) -> Plans:
        """Return the plan of each system, the asked one or the tuner's choice. PipelineError if profiling fails."""
        found = self.asked_plans()
        if self.config.tunes:
            profile, batch_size = self.profile()
            able = [system for system, plan in found.items() if isinstance(plan, Plan)]
            found |= {system: self._tuned(system, profile, batch_size) for system in able}
        return found

    def _tuned(self, system: str, profile: Profile, batch_size: int) -> Plan | SystemResult:
        cluster = Cluster.like(profile, self.config.stages, self.config.memory_limit_bytes)
        try:
            best = best_of_system(system, profile, cluster, batch_size, sizes_of(self.config, system))
        except ValueError as error:
            return SystemResult(system, DOES_NOT_FIT, reason=str(error))
        plan = best.plan
        recompute = "" if plan.recompute == "never" else f", recomputes {plan.recompute}"
        self.say(
            f"{system}: pipelines {plan.pipelines}, micro-batches {plan.micro_batches}, advance {plan.advance}"
            f"{recompute}; predicted {format_seconds(best.batch_s)} a batch, "
            f"{format_bytes(max(best.memory_bytes))} on the worker that needs most"
        )
        return plan

    def compare(self, plans: Plans) -> Comparison:
        """Train each system with each seed, and return the results, with the facts that all runs share."""
        ended: dict[str, dict[int, SystemResult]] = {system: {} for system in self.config.systems}
        config = self.config
        seeds = range(config.seed, config.seed + config.seeds)
        order = [(system, seed) for system in ended for seed in seeds]
        for number, (system, seed) in enumerate(order, 1):
            name = f"{system}, seed {seed}" if config.seeds > 1 else system
            ended[system][seed] = self._result(
                system, seed, plans[system], f"{number} of {len(order)}: {name}"
            )
        known, name = self._known, find_workload(config.workload).name
        preset, title = known.get("preset", config.preset), known.get("title")
        return Comparison(
            what=name + (f" {preset}" if preset else "") + (f" ({title})" if title else ""),
            workers=config.stages,
            outcomes=tuple(SystemResult.joined(runs) for runs in ended.values()),
            metric_name=known.get("metric_name", "metric"),
            lower_is_better=known.get("lower_is_better", True),
            trivial=known.get("trivial_metric"),
            target=known.get("target", config.target),
            memory_limit_bytes=config.memory_limit_bytes,
        )

    def _result(self, system: str, seed: int, plan: Plan | SystemResult, place: str) -> SystemResult:
        if self.caught:
            return SystemResult(system, NOT_RUN)
        begun = time.monotonic()
        result = plan if isinstance(plan, SystemResult) else self._trained(system, seed, plan, place)
        what = "done" if result.status == OK else ": ".join(filter(None, (result.status, result.reason)))
        self.say(f"{place}: {what} ({duration(time.monotonic() - begun)})")
        return result

    def _trained(self, system: str, seed: int, plan: Plan, place: str) -> SystemResult:
        """Train to the end; ``place`` names the run among all."""
        config, file = self.config, None
        out = folder_of(config, system, seed)
        log = out.with_name(f"{out.name}.log")
        make_folder(log.parent)
        if config.tunes:
            file = Path(config.out) / f"{system}-plan.json"
            plan.save(file)
        if not sys.stderr.isatty():
            self.say(place)
        code = self._runner(words_of(config, system, seed, file), log, self.caught, _ticking(place, log))
        rows, ended = tuple(filter(None, [read_metrics(out)])), out / "summary.json"
        if not ended.is_file():  # with it the run finished, whatever the exit code
            status, reason = (INTERRUPTED, "") if self.caught else verdict(code, _said(log))
            return SystemResult(system, status, reason=reason, rows=rows)
        summary = read_json(ended)
        self._known = self._known or summary
        figures = Figures.of(summary, plan.pipelines if plan.spread else max(plan.replication or [1]))
        warnings = (*summary["warnings"], *warm_up_warnings(plan, figures.batches))
        limit, needed = config.memory_limit_bytes, figures.peak_memory_bytes
        fits = limit is None or needed <= limit
        status, reason = (OK, "") if fits else (DOES_NOT_FIT, f"needs {format_bytes(needed)}")
        return SystemResult(system, status, figures, reason, warnings, rows=rows)


def _said(log: Path) -> str:
    return log.read_text(errors="replace").rstrip() if log.is_file() else ""


def _ticking(place: str, log: Path) -> Callable[[], None]:
    """Return a function that shows the time of a run and the last line of its log."""
    begun = time.monotonic()

    def tick() -> None:
        last = "".join(_said(log).splitlines()[-1:])
        show_status(f"{place}, {duration(time.monotonic() - begun)}: {last}")

    return tick


def warm_up_warnings(plan: Plan, batches: int) -> list[str]:
    """Warn of a run whose batches were mostly warm-up, which is slower than the rest of a long run."""
    rounds = plan.warmup_rounds or 0
    waiting = min(batches, rounds * plan.batches_per_round)
    if 2 * waiting <= batches:
        return []
    return [
        f"{waiting} of its {batches} batches are the warm-up, in which pipelines wait for each other: a long run is "
        "faster; --warmup-rounds 0 leaves it out"
    ]
