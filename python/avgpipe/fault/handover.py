"""The state that an isolated pipeline begins with when it joins others: the reference's, and a donor's."""

from __future__ import annotations

import io
from contextlib import suppress
from dataclasses import astuple
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from avgpipe.checkpoint.content import put_together, readable, taken_apart
from avgpipe.errors import CheckpointError
from avgpipe.fault.turn_feed import Counts
from avgpipe.runtime.weights import published_average, stage_state
from avgpipe.runtime.worker import Worker


def check_state(worker: Worker, number: int) -> None:
    """Refuse, before a run begins, state that no joining pipeline could read; CheckpointError names it."""
    (pipeline,) = worker.placement.pipelines
    trained = worker.trained[number, pipeline]
    for made in (trained.optimizer, trained.lr_scheduler):
        if made is not None:
            readable(made.state_dict())


def give_state(worker: Worker, number: int, counts: Counts) -> bytes:
    """Return the state of a stage replica between two steps, at the position ``counts`` of the run.

    The donor's own part is the optimizer's state, the learning-rate schedule's and the loss scale; neither
    its weights nor what its layers carry from batch to batch.
    """
    (pipeline,) = worker.placement.pipelines
    trained, reference, ema = (
        worker.trained[number, pipeline],
        worker.references[number],
        worker.emas.get(number),
    )
    state: dict[str, Any] = {"counts": astuple(counts), "rest": stage_state(worker, number, pipeline)}
    state["rest"] |= {
        name: value for name, value in published_average(worker, number).items() if name in state["rest"]
    }
    if trained.lr_scheduler is not None:
        state["lr_scheduler"] = trained.lr_scheduler.state_dict()
    if trained.loss_scale is not None:
        state["loss_scale"] = trained.loss_scale.state_dict()
    if reference is not None and trained.optimizer is not None:
        averaging = reference.state_dict()
        state["reference"] = {**averaging, "outer": taken_apart(averaging["outer"])}
        of_all = trained.optimizer.state_dict()
        state["optimizer"] = {**of_all, "state": taken_apart(of_all["state"])}
    if ema is not None:
        state["ema"] = {"flats": list(ema.flats), "updates": ema.updates}
    with suppress(CheckpointError):  # else the joining pipeline cannot read it, and ends, not this one
        state = readable(state)
    buffer = io.BytesIO()
    torch.save(tree_map_only(torch.Tensor, torch.Tensor.cpu, state), buffer)
    return buffer.getvalue()


@torch.no_grad()
def take_state(given: bytes, worker: Worker, number: int) -> Counts:
    """Begin with a given state; return the run's position."""
    (pipeline,) = worker.placement.pipelines
    trained, reference, ema = (
        worker.trained[number, pipeline],
        worker.references[number],
        worker.emas.get(number),
    )
    state = torch.load(io.BytesIO(given), weights_only=True)
    if reference is not None and trained.elastic is not None:
        averaging, of_all = state["reference"], state["optimizer"]
        inner = trained.elastic.inner
        if reference.outer is not None:
            averaging["outer"] = put_together(averaging["outer"], reference.outer)
        reference.load_state_dict(averaging)
        trained.elastic.load_state_dict({**of_all, "state": put_together(of_all["state"], inner)})
        for mine, z in zip(trained.arena.weights, reference.z.flats):
            mine.copy_(z)
    if trained.lr_scheduler is not None:
        trained.lr_scheduler.load_state_dict(state["lr_scheduler"])
    if trained.loss_scale is not None:
        trained.loss_scale.load_state_dict(state["loss_scale"])
    tensors = trained.stage.layers.state_dict(keep_vars=True)
    for name, value in state["rest"].items():
        tensors[name].data.copy_(value)
    if ema is not None:
        for flat, value in zip(ema.flats, state["ema"]["flats"]):
            flat.copy_(value)
        ema.updates = state["ema"]["updates"]
    trained.replaced()
    return Counts(*state["counts"])
