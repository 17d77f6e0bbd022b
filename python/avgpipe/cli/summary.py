"""What a run came to: ``summary.json``, and the few lines that a person reads."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from avgpipe import __version__
from avgpipe.cli.folder import Tally, read_metrics, strict_json
from avgpipe.cli.progress import spell_s
from avgpipe.cli.settings import TrainSettings
from avgpipe.plan import Plan
from avgpipe.timeline.timeline import Timeline
from avgpipe.units import format_bytes

if TYPE_CHECKING:
    from avgpipe.workloads.workload import Workload


def summarise(
    settings: TrainSettings,
    plan: Plan,
    tally: Tally,
    workload: Workload,
    epochs: float,
    parameters: int,
    peak_memory: Sequence[int],
    timeline: Timeline,
    skipped_updates: int,
    warnings: Sequence[str],
) -> str:
    """The content of ``summary.json``.

    ``epochs`` may end in a part of one. Times are of training, without validations and checkpoints. Busy and bubble
    fractions are of ``timeline``, a stretch without pauses. ``skipped_updates``: since the run began, or was resumed.
    ``warnings``: of the runtime.
    """
    import torch

    values = {
        "workload": settings.workload,
        "system": plan.system,
        "stages": plan.stages,
        "pipelines": plan.pipelines,
        "micro_batches": plan.micro_batches,
        "batch_size": settings.batch_size,
        "schedule": plan.schedule,
        "advance": plan.advance,
        "epochs": round(epochs, 4),
        "batches": tally.batches,
        "samples": tally.samples,
        "train_seconds": tally.seconds,
        "samples_per_second": tally.samples / tally.seconds if tally.seconds > 0 else None,
        "metric_name": workload.metric_name,
        "lower_is_better": workload.lower_is_better,
        "metric": tally.metric,
        "target": settings.target,
        "seconds_to_target": tally.seconds_to_target,
        "worker_busy_fraction": timeline.worker_busy_fraction,
        "bubble_fraction": timeline.bubble_fraction,
        "peak_memory_bytes": list(peak_memory),
        "parameters": parameters,
        "seed": settings.seed,
        "versions": {"avgpipe": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "preset": settings.preset,
        "title": workload.title,
        "best_metric": tally.best,
        "trivial_metric": workload.trivial[1] if workload.trivial else None,
        "warnings": list(warnings),
        "skipped_updates": skipped_updates,
    }
    return strict_json(values, indent=2) + "\n"


def unbroken(timeline: Timeline, stretches: Sequence[tuple[int, int]]) -> Timeline:
    """The part of a timeline with the longest stretch of batches that all stages still have: pauses are no bubbles."""
    begins: dict[int, int] = {}
    for event in timeline.events:
        begins[event.stage] = min(begins.get(event.stage, event.batch), event.batch)
    oldest = max(begins.values(), default=0)
    kept = [(max(first, oldest), last) for first, last in stretches if last >= oldest]
    if not kept:
        return timeline
    return timeline.window(*max(kept, key=lambda s: s[1] - s[0]))


def load_summary(out: str | Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((Path(out) / "summary.json").read_text())
    return values


def describe(out: str | Path) -> str:
    """The run in ``out`` in a few lines."""
    s = load_summary(out)
    valid = [row["metric"] for row in read_metrics(Path(out)) if row["kind"] == "valid"]
    before = next(iter(valid), None)
    busy = ", ".join(f"{100 * share:.0f} %" for share in s["worker_busy_fraction"])
    memory = ", ".join(format_bytes(size) for size in s["peak_memory_bytes"])
    trivial = s.get("trivial_metric")
    to_beat = "" if trivial is None else f"; the trivial answer: {_number(trivial)}"
    lines = [
        f"{s['metric_name']}: {_number(before)} before, {_number(s['metric'])} after {s['batches']} batches "
        f"({s['samples']} samples, {s['epochs']:g} epochs) in {spell_s(s['train_seconds'])} of training{to_beat}",
        f"speed: {_number(s['samples_per_second'])} samples/s; bubbles {100 * s['bubble_fraction']:.0f} %; "
        f"busy: {busy}; peak memory: {memory}",
    ]
    if s.get("skipped_updates"):
        lines.append(f"updates left out, as gradients had infinities or NaN: {s['skipped_updates']}")
    if s["target"] is not None:
        reached = s["seconds_to_target"]
        when = f"reached after {spell_s(reached)}" if reached is not None else "not reached"
        lines.append(f"target {s['target']:g}: {when}")
    lines.append(f"folder: {out}; picture of the timeline: {Path(out) / 'timeline.png'}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
