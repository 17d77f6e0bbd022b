"""How long batches take a pipeline that trains for real."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

from avgpipe.measure.forecast import Forecast

if TYPE_CHECKING:
    from avgpipe.pipeline import Pipeline

ROUNDS = 3
_ROUND_S = 1.0
_LEAST, _MOST = 2, 60  # batches of each pipeline in a round


@dataclass(frozen=True)
class Trial:
    """What a plan was measured to take.

    Attributes:
        batch_s: From one batch's end to the next one's, the median of rounds.
        memory_bytes: The most that each worker has used, of the whole process on the CPU, of the device on CUDA; ()
            where that is not known.
    """

    batch_s: float
    memory_bytes: tuple[int, ...]
    rounds_s: tuple[float, ...] = ()

    @classmethod
    def of_rounds(cls, rounds_s: Sequence[float], memory_bytes: Sequence[int] = ()) -> Trial:
        return cls(statistics.median(rounds_s), tuple(memory_bytes), tuple(rounds_s))


def batches_of_round(forecast: Forecast) -> int:
    """Return how many batches take about a second, at least two of each pipeline."""
    pipelines = forecast.plan.pipelines
    each = math.ceil(_ROUND_S / max(forecast.batch_s, 1e-9) / pipelines)
    return pipelines * min(_MOST, max(_LEAST, each))


def rounds_of(pipeline: Pipeline, batch: Any, batches: int) -> list[float]:
    """Seconds per batch of a pipeline that trains on one batch over and over, in each of a few rounds."""
    return [pipeline_seconds(pipeline, batch, batches) for _ in range(ROUNDS)]


def pipeline_seconds(pipeline: Pipeline, batch: Any, batches: int) -> float:
    """Seconds per batch of a pipeline that trains on one batch over and over."""
    losses = lambda count: (result.loss for result in pipeline.train(repeat(batch, count)))  # noqa: E731
    return seconds_per_batch(losses, pipeline.plan.pipelines, batches)


def seconds_per_batch(losses: Callable[[int], Iterable[float | None]], pipelines: int, batches: int) -> float:
    """Seconds from one batch's end to the next one's on this rank, in the steady state.

    Batches run back to back, without barriers. The first of each pipeline are not timed, and neither are the last
    N - 1, which only keep the pipelines busy while the others are: from the end of batch N to that of batch N + J,
    over J, the least multiple of N that is at least ``batches``. A batch includes its update.

    Args:
        losses: Trains so many batches; yields when one is done (None: another rank knows the loss).
        pipelines: N, the batches in flight at once.
    """
    timed = math.ceil(batches / pipelines) * pipelines
    ends = []
    for loss in losses(pipelines + timed + pipelines - 1):
        ends.append(time.perf_counter())
        if loss is not None and not math.isfinite(loss):
            raise ValueError(f"the loss of batch {len(ends) - 1} is {loss}")
    return (ends[pipelines + timed - 1] - ends[pipelines - 1]) / timed
