"""What ``avgpipe compare`` makes of its runs' folders: the comparison, its files and its pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from avgpipe.cli.compare_runs import Ended, Question
from avgpipe.cli.folder import read_metrics, strict_json
from avgpipe.files import write_atomically
from avgpipe.plan import Plan
from avgpipe.report.compare import DOES_NOT_FIT, OK, Comparison, Figures, Outcome
from avgpipe.report.compare_advice import advice
from avgpipe.report.compare_curves import Curve, plot_curves
from avgpipe.report.compare_text import markdown, notes
from avgpipe.report.compare_timelines import plot_timelines
from avgpipe.timeline.timeline import Timeline
from avgpipe.units import format_bytes


def comparison(question: Question, ended: Sequence[Ended]) -> Comparison:
    """From the folders of the runs that ended."""
    summaries = {
        run.system: json.loads((question.out / run.system / "summary.json").read_text())
        for run in ended
        if run.status == OK
    }
    known: dict[str, Any] = next(iter(summaries.values()), {})
    title = f" ({known['title']})" if known.get("title") else ""
    preset = known.get("preset", question.asked.get("preset", "tiny"))
    return Comparison(
        what=f"{question.workload} {preset}{title}",
        workers=question.stages,
        outcomes=tuple(_outcome(question, run, summaries.get(run.system)) for run in ended),
        metric_name=known.get("metric_name", "metric"),
        lower_is_better=known.get("lower_is_better", True),
        trivial=known.get("trivial_metric"),
        target=question.asked.get("target"),
        memory_limit_bytes=question.memory_limit_bytes,
    )


def _outcome(question: Question, run: Ended, summary: dict[str, Any] | None) -> Outcome:
    if summary is None:
        return Outcome(run.system, run.status, None, run.reason)
    plan = Plan.load(question.out / run.system / "plan.json")
    replicas = plan.pipelines if plan.spread else max(plan.replication or [1])
    figures, limit = Figures.of(summary, replicas), question.memory_limit_bytes
    warnings = tuple(summary["warnings"])
    if limit is not None and figures.peak_memory_bytes > limit:
        needs = f"needs {format_bytes(figures.peak_memory_bytes)}"
        return Outcome(run.system, DOES_NOT_FIT, figures, needs, warnings)
    return Outcome(run.system, OK, figures, warnings=warnings)


def write_results(question: Question, found: Comparison, interrupted: bool) -> str:
    """compare.json, compare.md and the pictures, to the comparison's folder; returns the content of compare.json."""
    text = strict_json(_to_json(question, found, interrupted), indent=2) + "\n"
    write_atomically(question.out / "compare.json", text)
    write_atomically(question.out / "compare.md", markdown(found))
    _write_pictures(question, found)
    return text


def _to_json(question: Question, found: Comparison, interrupted: bool) -> dict[str, Any]:
    facts = {name: value for name, value in asdict(found).items() if name != "outcomes"}
    return {
        "workload": question.workload,
        **facts,
        "interrupted": interrupted,
        "systems": found.to_json(),
        "best": {column.key: found.best_systems(column) for column in found.columns()},
        "notes": notes(found),
        "advice": advice(found),
        "out": str(question.out),
    }


def _write_pictures(question: Question, found: Comparison) -> None:
    """Of whatever the systems have done, also those that did not end."""
    curves, timelines = {}, {}
    for outcome in found.outcomes:
        folder = question.out / outcome.system
        name = outcome.system if outcome.status == OK else f"{outcome.system} ({outcome.status})"
        curve = Curve.of(read_metrics(folder))
        if curve.loss:
            curves[name] = curve
        if (folder / "timeline.json").is_file():
            timelines[name] = Timeline.from_chrome_trace(folder / "timeline.json")
    heading = f"{found.what}, {found.workers} workers"
    if curves:
        path = question.out / "curves.png"
        plot_curves(curves, heading, found.metric_name, found.trivial, found.target, path)
    if timelines:
        plot_timelines(timelines, heading, question.out / "timelines.png")
