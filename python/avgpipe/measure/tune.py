"""``avgpipe.tune``: the best plans for a model, predicted from a profile, and timed if the workers are present."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import nn

from avgpipe.device import has_streams
from avgpipe.errors import PipelineError
from avgpipe.measure import profiler
from avgpipe.measure.forecast import Forecast
from avgpipe.measure.search import PIPELINES, Space, profiled_sizes, search
from avgpipe.measure.workers import measure_workers
from avgpipe.model.batch import LossFn, plain, sample_count
from avgpipe.model.layers import layers_of
from avgpipe.options import precision_of
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe.ranks.world import World, meet
from avgpipe.runtime.options import OptimizerFn

ONE_DEVICE, DATA_PARALLEL, PIPELINE = "one device", "data parallel", "pipeline"
CLOSE = 0.05  # plans on one machine vary by this much from run to run
ROUNDS = 3
_ROUND_S = 1.0
_LEAST, _MOST = 2, 60  # batches of each pipeline in a round
_PROFILED = (
    "loss_fn",
    "optimizer",
    "device",
    "clip_grad_norm",
)  # arguments of a Pipeline that a profile has, too
_TIMEOUT_S = 900.0  # timeout of ranks that wait while the first one profiles


def tune(
    model: nn.Module | Sequence[nn.Module],
    example_inputs: Any,
    *,
    loss_fn: LossFn | None = None,
    target: Any = None,
    optimizer: OptimizerFn | None = None,
    workers: int | None = None,
    memory_limit_bytes: float | None = None,
    pipelines: Sequence[int] = PIPELINES,
    micro_batches: Sequence[int] | None = None,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
    link: LinkProfile | None = None,
    trials: int = 3,
    budget_s: float = 15.0,
    **options: Any,
) -> Plan:
    """Return the plan with the least time per batch that fits into the memory, as far as the search finds it.

    The model is profiled, unless ``profile`` is given; plans of many sizes are simulated; and if there are as
    many ranks as workers, the best ``trials`` are timed and the fastest is taken. Every rank makes the same call and
    gets the same plan. Without ranks, the plan is a prediction.

    Args:
        model, optimizer: See ``Pipeline``.
        example_inputs, target: A batch, which pipelines share; tensors with the samples as dimension 0.
        loss_fn: See ``Pipeline``; without it, and without an optimizer, nothing is timed.
        workers: Number of workers of the plan; None: the ranks, or those of ``cluster``.
        memory_limit_bytes: Memory of a worker; on the CPU, of the whole process.
        pipelines, micro_batches: Numbers to try; None: from 1 to one sample each.
        profile: A profile of the model, instead of a new one.
        cluster, link: Devices and links to plan for, instead of the measured ones; nothing is timed then.
        trials, budget_s: Number of plans to time; approximate seconds for profiling.
        options: Further arguments of ``Pipeline``: ``device``, where to profile and to time, ``clip_grad_norm``, or
            ``extensions``, of which the profile follows ``Precision``.

    Raises:
        ValueError, TypeError: An argument is wrong, or nothing fits into the memory.
        StageError: A layer cannot be timed.
        PipelineError: A process failed.
    """
    world = meet(_TIMEOUT_S)
    if cluster is not None and (workers is not None or memory_limit_bytes is not None):
        raise ValueError("a cluster has the number of workers and their memory: leave out one of the two")
    batch = plain(example_inputs), plain(target)
    samples = sample_count(*batch)
    options = {"device": "cpu", **options, "loss_fn": loss_fn, "optimizer": optimizer}
    if profile is None:
        own = {name: options[name] for name in _PROFILED if name in options}
        autocast = precision_of(options.get("extensions", ())).autocast
        profile = profile_together(model, batch, budget_s, world, link, **own, autocast=autocast)
    profile = Profile.from_json(world.gather(profile.to_json())[0])
    count = world.size if workers is None else workers
    where = cluster or Cluster.like(profile, count, memory_limit_bytes, link)
    space = Space(profile, where, samples, pipelines, micro_batches)
    here = cluster is None and link is None and where.workers == world.size > 1
    if not here or loss_fn is None or optimizer is None:
        return study(space, trials=trials).plan
    return study(space, partial(_timed_here, world, model, batch, options), trials=trials).plan


def _timed_here(
    world: World, model: Any, batch: tuple[Any, Any], options: dict[str, Any], forecast: Forecast
) -> Trial | None:
    """Time a plan that uses all ranks of this run; all get the times of the first rank."""
    if forecast.plan.workers != world.size:
        return None
    plan = replace(forecast.plan, warmup_rounds=0)  # they wait, and the timing is of the steady state
    with Pipeline(model, plan, example_inputs=batch[0], **options) as pipeline:
        rounds_s = rounds_of(pipeline, batch, batches_of_round(forecast))
    return Trial(statistics.median(world.gather(rounds_s)[0]))


def profile_together(
    model: nn.Module | Sequence[nn.Module],
    batch: tuple[Any, Any],
    budget_s: float,
    world: World,
    link: LinkProfile | None = None,
    **options: Any,
) -> Profile:
    """Profile on all ranks at once, which slow each other down as in training; the result of rank 0 is used.

    Args:
        model: See ``Pipeline``.
        batch: Inputs and targets.
        budget_s: Approximate seconds to take.
        world: The ranks.
        link: Link between workers, instead of the measured one.
        options: Further arguments of ``avgpipe.profile``.
    """
    inputs, target = batch
    found = profiler.profile(
        model,
        inputs,
        target=target,
        micro_batch_sizes=profiled_sizes(sample_count(*batch)),
        threads=torch.get_num_threads(),
        budget_s=budget_s,
        layers_only=True,
        **options,
    )
    if world.rank != 0:
        return found
    layers, on_host = layers_of(model, inputs), not has_streams(torch.device(options["device"]))
    measured = measure_workers(layers, torch.get_num_threads(), on_host and link is None)
    known = profiler.with_workers(found, measured, link)
    if not on_host:
        return known
    # Every rank also holds the whole model.
    whole = sum(t.nbytes for layer in layers for t in (*layer.parameters(), *layer.buffers()))
    return replace(known, process_bytes=known.process_bytes + whole)


# ---- trials ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """The measurements of a plan.

    Attributes:
        batch_s: Seconds from one batch's end to the next one's, the median of rounds.
        memory_bytes: Peak of each worker, of the whole process on the CPU, of the device on CUDA; () if
            unknown.
    """

    batch_s: float
    memory_bytes: tuple[int, ...] = ()


def batches_of_round(forecast: Forecast) -> int:
    """Return how many batches take about a second, at least two of each pipeline."""
    in_round = forecast.plan.batches_per_round
    each = math.ceil(_ROUND_S / max(forecast.batch_s, 1e-9) / in_round)
    return in_round * min(_MOST, max(_LEAST, each))


def rounds_of(pipeline: Pipeline, batch: Any, batches: int, rounds: int = ROUNDS) -> list[float]:
    """Return seconds per batch of a pipeline that repeats one batch, in each of some rounds."""

    def losses(count: int) -> Iterator[float | None]:
        return (result.loss for result in pipeline.train(repeat(batch, count)))

    return [seconds_per_batch(losses, pipeline.plan.batches_in_flight, batches) for _ in range(rounds)]


def seconds_per_batch(losses: Callable[[int], Iterable[float | None]], in_flight: int, batches: int) -> float:
    """Return the seconds from one batch's end to the next one's on this rank, in the steady state.

    Batches run back to back, without barriers. The first n that are in flight together are not timed, and neither are
    the last n - 1, which only keep the pipelines busy while the others are: from the end of batch n to that of batch
    n + J, over J, the least multiple of n that is at least ``batches``. A batch includes its update.

    Args:
        losses: Trains on the given number of batches; yields at the end of each (None: another rank has the
            loss).
        in_flight: n, the batches in flight at once.
    """
    timed = math.ceil(batches / in_flight) * in_flight
    ends = []
    for loss in losses(in_flight + timed + in_flight - 1):
        ends.append(time.perf_counter())
        if loss is not None and not math.isfinite(loss):
            raise ValueError(f"the loss of batch {len(ends) - 1} is {loss}")
    return (ends[in_flight + timed - 1] - ends[in_flight - 1]) / timed


# ---- the best plans --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TunedPlan:
    """A plan with its prediction and measurement.

    Attributes:
        what: ONE_DEVICE, DATA_PARALLEL or PIPELINE.
        trial: The measurement; None: not timed.
        failure: Why timing failed, if it was tried.
    """

    what: str
    forecast: Forecast
    trial: Trial | None = None
    failure: str = ""

    @property
    def plan(self) -> Plan:
        return self.forecast.plan

    @property
    def batch_s(self) -> float:
        """Return the measured seconds, else the predicted ones."""
        return (self.trial or self.forecast).batch_s

    @property
    def error(self) -> float | None:
        """Return the error of the prediction, relative to the measurement."""
        return None if self.trial is None else self.forecast.batch_s / self.trial.batch_s - 1

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "plan": asdict(self.plan),
            "predicted_batch_s": self.forecast.batch_s,
            "predicted_memory_bytes": self.forecast.memory_bytes,
            "measured_batch_s": self.trial and self.trial.batch_s,
            "measured_memory_bytes": self.trial and self.trial.memory_bytes,
            "failure": self.failure,
        }


@dataclass(frozen=True)
class TuningResult:
    """The plans found.

    Attributes:
        rows: The best first, by measurement; plans that were only predicted follow.
        considered: Number of sizes of plans considered.
        excluded: Number of those evaluated that did not fit into the memory.
        seconds: Seconds spent on each step.
    """

    rows: tuple[TunedPlan, ...]
    batch_size: int
    workers: int
    considered: int
    excluded: int
    seconds: dict[str, float]

    @property
    def best(self) -> TunedPlan:
        return self.rows[0]

    @property
    def plan(self) -> Plan:
        return self.best.plan

    def samples_per_s(self, row: TunedPlan) -> float:
        return self.batch_size / row.batch_s

    def to_json(self) -> dict[str, Any]:
        same = ("batch_size", "workers", "considered", "excluded", "seconds")
        return {
            "plan": asdict(self.plan),
            "advice": advice(self),
            **{name: getattr(self, name) for name in same},
            "rows": [row.to_json() for row in self.rows],
        }


def advice(found: TuningResult) -> str:
    """Return the simplest plan that is hardly slower than the fastest: one device, then data parallelism.

    Measured plans are not compared with plans that were only predicted.
    """
    rows = {row.what: row for row in reversed(found.rows) if bool(row.trial) == bool(found.best.trial)}
    one, parallel, pipeline = (rows.get(what) for what in (ONE_DEVICE, DATA_PARALLEL, PIPELINE))
    fastest = found.best.batch_s
    if one is not None and one.batch_s <= fastest * (1 + CLOSE):
        return f"Advice: one device is enough: {_against(found, one, parallel or pipeline)}."
    if parallel is not None and parallel.batch_s <= fastest * (1 + CLOSE):
        return f"Advice: use data parallelism here: {_against(found, parallel, pipeline)}."
    sentence = f"use the pipeline, {_against(found, found.best, parallel)}"
    if found.workers > 1 and all(row.what != DATA_PARALLEL for row in found.rows):
        sentence += "; the whole model does not fit into each worker"
    if found.plan.pipelines > 1:
        sentence += (
            f"; its {found.plan.pipelines} pipelines share each batch and learn a little less from it than one does, "
            "so compare the losses, too"
        )
    return f"Advice: {sentence}."


def _against(found: TuningResult, row: TunedPlan, other: TunedPlan | None) -> str:
    """Describe the samples per second of a row, and compare them with another row."""
    speed = f"{found.samples_per_s(row):.4g} samples/s{'' if row.trial else ' predicted'}"
    if other is None or other is row:
        return speed
    return f"{speed}, {other.what} {found.samples_per_s(other):.4g}"


Measure = Callable[[Forecast], Trial | None]
Say = Callable[[str], None]


def study(
    space: Space,
    measure: Measure | None = None,
    *,
    trials: int = 3,
    say: Say = lambda line: None,
    profile_s: float | None = None,
) -> TuningResult:
    """Find the best plans for a profile on a cluster.

    Args:
        space: Plans to try.
        measure: Times a plan; returns None for a plan that it cannot time. None as argument: predictions
            only.
        trials: Number of plans to time, besides the best of each simpler kind: the advice compares
            measurements.
        say: Called with progress messages.
        profile_s: Seconds that the profile took, if it was made for this call.

    Raises:
        ValueError: Nothing fits into the memory.
    """
    seconds = {} if profile_s is None else {"profile_s": profile_s}
    begin = time.perf_counter()
    found = search(space)
    seconds["search_s"] = time.perf_counter() - begin
    rows = [TunedPlan(_kind_of(f.plan), f) for f in found.ranked]
    if measure is not None:
        simpler = [row for row in rows[trials:] if row.plan.stages == 1]
        chosen = [*rows[:trials], *simpler] if trials else []
        begin = time.perf_counter()
        timed = [timed_row(row, measure, say) for row in chosen]
        seconds["trials_s"] = time.perf_counter() - begin
        rows = timed + [row for row in rows if row not in chosen]
    rows.sort(key=lambda row: (row.trial is None, bool(row.failure), row.batch_s))
    sizes = space.batch_size, space.cluster.workers, found.considered, found.excluded
    return TuningResult(tuple(rows), *sizes, seconds)


def _kind_of(plan: Plan) -> str:
    if plan.workers == 1:
        return ONE_DEVICE
    return DATA_PARALLEL if plan.stages == 1 else PIPELINE


def timed_row(row: TunedPlan, measure: Measure, say: Say) -> TunedPlan:
    """Return a row with its measurement, or the reason why there is none."""
    plan, width = row.plan, (row.plan.replication or [1])[0]
    stages = f"K = {plan.stages}" + (f" x {width}" if width > 1 else "")
    say(f"timing {stages}, N = {plan.pipelines}, M = {plan.micro_batches}")
    try:
        return replace(row, trial=measure(row.forecast))
    except PipelineError as error:
        return replace(row, failure=" ".join(str(error).split()))
