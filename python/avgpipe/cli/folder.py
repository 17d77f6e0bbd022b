"""The folder of a run: its files, what a resumed run reads of them, and the printed summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from avgpipe.cli.config import TrainConfig
from avgpipe.cli.resolve import RUN_FILE
from avgpipe.files import make_folder, read_json, strict_json, write_atomically
from avgpipe.plan import Plan
from avgpipe.report.course import read_metrics, target_text
from avgpipe.units import duration, format_bytes


class RunFolder:
    """Writes the files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics: FileIO | None = None
        self._rows = b""  # not yet written to the disk

    @property
    def is_open(self) -> bool:
        return self._metrics is not None

    def open(self, config: TrainConfig, plan: Plan, kept: Iterable[Mapping[str, Any]]) -> None:
        """Make the folder and begin its files, metrics.jsonl with the rows in ``kept``."""
        make_folder(self.path)
        self.write(RUN_FILE, config.to_json())
        plan.save(self.path / "plan.json")
        self.write("metrics.jsonl", "".join(strict_json(row) + "\n" for row in kept))
        # Line by line, so that what a killed run has written stays.
        self._metrics = (self.path / "metrics.jsonl").open("ab", buffering=0)

    def row(self, kind: str, **values: Any) -> None:
        """Add a row to metrics.jsonl; while the disk accepts none, rows are kept until ``close``."""
        if self._metrics is not None:
            self._rows += (strict_json({"kind": kind, **values}) + "\n").encode()
            with suppress(OSError):
                self._write_rows()

    def write(self, name: str, content: str) -> None:
        write_atomically(self.path / name, content)

    def close(self) -> None:
        if self._metrics is not None:
            with self._metrics:
                self._write_rows()
            self._metrics = None

    def _write_rows(self) -> None:
        assert self._metrics is not None
        while self._rows:
            self._rows = self._rows[self._metrics.write(self._rows) :]  # a disk may accept a part of it


def rows_until(path: Path, batches: int) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl up to a checkpoint after batch ``batches``."""
    # Training rows name a batch, counted from 0; validations the number of batches before them.
    return [r for r in read_metrics(path) if r["batch"] + (r["kind"] == "train") <= batches]


# ---- printed summary -------------------------------------------------------------------------------------------------


def describe(out: Path) -> str:
    """Return a summary of the run in ``out`` in a few lines."""
    s = read_json(out / "summary.json")
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
