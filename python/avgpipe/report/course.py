"""The course of a run: where it validates, what it is to reach, and what it has come to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

VALIDATIONS = 20  # of a run, besides the one before training
_LOSS = "loss="


@dataclass(frozen=True)
class Validations:
    """Where a run validates: at equal numbers of samples, whatever the system, its pipelines and its batches.

    Between two neighbours lies an equal share of the samples, rounded to whole rounds. A run always validates at its
    end, too.

    Attributes:
        samples: Of the whole run.
        count: How many validations there are, the one at the end among them.
        round_samples: Samples between two places where a run may pause: of a batch, or of one of every pipeline where
            they take turns.
    """

    samples: int
    count: int
    round_samples: int

    def rounds_to_next(self, samples: int) -> int | None:
        """Return how many rounds there are to the next validation after so many samples; None: the end comes first.

        Where a run was interrupted makes no difference.
        """
        whole, half = 2 * self.samples, self.round_samples * self.count
        done = 2 * samples * self.count
        number = -(-(done + half) // whole)  # of the first that is at least half a round away
        if number >= self.count:
            return None
        return (number * whole - done + half) // (2 * half)


def parse_target(target: float | str) -> tuple[float, bool]:
    """Return the value of a target, and whether it is one of the loss, as in "loss=2.1", instead of the metric.

    Raises:
        ValueError: It is neither a number nor "loss=" and a number.
    """
    of_loss = isinstance(target, str) and target.startswith(_LOSS)
    try:
        value = float(target.removeprefix(_LOSS) if isinstance(target, str) else target)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(
            f"target {target!r}: give a finite number of the metric, or as loss=2.1 one of the loss"
        )
    return value, of_loss


def target_text(target: float | str) -> str:
    """A target in words: 30, or loss 2.1."""
    value, of_loss = parse_target(target)
    return f"{'loss ' * of_loss}{value:g}"


@dataclass
class Totals:
    """What a run has done so far; the same on all ranks.

    Attributes:
        lower_is_better: Whether low metrics are good.
        target: Metric or loss at which the run stops, see ``parse_target``.
        batches: Batches that were trained.
        epoch: Epoch of the next batch.
        epoch_samples: Samples of that epoch that were trained.
        samples: Samples that were trained.
        seconds: Time of training, without validations and checkpoints.
        best: Best metric; NaN while there is none.
        samples_to_target: When the target was reached; None while it was not.
        seconds_to_target: When the target was reached; NaN while it was not.
        loss: What the last validation found.
        metric: What the last validation found.
        validated: Batches before the last validation; -1 while there is none.
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

    def recall(self, rows: Iterable[Mapping[str, Any]], batches: int) -> None:
        """Go on after the rows of metrics.jsonl up to a checkpoint of so many batches."""
        for row in rows:
            self.take(row)
        self.batches = batches

    def take(self, row: Mapping[str, Any]) -> None:
        """Take in a row of metrics.jsonl."""
        if row["kind"] == "train":
            self.enter(row["epoch"])
            self.note_batch(row["samples"] - self.samples, row["seconds"] - self.seconds)
        else:
            self.note_validation(row["batch"], row["loss"], row["metric"])

    def figures(self) -> dict[str, Any]:
        """Return what a summary says of samples and seconds."""
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
        """Note a validation after so many batches; whether its metric is the best. One before training does not count.

        What was not finite is None.
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
        """Whether the last validation reached the target. One before training does not."""
        if self.target is None or self.validated <= 0:
            return False
        value, of_loss = parse_target(self.target)
        return self.loss <= value if of_loss else self._reaches(value)

    def _reaches(self, bound: float) -> bool:
        return self.metric <= bound if self.lower_is_better else self.metric >= bound
