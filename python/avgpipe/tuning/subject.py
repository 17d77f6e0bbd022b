"""What trials and profiles of a workload run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree as pytree

from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.profiling.profile import LinkProfile, Profile
from avgpipe.profiling.profiler import profile
from avgpipe.runtime.batch import plain
from avgpipe.tuning.trial import Subject
from avgpipe.workloads import build_workload
from avgpipe.workloads.workload import Workload

_BATCHES = 16  # among which a typical one is looked for


def workload_of(subject: Subject) -> Workload:
    return build_workload(
        subject.workload, preset=subject.preset, data=subject.data, batch_size=subject.batch_size
    )


def typical_batch(workload: Workload) -> tuple[Any, Any]:
    """Of the first batches of training the one of median size, as where sequences have many lengths."""
    found = list(islice(iter(workload.train_batches(0)), _BATCHES))
    return sorted(found, key=_elements)[len(found) // 2]


def _elements(batch: Any) -> int:
    return sum(x.numel() for x in pytree.tree_leaves(plain(batch)) if isinstance(x, torch.Tensor))


def autocast_of(subject: Subject, workload: Workload) -> torch.dtype | None:
    if subject.autocast == "auto":
        return workload.autocast.get(subject.device)
    return None if subject.autocast == "none" else getattr(torch, subject.autocast)


def loaded(subject: dict[str, Any]) -> Any:
    """What a worker has in memory besides its share of the model: the whole model, and the data."""
    workload = workload_of(Subject(**subject))
    return workload, typical_batch(workload)


def profile_of(
    subject: Subject,
    workload: Workload,
    *,
    micro_batch_sizes: Sequence[int],
    link: LinkProfile | None,
    budget_s: float,
) -> Profile:
    inputs, target = typical_batch(workload)
    return profile(
        workload.layers,
        inputs,
        target=target,
        loss_fn=workload.loss_fn,
        optimizer=workload.optimizer,
        device=subject.device,
        micro_batch_sizes=micro_batch_sizes,
        link=link,
        clip_grad_norm=workload.clip_grad_norm,
        autocast=autocast_of(subject, workload),
        threads=subject.threads,
        budget_s=budget_s,
        name=f"{workload.name} {workload.preset}",
        worker_loads=(f"{__name__}:loaded", {"subject": asdict(subject)}),
    )


def pipeline_of(subject: Subject, plan: Plan) -> tuple[Pipeline, tuple[Any, Any]]:
    """And the batch to train it on."""
    workload = workload_of(subject)
    batch = typical_batch(workload)
    made = Pipeline(
        workload.layers,
        plan,
        loss_fn=workload.loss_fn,
        optimizer=workload.optimizer,
        clip_grad_norm=workload.clip_grad_norm,
        loss_weight=workload.loss_weight,
        autocast=autocast_of(subject, workload),
        device=subject.device,
    )
    return made, batch
