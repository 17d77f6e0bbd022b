"""The rows of a run's metrics.jsonl, and its summary, from the totals of the run and what its pipeline measures."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from avgpipe import __version__
from avgpipe.pipeline import Pipeline
from avgpipe.ranks.environment import peak_memory_bytes
from avgpipe.report.course import Totals, unbroken
from avgpipe.runtime.feed import BatchResult
from avgpipe.tasks import Workload
from avgpipe.timeline.timeline import Timeline

_OF_PLAN = ("system", "stages", "pipelines", "micro_batches", "schedule")
_OF_WORKLOAD = ("preset", "batch_size", "metric_name", "lower_is_better", "title")


def of_all(pipeline: Pipeline, what: str, value: Any) -> list[Any]:
    """Return a small value of every rank; it is gathered again if a rank is replaced meanwhile."""
    found: list[Any] = _measured(pipeline, what, lambda: pipeline.world.gather(value))
    return found


def _measured(pipeline: Pipeline, what: str, measure: Callable[[], Any]) -> Any:
    """Return what all ranks measure together; a process that replaces another gets the others' result."""
    return pipeline.once(what, measure) if pipeline.has_copies else measure()


class RowMaker:
    """Makes the rows and the summary of a run; every rank calls its methods, in one order.

    Args:
        workload: What is trained.
        total: Batches of the whole run.
        warnings: Warnings of the run, for its first row and its summary.
        done: Totals of the run before this process.
        steps: Steps before this process.
    """

    def __init__(
        self, workload: Workload, total: int, warnings: Sequence[str], done: Totals, steps: int
    ) -> None:
        self._workload, self._total, self._warnings = workload, total, list(warnings)
        self._epoch_samples: int | None = None  # known once a loader without a length has ended
        self._stretches: list[tuple[int, int]] = []  # steps, first and last, without a pause between them
        self.go_on(done, steps)

    def batch(self, pipeline: Pipeline, result: BatchResult, done: Totals) -> dict[str, Any]:
        """Return the row of a batch."""
        row: dict[str, Any] = {"batch": result.batch, "pipeline": result.pipeline, "epoch": done.epoch}
        row |= {"samples": done.samples, "loss": result.loss, "seconds": round(done.seconds, 6)}
        extra = {"lr": result.lr, "grad_norm": result.grad_norm}
        if self._workload.valid_batches is None:  # else validation rows have it
            extra["total_batches"] = self._total
        return row | {name: value for name, value in extra.items() if value is not None}

    def validation(
        self, pipeline: Pipeline, done: Totals, metrics: Mapping[str, float], steps: int
    ) -> dict[str, Any]:
        """Return the row of a validation after ``steps`` steps, with what was measured since the one before."""
        place = {"epoch": done.epoch, "batch": done.batches, "samples": done.samples}
        metric = metrics.get(self._workload.metric_name)
        found: dict[str, Any] = {"loss": done.loss, "metric": metric, "metrics": metrics}
        speed = self._since_last_validation(pipeline, done, steps)
        if pipeline.plan.pipelines > 1:
            found["distances"] = _measured(pipeline, "distances", lambda: asdict(pipeline.distances()))
        skipped, peaks = self.of_ranks(pipeline)
        facts: dict[str, Any] = {"skipped_updates": skipped, "peak_memory_bytes": peaks}
        if self._warnings and not done.batches:
            facts["warnings"] = self._warnings
        facts |= {"total_batches": self._total, "seconds": round(done.seconds, 6)}
        return place | found | speed | facts

    def note_stretch(self, first: int, last: int) -> None:
        """Note the first and the last step of a stretch that was trained without a pause."""
        self._stretches.append((first, last))

    def note_epoch(self, samples: int) -> None:
        """Note how many samples an epoch has, which the end of a loader without a length has shown."""
        self._epoch_samples = samples

    def go_on(self, done: Totals, steps: int) -> None:
        """Measure the speed from here on, after ``steps`` steps."""
        self._validated_at = replace(done), steps

    def _since_last_validation(self, pipeline: Pipeline, done: Totals, steps: int) -> dict[str, Any]:
        """Return speed and busy shares since the last validation; nothing if there was no batch."""
        before, first = self._validated_at
        self.go_on(done, steps)
        if done.batches == before.batches:
            return {}
        seconds = done.seconds - before.seconds
        busy = _measured(pipeline, "busy shares", lambda: pipeline.busy_fractions(first))
        return {
            "samples_per_second": (done.samples - before.samples) / seconds if seconds > 0 else None,
            "worker_busy_fraction": [round(share, 4) for share in busy],
        }

    def of_ranks(self, pipeline: Pipeline) -> tuple[int, list[int]]:
        """Return how many updates were skipped since this process began, and the ranks' peaks of memory."""
        own = pipeline.skipped_updates, peak_memory_bytes(pipeline.device)
        skipped, peaks = zip(*of_all(pipeline, "skipped updates and peaks", own))
        # Every rank with a stage of a pipeline counts the skipped updates of that pipeline.
        plan, ranks = pipeline.plan, pipeline.world.size
        apart = plan.pipelines if plan.spread and ranks > 1 else 1
        return sum(skipped) * apart // ranks, list(peaks)

    def summary(
        self, pipeline: Pipeline, done: Totals, **about: Any
    ) -> tuple[dict[str, Any], Timeline, Timeline] | None:
        """Return the content of summary.json, the timeline, and its longest stretch; None on all but the first rank.

        Times are of training, without validations and checkpoints. ``about``: further values.
        """
        timeline = pipeline.timeline()
        skipped, peaks = self.of_ranks(pipeline)
        if pipeline.world.rank != 0:
            return None
        longest = unbroken(timeline, self._stretches)
        found = {**about, **self._results(pipeline, done, longest)}
        return found | {"peak_memory_bytes": peaks, "skipped_updates": skipped}, timeline, longest

    def _results(self, pipeline: Pipeline, done: Totals, timeline: Timeline) -> dict[str, Any]:
        plan, workload, chosen = pipeline.plan, self._workload, pipeline.advance
        layers = workload.layers
        whole = layers if isinstance(layers, nn.Module) else nn.ModuleList(layers)
        epoch = self._epoch_samples or len(workload.train_batches(done.epoch)) * workload.batch_size
        share = min(1.0, done.epoch_samples / epoch) if epoch else math.nan
        return {
            "target": done.target,
            **{name: getattr(plan, name) for name in _OF_PLAN},
            **{name: getattr(workload, name) for name in _OF_WORKLOAD},
            **{name: getattr(done, name) for name in ("batches", "metric")},
            **done.figures(),
            **{name: getattr(timeline, name) for name in ("worker_busy_fraction", "bubble_fraction")},
            "advance": plan.advance if chosen is None else chosen.advance,
            "epochs": round(done.epoch + share, 4),
            "best_metric": done.best,
            "trivial_metric": workload.trivial[1] if workload.trivial else None,
            "parameters": sum(p.numel() for p in whole.parameters()),
            "versions": {
                "avgpipe": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "warnings": self._warnings,
        }
