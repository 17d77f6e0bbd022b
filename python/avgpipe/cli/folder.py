"""The folder of a run: its files, what a resumed run reads of them, and the printed summary."""

from __future__ import annotations

import json
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Literal

from avgpipe.cli.config import TrainConfig
from avgpipe.cli.resolve import RUN_FILE
from avgpipe.files import strict_json, write_atomically
from avgpipe.plan import Plan
from avgpipe.report.course import read_metrics, target_text
from avgpipe.units import duration, format_bytes


class RunFolder:
    """Writes the files of a run, on the rank that ``writes``; on the others every method does nothing."""

    def __init__(self, path: Path, writes: bool) -> None:
        self.path, self._writes = path, writes
        self.is_open = False
        self._metrics: FileIO | None = None
        self._rows = b""  # not yet written to the disk

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def open(self, config: TrainConfig, plan: Plan) -> None:
        """Make the folder and begin its files."""
        self.is_open = True
        if not self._writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self.write(RUN_FILE, config.to_json())
        plan.save(self.path / "plan.json")
        # Line by line, so that what a killed run has written stays. An attempt that saved nothing may have
        # left rows.
        mode: Literal["ab", "wb"] = "ab" if config.resume else "wb"
        self._metrics = (self.path / "metrics.jsonl").open(mode, buffering=0)

    def row(self, kind: str, **values: Any) -> None:
        """Add a row to metrics.jsonl; while the disk accepts none, rows are kept until ``close``."""
        if self._metrics is not None:
            self._rows += (strict_json({"kind": kind, **values}) + "\n").encode()
            with suppress(OSError):
                self._write_rows()

    def write(self, name: str, content: str) -> None:
        if self._writes:
            write_atomically(self.path / name, content)

    def cut(self, batches: int) -> list[dict[str, Any]]:
        """Drop the rows of metrics.jsonl after batch ``batches``, of a checkpoint; return the others."""
        # Training rows name a batch, counted from 0; validations the number of batches before them.
        kept = [r for r in read_metrics(self.path) if r["batch"] + (r["kind"] == "train") <= batches]
        if self._writes:
            write_atomically(self.path / "metrics.jsonl", "".join(strict_json(row) + "\n" for row in kept))
        return kept

    def close(self) -> None:
        if self._metrics is not None:
            with self._metrics:
                self._write_rows()
            self._metrics = None

    def _write_rows(self) -> None:
        assert self._metrics is not None
        while self._rows:
            self._rows = self._rows[self._metrics.write(self._rows) :]  # a disk may accept a part of it


# ---- printed summary -------------------------------------------------------------------------------------------------


def describe(out: Path) -> str:
    """Return a summary of the run in ``out`` in a few lines."""
    s = json.loads((out / "summary.json").read_text())
    before = next((row["metric"] for row in read_metrics(out) if row["kind"] == "valid"), None)
    busy = ", ".join(f"{100 * share:.0f} %" for share in s["worker_busy_fraction"])
    memory = ", ".join(format_bytes(size) for size in s["peak_memory_bytes"])
    trivial = s.get("trivial_metric")
    baseline = "" if trivial is None else f"; baseline, the trivial answer: {number(trivial)}"
    learnt = f"{s['metric_name']}: {number(before)} before, {number(s['metric'])} after "
    if before is None and s["metric"] is None:  # nothing was validated
        learnt = ""
    lines = [
        f"{learnt}{s['batches']} batches "
        f"({s['samples']} samples, {s['epochs']:g} epoch{'s' * (s['epochs'] != 1)}) in "
        f"{duration(s['train_seconds'])} of training{baseline}",
        f"speed: {number(s['samples_per_second'])} samples/s; bubbles {100 * s['bubble_fraction']:.0f} %; "
        f"busy: {busy}; peak memory: {memory}",
    ]
    if s.get("skipped_updates"):
        lines.append(f"updates skipped because gradients had infinities or NaN: {s['skipped_updates']}")
    if s.get("lost") or s.get("joined"):
        lost, steps = s["lost"], sum(loss["steps_lost"] for loss in s["lost"])
        had = f", whose last {steps} steps other pipelines trained on" if steps else ""
        lines.append(f"pipelines lost: {len(lost)}{had}; joined: {len(s['joined'])}")
    if s["target"] is not None:
        reached = s["seconds_to_target"]
        when = f"reached after {duration(reached)}" if reached is not None else "not reached"
        lines.append(f"target {target_text(s['target'])}: {when}")
    lines.append(f"folder: {out}; picture of the timeline: {out / 'timeline.png'}")
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Format a figure for reading, "-" for None."""
    if value is None:
        return "-"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"
