"""The progress of a run: the places of its validations, its target, and its totals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from avgpipe.errors import check_count, reason
from avgpipe.files import parse_json, read_text
from avgpipe.timeline.timeline import Timeline

VALIDATIONS = 20  # default for a run, besides the one before training
_LOSS = "loss="


@dataclass(frozen=True, kw_only=True)
class Course:
    """How long a run trains, and how often it validates.

    Attributes:
        epochs: Number of epochs; None: the task's.
        max_batches: Stop after this many batches; a loader without a length needs it.
        validations: Validations at equal numbers of samples, the last one at the end, besides the one before training.
        valid_batches: Validate on this many first batches of the held-out data; None: on all of them.
        target: Where training ends: a metric, or a loss as "loss=2.1"; None: the task's.
        seed: Seed of weights, batches and dropout; of several runs, that of the first one.
    """

    epochs: int | None = None
    max_batches: int | None = None
    validations: int = VALIDATIONS
    valid_batches: int | None = None
    target: float | str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "max_batches", "validations", "valid_batches"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.target is not None:
            parse_target(self.target)

    @classmethod
    def of(cls, options: Any) -> Course:
        """Return the course that the options of a command have in fields of the same names."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class Validations:
    """The places of a run's validations: at equal numbers of samples, for any system, pipelines and batches.

    Two neighbours are an equal share of the samples apart, rounded to whole rounds. A run also validates at
    its end.

    Attributes:
        samples: Samples of the whole run.
        count: Number of validations, with the one at the end.
        round_samples: Samples between two places where a run may pause: of a batch, or of one batch of every
            pipeline if each pipeline trains on its own batches.
    """

    samples: int
    count: int
    round_samples: int

    def rounds_to_next(self, samples: int) -> int | None:
        """Return how many rounds remain to the next validation after ``samples``; None if the end is before it.

        It does not depend on where a run was interrupted.
        """
        whole, half = 2 * self.samples, self.round_samples * self.count
        done = 2 * samples * self.count
        number = -(-(done + half) // whole)  # number of the first that is at least half a round away
        if number >= self.count:
            return None
        return (number * whole - done + half) // (2 * half)


def parse_target(target: float | str) -> tuple[float, bool]:
    """Return the value of a target, and whether it is one of the loss, as in "loss=2.1", instead of the metric.

    Raises:
        ValueError: It is neither a number nor "loss=" followed by a number.
    """
    of_loss = isinstance(target, str) and target.startswith(_LOSS)
    try:
        value = float(target.removeprefix(_LOSS) if isinstance(target, str) else target)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"target {target!r}: give a finite number for the metric, or loss=2.1 for the loss")
    return value, of_loss


def target_text(target: float | str) -> str:
    """Describe a target: 30, or loss 2.1."""
    value, of_loss = parse_target(target)
    return f"{'loss ' * of_loss}{value:g}"


@dataclass
class Totals:
    """The totals of a run so far; the same on all ranks.

    Attributes:
        lower_is_better: Whether low metrics are good.
        target: Metric or loss at which the run stops, see ``parse_target``.
        batches: Trained batches.
        epoch: Epoch of the next batch.
        epoch_samples: Trained samples of that epoch.
        samples: Trained samples.
        seconds: Time of training, without validations and checkpoints.
        best: Best metric; NaN while there is none.
        samples_to_target: Samples when the target was reached; None before.
        seconds_to_target: Seconds when the target was reached; NaN before.
        loss: Loss of the last validation.
        metric: Metric of the last validation.
        validated: Number of batches before the last validation; -1 before the first one.
    """

    lower_is_better: bool
    target: float | str | None = None
    batches: int = 0
    epoch: int = 0
    epoch_samples: int = 0
    samples: int = 0
    seconds: float = 0.0
    best: float = math.nan
    samples_to_target: int | None = None
    seconds_to_target: float = math.nan
    loss: float = math.nan
    metric: float = math.nan
    validated: int = -1

    def take(self, row: Mapping[str, Any]) -> None:
        """Add a row of metrics.jsonl."""
        if row["kind"] == "train":
            self.enter(row["epoch"])
            self.note_batch(row["samples"] - self.samples, row["seconds"] - self.seconds)
        else:
            self.note_validation(row["batch"], row["loss"], row["metric"])

    def figures(self) -> dict[str, Any]:
        """Return the samples and seconds of a summary."""
        return {
            "samples": self.samples,
            "samples_to_target": self.samples_to_target,
            "seconds_to_target": self.seconds_to_target,
            "train_seconds": self.seconds,
            "samples_per_second": self.samples / self.seconds if self.seconds > 0 else None,
        }

    def enter(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.epoch_samples = epoch, 0

    def note_batch(self, samples: int, seconds: float) -> None:
        self.batches += 1
        self.samples += samples
        self.epoch_samples += samples
        self.seconds += seconds

    def note_validation(self, batches: int, loss: float | None, metric: float | None) -> bool:
        """Add a validation after ``batches`` batches; return whether its metric is the best since training began.

        Values that were not finite are None.
        """
        self.validated = batches
        self.loss = math.nan if loss is None else loss
        self.metric = math.nan if metric is None else metric
        if batches == 0:
            return False
        if self.reached and self.samples_to_target is None:
            self.samples_to_target, self.seconds_to_target = self.samples, self.seconds
        improved = not math.isnan(self.metric) and (
            math.isnan(self.best) or (self.metric != self.best and self._reaches(self.best))
        )
        if improved:
            self.best = self.metric
        return improved

    @property
    def reached(self) -> bool:
        """Return whether the last validation reached the target; one before training does not count."""
        if self.target is None or self.validated <= 0:
            return False
        value, of_loss = parse_target(self.target)
        return self.loss <= value if of_loss else self._reaches(value)

    def _reaches(self, bound: float) -> bool:
        return self.metric <= bound if self.lower_is_better else self.metric >= bound


# ---- files of a run --------------------------------------------------------------------------------------------------


_LARGEST = 1e300
_COUNTED = ("batch", "epoch", "samples", "seconds")  # by which rows are placed


def number(value: Any) -> float | None:
    """Return a finite number as it is, anything else as None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -_LARGEST < value < _LARGEST else None  # excludes NaN, and ints of a thousand digits


def numbers(value: Any) -> list[float]:
    """Return a list of finite numbers as it is, anything else as an empty one."""
    found = [number(item) for item in value] if isinstance(value, list) else []
    return [item for item in found if item is not None] if None not in found else []


def limited(value: Any) -> Any:
    """Return a value of JSON with None in place of numbers that are not finite, or huge."""
    if isinstance(value, dict):
        return {key: limited(part) for key, part in value.items()}
    if isinstance(value, list):
        return [limited(part) for part in value]
    return number(value) if type(value) in (int, float) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, without damaged ones such as a last line that was cut off."""
    try:
        lines = read_text(path / "metrics.jsonl", math.inf, errors="replace").splitlines()
    except (OSError, ValueError):
        return []
    return [row for line in lines if (row := parse_row(line)) is not None]


def parse_row(line: str) -> dict[str, Any] | None:
    """Return the row in a line of metrics.jsonl; None if it holds none.

    Its losses and other measured values may be None, as those that were not finite; its counts and seconds are not.
    """
    try:
        row = limited(parse_json("a row", line, finite=False))
    except ValueError:
        return None
    if not isinstance(row, dict) or "kind" not in row or "batch" not in row:
        return None
    return None if any(row.get(name, 0) is None for name in _COUNTED) else row


def read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """Return the object in a JSON file; if it is missing or damaged, {}, and ``problems`` names the damage."""
    try:
        value = parse_json("it", read_text(path), finite=False)
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        problems.append(f"{path.name}: {reason(error)}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name}: holds a {type(value).__name__} instead of an object")
        return {}
    return value


# ---- stretches without a pause ---------------------------------------------------------------------------------------


def stretches(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return the first and last batches between validations or ends of epochs, where pipelines run empty."""
    breaks = {row["batch"] for row in rows if row["kind"] == "valid"}
    trained = [row for row in rows if row["kind"] == "train"]
    breaks |= {after["batch"] for row, after in pairwise(trained) if row.get("epoch") != after.get("epoch")}
    if trained:
        breaks |= {trained[0]["batch"], max(row["batch"] for row in trained) + 1}
    return [(first, after - 1) for first, after in pairwise(sorted(breaks))]


def unbroken(timeline: Timeline, stretches: Sequence[tuple[int, int]]) -> Timeline:
    """Return the longest stretch of batches in the timeline that all stages still have: pauses are no bubbles."""
    begins: dict[int, int] = {}
    for event in timeline.events:
        begins[event.stage] = min(begins.get(event.stage, event.batch), event.batch)
    oldest = max(begins.values(), default=0)
    kept = [(max(first, oldest), last) for first, last in stretches if last >= oldest]
    if not kept:
        return timeline
    return timeline.window(*max(kept, key=lambda s: s[1] - s[0]))
