"""``avgpipe compare``: runs ``avgpipe train`` with several systems on the same work."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import typer

from avgpipe.cli.config import ProfilingOptions, TrainConfig, WorkloadOptions
from avgpipe.cli.measuring import profile_of
from avgpipe.cli.options import words
from avgpipe.cli.output import FAILED, arguments, running, say, show, tell
from avgpipe.cli.resolve import check_device, check_folder, joined_ranks, resolve
from avgpipe.files import strict_json, write_atomically
from avgpipe.measure.search import profiled_sizes
from avgpipe.plan import Plan
from avgpipe.planning.profile import Profile
from avgpipe.ranks.environment import cores
from avgpipe.report.course import read_metrics
from avgpipe.systems import SYSTEMS
from avgpipe.tasks import check_workload, find_workload
from avgpipe.timeline.timeline import Timeline
from avgpipe.units import duration
from avgpipe_lab.commands import CompareConfig
from avgpipe_lab.compare import text as text_of
from avgpipe_lab.compare.comparison import INTERRUPTED, OK, Comparison, SystemResult
from avgpipe_lab.compare.pictures import plot_timelines
from avgpipe_lab.compare.process import Caught, Runner, noting_signals, run_in_process, verdict
from avgpipe_lab.compare.study import Ended, Study, options_of

_NO_STAGES = tuple(name for name, row in SYSTEMS.items() if "stages" in row)


def run(asked: CompareConfig) -> None:
    with arguments():
        name = find_workload(asked.workload).name
        config = replace(asked, out=asked.out or f"runs/compare-{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        check(config)
        Path(config.out).mkdir(parents=True, exist_ok=True)
    with running():
        answer(config)


def check(config: CompareConfig) -> None:
    """Refuse what no system can do (ValueError, OSError); what only some cannot do becomes their rows."""
    if joined_ranks() is not None:
        raise ValueError("compare starts the workers of each system itself: run it once, without torchrun")
    # The system with the fewest requirements, except for a layer for each stage.
    splits = any(name not in _NO_STAGES for name in config.systems)
    least = {
        **options_of(config, "model-parallel"),
        "stages": config.stages if splits else 1,
        "out": config.out,
    }
    settings = resolve(TrainConfig.of(**least))
    out = Path(config.out)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(
            f"--out {out} is not empty ({min(p.name for p in out.iterdir())}): name a new folder"
        )
    check_folder(settings)
    check_device(settings.device)
    plans = CommandStudy(config).asked_plans().values()
    refused = [plan.reason for plan in plans if isinstance(plan, SystemResult)]
    if len(refused) == len(plans):
        raise ValueError(f"no system can run: {refused[0]}")


def answer(config: CompareConfig, runner: Runner = run_in_process) -> None:
    """Run all systems, fill the folder, print. Exits with 1 if no system finished, as after a signal."""
    study = CommandStudy(config, runner)
    plans = study.plans()
    with noting_signals(study.caught):
        found = study.compare(plans)
        text = write_results(config, found, study.is_interrupted)
    if config.json:
        sys.stdout.write(text)
    else:
        best = ["*: the best of its column"] if len(found.ranked) > 1 else []
        notes = [*best, *text_of.notes(found), text_of.advice(found), f"folder: {config.out}"]
        show(text_of.table(found), *notes)
    sys.stdout.flush()
    if study.caught:
        number = study.caught[0]
        say(f"interrupted by {number.name}: the system that was running is ended")
        raise typer.Exit(128 + number)
    if all(outcome.figures is None for outcome in found.outcomes):
        say(f"no system trained to its end: see the logs in {config.out}")
        raise typer.Exit(FAILED)


# ---- the options of a run --------------------------------------------------------------------------------------------


def _options(config: CompareConfig, system: str, out: Path) -> dict[str, Any]:
    # The copy for a thread that writes the checkpoint would count as the system's memory.
    return {**options_of(config, system), "wait_for_checkpoints": True, "out": str(out)}


def folder_of(config: CompareConfig, system: str, seed: int | None = None) -> Path:
    """Return the folder of a run; with several seeds each has one within the system's folder."""
    home = Path(config.out) / system
    return home if seed is None or config.seeds == 1 else home / f"seed-{seed}"


def words_of(config: CompareConfig, system: str, seed: int, plan: Path | None = None) -> list[str]:
    """Return the words after ``avgpipe`` of a run; ``plan``: the file with the tuned plan."""
    options = _options(config, system, folder_of(config, system, seed))
    if config.seeds > 1:
        options["seed"] = seed
    if plan is not None:
        options["plan"] = str(plan)
    return ["train", options.pop("workload"), *words(options)]


# ---- one after the other ---------------------------------------------------------------------------------------------


class CommandStudy(Study):
    """A comparison whose runs are ``avgpipe train`` in a process and a folder of their own.

    Attributes:
        caught: The signals that have arrived; the remaining runs are then left out.
    """

    def __init__(self, config: CompareConfig, runner: Runner = run_in_process) -> None:
        super().__init__(config, find_workload(config.workload).name)
        self._runner = runner
        self.caught: Caught = []

    @property
    def is_interrupted(self) -> bool:
        return bool(self.caught)

    def say(self, line: str) -> None:
        tell("")
        print(line, file=sys.stderr, flush=True)

    def plan(self, system: str) -> Plan:
        options = _options(self.config, system, folder_of(self.config, system))
        return resolve(TrainConfig.of(**options)).to_plan()  # as far as known without the data

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

    def train(self, system: str, seed: int, plan: Plan, place: str) -> Ended:
        config, file = self.config, None
        out = folder_of(config, system, seed)
        log = out.with_name(f"{out.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        if config.tunes:
            file = Path(config.out) / f"{system}-plan.json"
            plan.save(file)
        if not sys.stderr.isatty():
            self.say(place)
        code = self._runner(words_of(config, system, seed, file), log, self.caught, _ticking(place, log))
        rows, summary = read_metrics(out), out / "summary.json"
        if summary.is_file():  # it finished, whatever the exit code
            return Ended(OK, summary=json.loads(summary.read_text()), rows=rows)
        status, reason = (INTERRUPTED, "") if self.caught else verdict(code, _said(log))
        return Ended(status, reason, rows=rows)


def _said(log: Path) -> str:
    return log.read_text(errors="replace").rstrip() if log.is_file() else ""


def _ticking(place: str, log: Path) -> Callable[[], None]:
    """Return a function that shows the time of a run and the last line of its log."""
    begun = time.monotonic()

    def tick() -> None:
        last = "".join(_said(log).splitlines()[-1:])
        tell(f"{place}, {duration(time.monotonic() - begun)}: {last}")

    return tick


# ---- results ---------------------------------------------------------------------------------------------------------


def write_results(config: CompareConfig, found: Comparison, interrupted: bool) -> str:
    """Write compare.json, compare.md and the pictures; returns the content of compare.json."""
    facts = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "outcomes"}
    content = {
        "workload": config.workload,
        **facts,
        "interrupted": interrupted,
        "systems": found.to_json(),
        "tuned": config.tunes,
        "best": {column.key: found.best_systems(column) for column in found.columns()},
        "notes": text_of.notes(found),
        "advice": text_of.advice(found),
        "out": config.out,
    }
    text = strict_json(content, indent=2) + "\n"
    write_atomically(Path(config.out) / "compare.json", text)
    write_atomically(Path(config.out) / "compare.md", text_of.markdown(found))
    _write_pictures(config, found)
    return text


def _write_pictures(config: CompareConfig, found: Comparison) -> None:
    """Draw the results of all systems, also of those that did not finish."""
    out, timelines = Path(config.out), {}
    for outcome in found.outcomes:
        home = folder_of(config, outcome.system)
        paths = [*home.glob("timeline.json"), *sorted(home.glob("seed-*/timeline.json"))]
        if paths:
            timelines[outcome.label] = Timeline.from_chrome_trace(paths[0])
    if found.ranked:
        found.plot(out / "bars.png")
    if any(row["kind"] == "train" for o in found.outcomes for rows in o.rows for row in rows):
        found.plot_curves(out / "curves.png")
    if timelines:
        plot_timelines(timelines, f"{found.what}, {found.workers} workers", out / "timelines.png")
