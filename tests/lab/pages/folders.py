"""Folders as avgpipe train and avgpipe compare write them, made without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from avgpipe.plan import Plan
from avgpipe.timeline import Event, Timeline

BATCH_S, BATCH_SIZE = 0.04, 8


def train_row(batch: int, **more: Any) -> dict[str, Any]:
    """Of the batch with this number; its loss falls from 4 towards 1."""
    done = batch + 1
    row = {"kind": "train", "batch": batch, "pipeline": None, "epoch": 0, "samples": BATCH_SIZE * done}
    return {**row, "loss": 1 + 3 / (1 + batch / 20), "seconds": BATCH_S * done, "lr": 0.01, **more}


def valid_row(batch: int, **more: Any) -> dict[str, Any]:
    """After so many batches."""
    place = {"kind": "valid", "epoch": 0, "batch": batch, "samples": BATCH_SIZE * batch}
    loss = 1.5 + 3 / (1 + batch / 20)
    apart = 0.1 if batch else 0.0
    distances = {"norm": 10.0, "to_reference": [apart, apart], "between": [[0.0, apart], [apart, 0.0]]}
    found = {"loss": loss, "metric": 20.0, "metrics": {"perplexity": 20.0}, "distances": distances}
    facts = {"peak_memory_bytes": [2**28 + batch * 2**12, 2**27], "total_batches": 1000, "skipped_updates": 0}
    busy = {"worker_busy_fraction": [0.8, 0.6], "samples_per_second": 200.0} if batch else {}
    return {**place, **found, **facts, **busy, "seconds": BATCH_S * batch, **more}


def timeline(batches: int, micro_batches: int = 4) -> Timeline:
    """Two stages and two pipelines that share each batch; the last stage waits for activations."""
    events, step = [], BATCH_S / (4 * micro_batches)
    for j in range(batches):
        for i in range(2):
            for m in range(micro_batches):
                at = j * BATCH_S + (2 * m + i) * 2 * step
                events.append(Event(0, i, j, m, "F", at, at + step))
                events.append(Event(1, i, j, m, "recv", at, at + step, "F"))
                events.append(Event(1, i, j, m, "F", at + step, at + 1.5 * step))
                events.append(Event(0, i, j, m, "B", at + step, at + 2 * step))
                events.append(Event(1, i, j, m, "B", at + 1.5 * step, at + 2 * step))
    return Timeline(2, tuple(events))


def summary(batches: int, **more: Any) -> dict[str, Any]:
    seconds = BATCH_S * batches
    return {
        "workload": "awd-lstm", "preset": "tiny", "seed": 0, "target": None, "title": "a text",
        "system": "avgpipe", "stages": 2, "pipelines": 2, "micro_batches": 4, "schedule": "advance-forward",
        "batch_size": BATCH_SIZE, "metric_name": "perplexity", "lower_is_better": True,
        "batches": batches, "samples": BATCH_SIZE * batches, "metric": 20.0, "best_metric": 19.0,
        "samples_to_target": None, "seconds_to_target": None, "epochs": 1.0, "train_seconds": seconds,
        "worker_busy_fraction": [0.8, 0.6], "peak_memory_bytes": [2**28, 2**27],
        "samples_per_second": 200.0, "trivial_metric": 50.0, "parameters": 1000, "skipped_updates": 0,
        "versions": {"avgpipe": "0.1", "torch": "2.13"}, "warnings": ["stages idle more"],
        **more,
    }  # fmt: skip


def write_run(path: Path, batches: int = 60, *, shown: int = 20, ended: bool = True, **more: Any) -> Path:
    """Write the folder of a run; ``more``: of its summary."""
    path.mkdir(parents=True)
    rows = [valid_row(0)]
    for batch in range(batches):
        rows.append(train_row(batch))
        if (batch + 1) % max(1, batches // 4) == 0:
            rows.append(valid_row(batch + 1))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Plan(stages=2, pipelines=2, micro_batches=4).save(path / "plan.json")
    (path / "run.json").write_text(json.dumps({"workload": "awd-lstm", "preset": "tiny", "epochs": 1}))
    if ended:
        (path / "summary.json").write_text(json.dumps(summary(batches, **more)))
        timeline(shown).to_chrome_trace(path / "timeline.json")
    return path
