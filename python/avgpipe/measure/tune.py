"""``avgpipe.tune``: a good plan for a model, from a profile made here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from avgpipe.measure.forecast import Forecast
from avgpipe.measure.profiler import layer_profile, with_workers
from avgpipe.measure.search import PIPELINES, Space, profiled_sizes
from avgpipe.measure.trials import Trial, batches_of_round, pipeline_seconds
from avgpipe.measure.tuning import Measure, study
from avgpipe.measure.workers import measure_workers
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe.ranks.world import World
from avgpipe.runtime.batch import LossFn, plain, sample_count
from avgpipe.runtime.model import layers_of
from avgpipe.runtime.options import OptimizerFn

_ROUNDS = 3
_TIMEOUT_S = 900.0  # for ranks that wait while the first one profiles


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
    device: torch.device | str = "cpu",
    clip_grad_norm: float | None = None,
    autocast: torch.dtype | None = None,
    trials: int = 3,
    budget_s: float = 15.0,
) -> Plan:
    """The plan with the least time per batch that fits into the memory, as far as the search finds it.

    The model is profiled, unless ``profile`` is given; plans of many sizes are simulated; and where as many ranks are
    at hand as there are workers (a default process group, or torchrun's environment), the best ``trials`` are timed
    and the quickest is taken. Every rank calls this alike and gets the same plan. Alone, the plan is a prediction.

    Args:
        model: What a ``Pipeline`` takes.
        example_inputs: One pipeline's batch, tensors with the samples as dimension 0.
        loss_fn: As of the ``Pipeline``; without it, and without an optimizer, nothing is timed.
        target: The targets of ``example_inputs``.
        optimizer: As of the ``Pipeline``.
        workers: How many workers the plan is for; None: the ranks, or those of ``cluster``.
        memory_limit_bytes: Memory of a worker, on the CPU of the whole process.
        pipelines: Numbers of pipelines to try.
        micro_batches: Numbers of micro-batches to try; None: from 1 to one sample each.
        profile: A profile of the model, in place of a new one.
        cluster: Devices and links that the plan is for, if not the workers at hand; nothing is timed then.
        link: Between workers, in place of the one that is measured; nothing is timed then.
        device: Where to profile and to time.
        clip_grad_norm: As of the ``Pipeline``.
        autocast: As of the ``Pipeline``.
        trials: How many plans are timed.
        budget_s: About how many seconds profiling may take.

    Raises:
        ValueError, TypeError: An argument is wrong, or nothing fits into the memory (by how much, and what would).
        StageError: A layer cannot be timed.
        PipelineError: A process failed.
    """
    world = World(_TIMEOUT_S)
    if cluster is not None and (workers is not None or memory_limit_bytes is not None):
        raise ValueError(
            "a cluster says how many workers there are, and their memory: leave out the one or the other"
        )
    inputs, targets = plain(example_inputs), plain(target)
    samples = sample_count(inputs, targets)
    known = profile
    if known is None:  # on all ranks at once, which slow each other down as they will in training
        known = layer_profile(
            model,
            example_inputs,
            loss_fn=loss_fn,
            target=target,
            device=device,
            micro_batch_sizes=profiled_sizes(samples),
            optimizer=optimizer,
            clip_grad_norm=clip_grad_norm,
            autocast=autocast,
            threads=torch.get_num_threads(),
            budget_s=budget_s,
        )
        if world.rank == 0:
            known = _with_workers(known, layers_of(model), device, link)
    known = Profile.from_json(world.gather(known.to_json())[0])
    count = world.size if workers is None else workers
    where = cluster or Cluster.like(known, count, memory_limit_bytes, link)
    space = Space(
        where.workers,
        len(layers_of(model)),
        samples,
        tuple(pipelines),
        None if micro_batches is None else tuple(micro_batches),
        lanes=max(known.second_lane, default=1.0) > 1,
    )
    here = cluster is None and link is None and where.workers == world.size > 1

    def make(plan: Plan) -> Pipeline:
        assert loss_fn is not None
        assert optimizer is not None
        options: dict[str, Any] = {"clip_grad_norm": clip_grad_norm, "autocast": autocast, "device": device}
        return Pipeline(model, plan, loss_fn=loss_fn, optimizer=optimizer, **options)

    timed = here and loss_fn is not None and optimizer is not None
    measure = _among(world, make, (inputs, targets)) if timed else None
    return study(known, where, space, measure, trials=trials).plan


def _with_workers(
    found: Profile, layers: Sequence[nn.Module], device: torch.device | str, link: LinkProfile | None
) -> Profile:
    on_host = torch.device(device).type == "cpu"
    measured = measure_workers(layers, torch.get_num_threads(), on_host and link is None)
    known = with_workers(found, measured, link)
    if not on_host:
        return known
    # Every rank has the whole model, too.
    whole = sum(t.nbytes for layer in layers for t in (*layer.parameters(), *layer.buffers()))
    return replace(known, process_bytes=known.process_bytes + whole)


def _among(world: World, make: Callable[[Plan], Pipeline], batch: Any) -> Measure:
    """Times a plan that takes all ranks of this run; all get the times of the first."""

    def measure(forecast: Forecast) -> Trial | None:
        if forecast.plan.workers != world.size:
            return None
        with make(forecast.plan) as pipeline:
            count = batches_of_round(forecast)
            samples = [pipeline_seconds(pipeline, batch, count) for _ in range(_ROUNDS)]
        rounds = torch.tensor(samples, dtype=torch.float64)
        first = tuple(world.broadcast(rounds, 0).tolist())
        return Trial(statistics.median(first), (), first)

    return measure
