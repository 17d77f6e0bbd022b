"""Profiles and trials of a workload, each in worker processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree as pytree

from avgpipe.device import own_device, select
from avgpipe.measure.forecast import Forecast
from avgpipe.measure.profiler import layer_profile, with_workers
from avgpipe.measure.trials import ROUNDS, Trial, batches_of_round, rounds_of
from avgpipe.measure.workers import WorkerCosts, costs_here
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.rendezvous import open_store
from avgpipe.runtime.batch import plain
from avgpipe.runtime.memory import peak_memory_bytes
from avgpipe.workloads import build_workload
from avgpipe.workloads.workload import Workload

_BATCHES = 16  # among which a typical one is looked for
_ONCE_S = 1e-3  # a budget for as little measuring as there can be
_MEASURED = "avgpipe/measured"  # of the store, when ranks 0 and 1 are done
_STARTING_S = 240.0  # for processes to begin and to read their data


@dataclass(frozen=True)
class Subject:
    """A workload to train, as a worker process needs to make it.

    Attributes:
        threads: Of torch, on the CPU, in each worker.
    """

    workload: str
    preset: str = "tiny"
    data: str | None = None
    batch_size: int | None = None
    device: str = "cpu"
    autocast: str = "auto"
    threads: int = 1

    def build(self) -> tuple[Workload, tuple[Any, Any]]:
        """Build the workload, and choose of its first batches the one of median size: sequences have many lengths."""

        def elements(batch: Any) -> int:
            return sum(x.numel() for x in pytree.tree_leaves(plain(batch)) if isinstance(x, torch.Tensor))

        workload = build_workload(
            self.workload, preset=self.preset, data=self.data, batch_size=self.batch_size
        )
        found = list(islice(iter(workload.train_batches(0)), _BATCHES))
        return workload, sorted(found, key=elements)[len(found) // 2]

    def options(self, workload: Workload) -> dict[str, Any]:
        """Return the options that a profile and a Pipeline take alike."""
        autocast = None if self.autocast == "none" else getattr(torch, self.autocast, None)
        return {
            "loss_fn": workload.loss_fn,
            "optimizer": workload.optimizer,
            "clip_grad_norm": workload.clip_grad_norm,
            "autocast": workload.autocast.get(self.device) if self.autocast == "auto" else autocast,
            "device": self.device,
        }


# ---- profiles ------------------------------------------------------------------------------------------------------


def profile_of(
    subject: Subject,
    *,
    micro_batch_sizes: Sequence[int],
    link: LinkProfile | None,
    budget_s: float,
    at_once: int = 1,
) -> Profile:
    """Profile in processes that each read the workload once. PipelineError when one fails.

    at_once: so many profile the layers at the same time, as workers of this machine would compute; what the first one
    finds counts.
    """
    with_link = subject.device == "cpu" and link is None
    limit_s = _STARTING_S + 10 * budget_s
    asked = {
        "subject": asdict(subject),
        "micro_batch_sizes": list(micro_batch_sizes),
        "budget_s": budget_s,
        "with_link": with_link,
        "at_once": at_once,
        "timeout_s": limit_s,
    }
    processes = max(at_once, 2 if with_link else 1)
    target = f"{__name__}:profiled"
    found, *_ = run_on_ranks(target, processes, asked, timeout_s=limit_s, threads=subject.threads)
    return with_workers(Profile.from_json(found["layers"]), WorkerCosts.from_dict(found["around"]), link)


def profiled(
    subject: dict[str, Any],
    micro_batch_sizes: Sequence[int],
    budget_s: float,
    with_link: bool,
    at_once: int,
    timeout_s: float,
) -> dict[str, Any]:
    """A process of :func:`profile_of`."""
    rank = int(os.environ["RANK"])
    asked = Subject(**subject)
    torch.set_num_threads(asked.threads)
    select(own_device(asked.device))
    kept = loaded(subject) if rank < at_once else None
    around = _first_two(rank, timeout_s) if with_link else costs_here(False, timeout_s)
    layers = ""
    if kept is not None:
        workload, batch = kept
        layers = layers_of_workload(asked, workload, batch, micro_batch_sizes, budget_s).to_json()
    return {"around": None if around is None else asdict(around), "layers": layers}


def loaded(subject: dict[str, Any]) -> Any:
    """Load what a worker has besides its share of the model: the whole model, the data, and the code that runs."""
    asked = Subject(**subject)
    workload, batch = asked.build()
    if asked.device == "cpu":
        layers_of_workload(asked, workload, batch, [1], _ONCE_S)
    return workload, batch


def _first_two(rank: int, timeout_s: float) -> WorkerCosts | None:
    """Measure what two workers cost, by ranks 0 and 1; the others wait for them."""
    store = open_store(timeout_s)
    if rank > 1:
        store.wait([_MEASURED])
        return None
    found = costs_here(True, timeout_s)
    store.set(_MEASURED, "")
    return found


def layers_of_workload(
    asked: Subject,
    workload: Workload,
    batch: tuple[Any, Any],
    micro_batch_sizes: Sequence[int],
    budget_s: float,
) -> Profile:

    inputs, target = batch
    return layer_profile(
        workload.layers,
        inputs,
        target=target,
        micro_batch_sizes=micro_batch_sizes,
        threads=asked.threads,
        budget_s=budget_s,
        name=f"{workload.name} {workload.preset}",
        **asked.options(workload),
    )


# ---- trials --------------------------------------------------------------------------------------------------------


def pipeline_of(subject: Subject, plan: Plan) -> tuple[Pipeline, tuple[Any, Any]]:
    """Make a pipeline, and the batch to train it on."""
    workload, batch = subject.build()
    options = subject.options(workload)
    return Pipeline(workload.layers, plan, loss_weight=workload.loss_weight, **options), batch


def trial_of(subject: Subject, forecast: Forecast) -> Trial:
    """Train for some seconds, if the forecast is right. PipelineError when a worker fails."""
    plan, batches = forecast.plan, batches_of_round(forecast)
    arguments = {"subject": asdict(subject), "plan": plan.to_json(), "batches": batches}
    limit_s = _STARTING_S + 20 * (ROUNDS + 1) * (batches + 2 * plan.pipelines) * forecast.batch_s
    found = run_on_ranks(
        f"{__name__}:tried", plan.workers, arguments, timeout_s=limit_s, threads=subject.threads
    )
    return Trial.of_rounds(found[0]["rounds_s"], [rank["memory_bytes"] for rank in found])


def tried(subject: dict[str, Any], plan: str, batches: int) -> dict[str, Any]:
    """A process of :func:`trial_of`."""
    asked = Subject(**subject)
    torch.set_num_threads(asked.threads)
    pipeline, batch = pipeline_of(asked, Plan.from_json(plan))
    with pipeline:
        rounds_s = rounds_of(pipeline, batch, batches)
        return {"rounds_s": rounds_s, "memory_bytes": peak_memory_bytes(pipeline.device)}
