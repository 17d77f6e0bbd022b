"""The folder of a run: what is written, and what a resumed run reads of it."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal

from avgpipe.cli.settings import RUN_FILE, TrainSettings
from avgpipe.files import write_atomically
from avgpipe.plan import Plan


@dataclass
class Tally:
    """What a run has done so far; alike on all ranks.

    epoch: of the next batch. epoch_samples: of that epoch. seconds: of training, without validations and checkpoints.
    best, seconds_to_target: NaN while there is none. validated: the number of batches before the last validation, and
    loss and metric what it found.
    """

    batches: int = 0
    epoch: int = 0
    epoch_samples: int = 0
    samples: int = 0
    seconds: float = 0.0
    best: float = math.nan
    seconds_to_target: float = math.nan
    validated: int = -1
    loss: float = math.nan
    metric: float = math.nan


class RunFolder:
    """Writes the files of a run, on the rank that ``writes``; on the others every method does nothing."""

    def __init__(self, path: Path, writes: bool) -> None:
        self.path, self._writes = path, writes
        self._metrics: FileIO | None = None
        self._rows = b""  # that the disk has not taken yet

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def open(self, settings: TrainSettings, plan: Plan) -> None:
        """Make the folder and begin its files."""
        if not self._writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / RUN_FILE, settings.to_json())
        plan.save(self.path / "plan.json")
        # Line by line: what a killed run has written stays. Of an attempt that saved nothing there may be rows.
        mode: Literal["ab", "wb"] = "ab" if settings.resume else "wb"
        self._metrics = (self.path / "metrics.jsonl").open(mode, buffering=0)

    def row(self, kind: str, **values: Any) -> None:
        """Add a row to metrics.jsonl; while the disk takes none they are kept, until ``close``."""
        if self._metrics is not None:
            self._rows += (strict_json({"kind": kind, **values}) + "\n").encode()
            with suppress(OSError):
                self._write_rows()

    def write(self, name: str, content: str) -> None:
        if self._writes:
            write_atomically(self.path / name, content)

    def cut(self, batches: int) -> list[dict[str, Any]]:
        """Drop the rows of metrics.jsonl that came after a checkpoint of ``batches`` batches; the rows that stay."""
        kept = [row for row in read_metrics(self.path) if _is_before(row, batches)]
        if self._writes:
            write_atomically(self.path / "metrics.jsonl", "".join(strict_json(row) + "\n" for row in kept))
        return kept

    def close(self) -> None:
        if self._metrics is not None:
            with self._metrics:
                self._write_rows()

    def _write_rows(self) -> None:
        assert self._metrics is not None
        while self._rows:
            self._rows = self._rows[self._metrics.write(self._rows) :]  # a disk may take a part


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl; damaged ones, as a last line that was cut off, are left out."""
    try:
        lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "kind" in row and "batch" in row:
            rows.append(row)
    return rows


def tally(rows: list[dict[str, Any]], batches: int, target: float | None, lower_is_better: bool) -> Tally:
    """What a run whose checkpoint has ``batches`` batches had done, from the rows that stayed."""
    result = Tally(batches)
    for row in rows:
        if row["kind"] == "train":
            if row["epoch"] != result.epoch:
                result.epoch, result.epoch_samples = row["epoch"], 0
            result.epoch_samples += row["samples"] - result.samples
            result.samples, result.seconds = row["samples"], row["seconds"]
        else:
            note_validation(result, row["batch"], row["loss"], row["metric"], target, lower_is_better)
    return result


def note_validation(
    result: Tally,
    batches: int,
    loss: float | None,
    metric: float | None,
    target: float | None,
    lower_is_better: bool,
) -> bool:
    """Note a validation after ``batches`` batches; whether it is the best. One before training does not count."""
    result.validated = batches
    result.loss = math.nan if loss is None else loss
    result.metric = math.nan if metric is None else metric
    if batches == 0 or metric is None or math.isnan(metric):
        return False
    if (
        target is not None
        and reaches(metric, target, lower_is_better)
        and math.isnan(result.seconds_to_target)
    ):
        result.seconds_to_target = result.seconds
    improved = math.isnan(result.best) or (
        metric != result.best and reaches(metric, result.best, lower_is_better)
    )
    if improved:
        result.best = metric
    return improved


def reaches(metric: float, target: float, lower_is_better: bool) -> bool:
    return metric <= target if lower_is_better else metric >= target


def strict_json(value: Any, indent: int | None = None) -> str:
    """JSON that every parser reads: what is not finite becomes null."""
    return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def _is_before(row: dict[str, Any], batches: int) -> bool:
    """Training rows name a batch, counted from 0; validations the number of batches before them."""
    return bool(row["batch"] < batches if row["kind"] == "train" else row["batch"] <= batches)
