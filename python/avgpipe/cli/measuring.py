"""Profiles and trials of a workload, each in worker processes of this machine."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree as pytree

from avgpipe.cli.config import PartitionConfig, ProfilingOptions, TuneConfig
from avgpipe.cli.resolve import pipeline_options, profile_options
from avgpipe.device import own_device, select
from avgpipe.measure.forecast import Forecast
from avgpipe.measure.profiler import profile, with_workers
from avgpipe.measure.tune import ROUNDS, Trial, batches_of_round, rounds_of
from avgpipe.measure.workers import WorkerCosts, costs_here
from avgpipe.model.batch import plain
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe.ranks.environment import peak_memory_bytes
from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.rendezvous import open_store
from avgpipe.tasks import Workload, build_workload

_BATCHES = 16  # the first batches, from which a typical one is chosen
_ONCE_S = 1e-3  # the least budget: every measurement once
_MEASURED = "avgpipe/measured"  # key of the store, set when ranks 0 and 1 are done
_STARTING_S = 240.0  # timeout for processes to start and to read their data


def build(config: ProfilingOptions) -> tuple[Workload, tuple[Any, Any]]:
    """Build the workload, and choose a typical batch."""
    workload = build_workload(config.workload, config.build_options())
    return workload, typical_batch(workload)


def typical_batch(workload: Workload) -> tuple[Any, Any]:
    """Return the batch of median size among a workload's first ones, as sequences have many lengths."""

    def elements(batch: Any) -> int:
        return sum(x.numel() for x in pytree.tree_leaves(plain(batch)) if isinstance(x, torch.Tensor))

    found = list(islice(iter(workload.train_batches(0)), _BATCHES))
    return sorted(found, key=elements)[len(found) // 2]


# ---- profiles ------------------------------------------------------------------------------------------------------


def link_of(config: ProfilingOptions) -> LinkProfile | None:
    """Return the link that the options describe; None for one that is to be measured."""
    if config.latency is None and config.bandwidth is None:
        return None
    if config.latency is None or config.bandwidth is None:
        given, missing = ("--latency", "--bandwidth")[:: 1 if config.bandwidth is None else -1]
        raise ValueError(f"{given} without {missing}: give both, or neither to have the link measured")
    return LinkProfile(config.latency, config.bandwidth)


def check_target(config: TuneConfig | PartitionConfig) -> None:
    """Refuse a command without a target to plan for, or with two. ValueError."""
    if (config.workers is None) == (config.cluster is None):
        raise ValueError("say what the plan is for: --workers NUMBER, or --cluster FILE")
    for option, value in (("--memory-limit", config.memory_limit_bytes), ("--bandwidth", config.bandwidth)):
        if config.cluster is not None and value is not None:
            raise ValueError(f"{option} with --cluster: write it into the file, or give only one of them")


def cluster_of(config: TuneConfig | PartitionConfig, profile: Profile) -> Cluster:
    """Return the cluster to plan for: the file's, else workers like the profiled one."""
    if config.cluster is not None:
        return Cluster.load(config.cluster)
    assert config.workers is not None
    return Cluster.like(profile, config.workers, config.memory_limit_bytes, link_of(config))


def profile_of(config: ProfilingOptions, micro_batch_sizes: Sequence[int], at_once: int = 1) -> Profile:
    """Profile a workload in processes that each read it once. PipelineError when one fails.

    Args:
        config: What to profile, and for how long.
        micro_batch_sizes: Samples of the micro-batches that are timed.
        at_once: Processes that profile the layers at the same time, as workers of this machine would compute;
            the result of the first one is used.
    """
    link = link_of(config)
    with_link = config.device == "cpu" and link is None
    limit_s = _STARTING_S + 10 * config.budget_s
    asked = {
        "config": config.to_json(),
        "micro_batch_sizes": list(micro_batch_sizes),
        "with_link": with_link,
        "at_once": at_once,
        "timeout_s": limit_s,
    }
    processes = max(at_once, 2 if with_link else 1)
    target = f"{__name__}:profiled"
    found, *_ = run_on_ranks(target, processes, asked, timeout_s=limit_s, threads=config.threads)
    return with_workers(Profile.from_json(found["layers"]), WorkerCosts.from_dict(found["around"]), link)


def profiled(
    config: str, micro_batch_sizes: Sequence[int], with_link: bool, at_once: int, timeout_s: float
) -> dict[str, Any]:
    """Measure as one of the processes of :func:`profile_of`."""
    rank = int(os.environ["RANK"])
    asked = ProfilingOptions.from_json(config)
    torch.set_num_threads(asked.threads)
    select(own_device(asked.device))
    kept = loaded(config) if rank < at_once else None
    around = _first_two(rank, timeout_s) if with_link else costs_here(False, timeout_s)
    layers = ""
    if kept is not None:
        workload, batch = kept
        layers = layers_of_workload(asked, workload, batch, micro_batch_sizes, asked.budget_s).to_json()
    return {"around": None if around is None else asdict(around), "layers": layers}


def loaded(config: str) -> Any:
    """Return what a worker has in memory besides its stage: the whole model, the data and loaded code."""
    asked = ProfilingOptions.from_json(config)
    workload, batch = build(asked)
    if asked.device == "cpu":
        layers_of_workload(asked, workload, batch, [1], _ONCE_S)
    return workload, batch


def _first_two(rank: int, timeout_s: float) -> WorkerCosts | None:
    """Return the costs of a worker, measured by ranks 0 and 1; the others wait for them."""
    store = open_store(timeout_s)
    if rank > 1:
        store.wait([_MEASURED])
        return None
    found = costs_here(True, timeout_s)
    store.set(_MEASURED, "")
    return found


def layers_of_workload(
    config: ProfilingOptions,
    workload: Workload,
    batch: tuple[Any, Any],
    micro_batch_sizes: Sequence[int],
    budget_s: float,
) -> Profile:
    """Profile the layers in this process."""
    inputs, target = batch
    found = profile(
        workload.layers,
        inputs,
        target=target,
        micro_batch_sizes=micro_batch_sizes,
        threads=config.threads,
        budget_s=budget_s,
        layers_only=True,
        **profile_options(config, workload),
    )
    return replace(found, model=workload.label)


# ---- trials --------------------------------------------------------------------------------------------------------


def trial_of(config: ProfilingOptions, forecast: Forecast) -> Trial:
    """Train for some seconds, if the forecast is right. PipelineError when a worker fails."""
    # Without warm-up rounds, which wait: the timing is of the steady state.
    plan, batches = replace(forecast.plan, warmup_rounds=0), batches_of_round(forecast)
    arguments = {"config": config.to_json(), "plan": plan.to_json(), "batches": batches}
    limit_s = _STARTING_S + 20 * (ROUNDS + 1) * (batches + 2 * plan.pipelines) * forecast.batch_s
    found = run_on_ranks(
        f"{__name__}:tried", plan.workers, arguments, timeout_s=limit_s, threads=config.threads
    )
    return Trial(statistics.median(found[0]["rounds_s"]), tuple(rank["memory_bytes"] for rank in found))


def tried(config: str, plan: str, batches: int) -> dict[str, Any]:
    """Measure as one of the processes of :func:`trial_of`."""
    asked = ProfilingOptions.from_json(config)
    torch.set_num_threads(asked.threads)
    workload, batch = build(asked)
    options = pipeline_options(asked, workload)
    with Pipeline(workload.layers, Plan.from_json(plan), **options) as pipeline:
        rounds_s = rounds_of(pipeline, batch, batches)
        return {"rounds_s": rounds_s, "memory_bytes": peak_memory_bytes(pipeline.device)}
