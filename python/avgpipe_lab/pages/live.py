"""A running run, as its folder shows it: totals, speed, and whether it still runs."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from avgpipe.checkpoint.folder import is_saved_into
from avgpipe.files import open_regular
from avgpipe.report.course import numbers, parse_row, read_object

_RECENT = 200  # batches that the speed is measured over
_KEPT = 400  # losses that the picture shows
_SMOOTHING = 0.9
_QUIET_S = 60.0  # seconds without new rows, after which a run without a lock on its folder counts as stopped


@dataclass
class Progress:
    """The content of the rows of a run that were read; None for unknown values.

    Attributes:
        total: Batches of the whole run.
        losses: Last losses, smoothed.
        valid: Row of the last validation.
        before: Row of the first validation.
    """

    batches: int = 0
    total: int | None = None
    epoch: int | None = None
    samples: int = 0
    seconds: float = 0.0
    lr: float | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    valid: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    _marks: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def take(self, row: Mapping[str, Any]) -> None:
        """Add a row of metrics.jsonl."""
        self.samples, self.seconds, self.epoch = row["samples"], row["seconds"], row["epoch"]
        self.total = row.get("total_batches", self.total)
        if row["kind"] == "valid":
            self.valid, self.before = row, self.before or row
            self.warnings = row.get("warnings", self.warnings)
            return
        self.batches = max(
            self.batches, row["batch"] + 1
        )  # the share of a lost pipeline in a batch arrives later
        self.lr = row.get("lr")
        self._marks.append((self.batches, self.samples, self.seconds))
        loss = row["loss"]
        if loss is not None:  # as one that was not finite
            before = self.losses[-1] if self.losses else loss
            self.losses.append(_SMOOTHING * before + (1 - _SMOOTHING) * loss)

    @property
    def samples_per_second(self) -> float | None:
        """Return the speed over the last batches, without validations."""
        return self._per_second(1)

    @property
    def left_s(self) -> float | None:
        """Return the seconds of training that are left at this speed."""
        rate = self._per_second(0)
        return (self.total - self.batches) / rate if rate and self.total is not None else None

    def _per_second(self, which: int) -> float | None:
        if len(self._marks) < 2 or self._marks[-1][2] <= self._marks[0][2]:
            return None
        first, last = self._marks[0], self._marks[-1]
        return (last[which] - first[which]) / (last[2] - first[2])

    def to_json(self) -> dict[str, Any]:
        """Return the progress as JSON, with the fields of the last validation under ``validation``."""
        names = ("batches", "total", "epoch", "samples", "seconds", "samples_per_second", "left_s", "lr")
        found = {name: getattr(self, name) for name in names}
        loss = self.losses[-1] if self.losses else None
        return {**found, "loss": loss, "validation": dict(self.valid), "warnings": self.warnings}


class LiveRun:
    """Follows the folder of a run; ValueError if there is none.

    Attributes:
        path: The folder.
        progress: Progress at the last :meth:`look`.
        status: "running", "ended", or "stopped" if it neither ended nor runs on this machine.
    """

    def __init__(self, path: Path) -> None:
        if not (path / "run.json").is_file() and not (path / "metrics.jsonl").is_file():
            what = "holds no run" if path.is_dir() else "no such folder"
            raise ValueError(f"{path}: {what}; give the folder that avgpipe train writes")
        self.path = path
        self.plan = read_object(path / "plan.json", [])
        self.options = read_object(path / "run.json", [])
        self.status = "running"
        self._read, self._inode, self._torn = 0, 0, b""
        self.progress = Progress()

    def look(self) -> None:
        """Read new rows; of a resumed run, which may have dropped rows, read all rows again."""
        try:
            with open_regular(self.path / "metrics.jsonl") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode or file.seek(0, 2) < self._read:
                    self._read, self._inode, self._torn, self.progress = 0, inode, b"", Progress()
                file.seek(self._read)
                found = file.read()
        except (OSError, ValueError):
            found = b""
        self._read += len(found)
        *lines, self._torn = (self._torn + found).split(b"\n")
        for line in lines:
            row = parse_row(line.decode("utf-8", "replace"))
            if row is not None:
                self.progress.take(row)
        self.status = self._find_status()

    def _find_status(self) -> str:
        """Return the status; a run ends with its summary, which is newer than the files from its start."""
        begun, summary = _modified(self.path / "run.json"), _modified(self.path / "summary.json")
        if is_saved_into(self.path / "checkpoints" / "last") or is_saved_into(self.path):
            return "running"
        if summary is not None and (begun is None or summary >= begun):
            return "ended"
        last = max((begun or 0.0, _modified(self.path / "metrics.jsonl") or 0.0))
        return "running" if time.time() - last < _QUIET_S else "stopped"

    @property
    def checkpoint_age_s(self) -> float | None:
        """Return the seconds since the last checkpoint was written; None without one."""
        written = _modified(self.path / "checkpoints" / "last" / "manifest.json")
        return None if written is None else max(0.0, time.time() - written)

    @property
    def busy(self) -> list[float]:
        """Return the computing share of each worker before the last validation."""
        return numbers(self.progress.valid.get("worker_busy_fraction"))

    @property
    def peaks(self) -> list[float]:
        """Return the peak memory of each worker until the last validation."""
        return numbers(self.progress.valid.get("peak_memory_bytes"))

    @property
    def drift(self) -> float | None:
        """Return the mean distance of the replicas from the reference, over its norm, at the last validation."""
        distances = self.progress.valid.get("distances", {})
        norm, of = distances.get("norm"), numbers(distances.get("to_reference"))
        return sum(of) / len(of) / norm if norm and of else None

    def to_json(self) -> dict[str, Any]:
        return {"run": str(self.path), "status": self.status, **self.progress.to_json()}


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
