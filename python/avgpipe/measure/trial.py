"""A plan timed for real: a few batches of a workload, in worker processes of this machine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

from avgpipe.measure.forecast import Forecast
from avgpipe.plan import Plan
from avgpipe.ranks.launch import run_on_ranks

if TYPE_CHECKING:
    from avgpipe.pipeline import Pipeline

_ROUNDS, _ROUND_S = 3, 1.0
_LEAST, _MOST = 2, 60  # batches of each pipeline in a round
_STARTING_S = 240.0  # for processes to begin and to read their data


@dataclass(frozen=True)
class Subject:
    """What is trained, by what a worker process needs to make it. threads: of torch, on the CPU, in each worker."""

    workload: str
    preset: str = "tiny"
    data: str | None = None
    batch_size: int | None = None
    device: str = "cpu"
    autocast: str = "auto"
    threads: int = 1


@dataclass(frozen=True)
class Trial:
    """batch_s: from one batch's end to the next one's, the median of rounds. memory_bytes: the most that each worker
    has used, of the whole process on the CPU, of the device on CUDA; () where that is not known.
    """

    batch_s: float
    memory_bytes: tuple[int, ...]
    rounds_s: tuple[float, ...] = ()


def batches_of_round(forecast: Forecast) -> int:
    """For about a second, at least two of each pipeline."""
    pipelines = forecast.plan.pipelines
    each = math.ceil(_ROUND_S / max(forecast.batch_s, 1e-9) / pipelines)
    return pipelines * min(_MOST, max(_LEAST, each))


def measure(subject: Subject, forecast: Forecast) -> Trial:
    """Train for some seconds, if the forecast is right. PipelineError when a worker fails."""
    plan, batches = forecast.plan, batches_of_round(forecast)
    arguments = {"subject": asdict(subject), "plan": plan.to_json(), "batches": batches}
    limit_s = _STARTING_S + 20 * (_ROUNDS + 1) * (batches + 2 * plan.pipelines) * forecast.batch_s
    found = run_on_ranks(
        f"{__name__}:worker", plan.workers, arguments, timeout_s=limit_s, threads=subject.threads
    )
    rounds = tuple(found[0]["rounds_s"])
    return Trial(statistics.median(rounds), tuple(rank["memory_bytes"] for rank in found), rounds)


def worker(subject: dict[str, Any], plan: str, batches: int) -> dict[str, Any]:
    """A process of :func:`measure`."""
    import torch

    from avgpipe.bench.schedules.rows import seconds_per_batch
    from avgpipe.measure.subject import pipeline_of
    from avgpipe.runtime.memory import peak_memory_bytes

    asked = Subject(**subject)
    torch.set_num_threads(asked.threads)
    pipeline, batch = pipeline_of(asked, Plan.from_json(plan))
    with pipeline:
        row = Batches(pipeline, batch)
        rounds = [seconds_per_batch(row, batches) for _ in range(_ROUNDS)]
        return {"rounds_s": rounds, "memory_bytes": peak_memory_bytes(pipeline.device)}


class Batches:
    """A row, as of the benchmarks of schedules: a pipeline that trains on one batch over and over."""

    actions = None

    def __init__(self, pipeline: Pipeline, batch: Any) -> None:
        self.name, self.pipelines = "trial", pipeline.plan.pipelines
        self._pipeline, self._batch = pipeline, batch

    def losses(self, batches: int) -> Iterator[float | None]:
        for result in self._pipeline.train(repeat(self._batch, batches)):
            yield result.loss

    def close(self) -> None:
        self._pipeline.close()
