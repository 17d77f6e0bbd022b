"""``avgpipe compare``: systems on the same work in turn, and what is made of their runs' folders."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

from avgpipe.cli.compare_runs import (
    Runner,
    Signals,
    SystemRun,
    common_options,
    refusal,
    run_all,
    run_in_process,
)
from avgpipe.cli.config import CompareConfig, TrainConfig
from avgpipe.cli.errors import FAILED, arguments, running, say
from avgpipe.cli.folder import read_metrics
from avgpipe.cli.output import show, strict_json
from avgpipe.cli.resolve import check_device, check_folder, joined_ranks, resolve
from avgpipe.files import write_atomically
from avgpipe.plan import Plan
from avgpipe.report.compare import (
    DOES_NOT_FIT,
    OK,
    Comparison,
    Figures,
    SystemResult,
    advice,
    markdown,
    notes,
    table,
)
from avgpipe.report.pictures import Curve, plot_curves, plot_timelines
from avgpipe.systems import SYSTEMS
from avgpipe.timeline.timeline import Timeline
from avgpipe.units import format_bytes

_FILE_COLUMNS = 120  # of a table that is not for a terminal
_NO_STAGES = tuple(name for name, row in SYSTEMS.items() if "stages" in row)


def run(asked: CompareConfig) -> None:
    with arguments():
        config = replace(
            asked, out=asked.out or f"runs/compare-{asked.workload}-{time.strftime('%Y%m%d-%H%M%S')}"
        )
        check(config)
        Path(config.out).mkdir(parents=True, exist_ok=True)
    with running():
        answer(config)


def check(config: CompareConfig) -> None:
    """Refuse what no system could do. What only some cannot becomes their rows. ValueError or OSError."""
    if joined_ranks() is not None:
        raise ValueError("compare starts the workers of each system itself: run it once, without torchrun")
    # The system that asks for least, but for a layer per stage.
    splits = any(name not in _NO_STAGES for name in config.systems)
    least = {
        **common_options(config),
        "system": "model-parallel",
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
    refused = [refusal(config, name) for name in config.systems]
    if all(refused):
        raise ValueError(f"no system can run: {refused[0]}")


def answer(config: CompareConfig, runner: Runner = run_in_process) -> None:
    """Run all, fill the folder and print. Exits with 1 if no system trained to its end, as usual after a signal."""
    with Signals() as signals:
        ended = run_all(config, runner, signals)
        found = comparison(config, ended)
        text = write_results(config, found, signals.caught is not None)
    if config.json:
        sys.stdout.write(text)
    else:
        best = ["*: the best of its column"] if len(found.ranked) > 1 else []
        words = [*best, *notes(found), advice(found), f"folder: {config.out}"]
        show(table(found), *words, columns=_FILE_COLUMNS)
    sys.stdout.flush()
    if signals.caught is not None:
        say(f"interrupted by {signals.caught.name}: the system that was running is ended")
        raise typer.Exit(128 + signals.caught)
    if all(outcome.figures is None for outcome in found.outcomes):
        say(f"no system trained to its end: see the logs in {config.out}")
        raise typer.Exit(FAILED)


# ---- what the folders say --------------------------------------------------------------------------------------------


def comparison(config: CompareConfig, ended: Sequence[SystemRun]) -> Comparison:
    """Read the folders of the runs that ended."""
    summaries = {
        run.system: json.loads((Path(config.out) / run.system / "summary.json").read_text())
        for run in ended
        if run.status == OK
    }
    known: dict[str, Any] = next(iter(summaries.values()), {})
    title = f" ({known['title']})" if known.get("title") else ""
    return Comparison(
        what=f"{config.workload} {config.preset}{title}",
        workers=config.stages,
        outcomes=tuple(_result(config, run, summaries.get(run.system)) for run in ended),
        metric_name=known.get("metric_name", "metric"),
        lower_is_better=known.get("lower_is_better", True),
        trivial=known.get("trivial_metric"),
        target=config.target,
        memory_limit_bytes=config.memory_limit_bytes,
    )


def _result(config: CompareConfig, run: SystemRun, summary: dict[str, Any] | None) -> SystemResult:
    if summary is None:
        return SystemResult(run.system, run.status, None, run.reason)
    plan = Plan.load(Path(config.out) / run.system / "plan.json")
    replicas = plan.pipelines if plan.spread else max(plan.replication or [1])
    figures, limit = Figures.of(summary, replicas), config.memory_limit_bytes
    warnings = tuple(summary["warnings"])
    if limit is not None and figures.peak_memory_bytes > limit:
        needs = f"needs {format_bytes(figures.peak_memory_bytes)}"
        return SystemResult(run.system, DOES_NOT_FIT, figures, needs, warnings)
    return SystemResult(run.system, OK, figures, warnings=warnings)


def write_results(config: CompareConfig, found: Comparison, interrupted: bool) -> str:
    """Write compare.json, compare.md and the pictures; returns the content of compare.json."""
    facts = {name: value for name, value in asdict(found).items() if name != "outcomes"}
    content = {
        "workload": config.workload,
        **facts,
        "interrupted": interrupted,
        "systems": found.to_json(),
        "best": {column.key: found.best_systems(column) for column in found.columns()},
        "notes": notes(found),
        "advice": advice(found),
        "out": config.out,
    }
    text = strict_json(content, indent=2) + "\n"
    write_atomically(Path(config.out) / "compare.json", text)
    write_atomically(Path(config.out) / "compare.md", markdown(found))
    _write_pictures(config, found)
    return text


def _write_pictures(config: CompareConfig, found: Comparison) -> None:
    """Draw whatever the systems have done, also those that did not end."""
    curves, timelines = {}, {}
    for outcome in found.outcomes:
        folder = Path(config.out) / outcome.system
        name = outcome.system if outcome.status == OK else f"{outcome.system} ({outcome.status})"
        curve = Curve.of(read_metrics(folder))
        if curve.loss:
            curves[name] = curve
        if (folder / "timeline.json").is_file():
            timelines[name] = Timeline.from_chrome_trace(folder / "timeline.json")
    heading = f"{found.what}, {found.workers} workers"
    if curves:
        path = Path(config.out) / "curves.png"
        plot_curves(curves, heading, found.metric_name, found.trivial, found.target, path)
    if timelines:
        plot_timelines(timelines, heading, Path(config.out) / "timelines.png")
