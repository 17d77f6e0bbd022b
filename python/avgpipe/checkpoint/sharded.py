"""A pipeline's state for torch.distributed.checkpoint: the unsplit model's names, and a rank's tensors.

    model       by name, weights and buffers: DTensors if a stage is sharded, else plain tensors
    optimizer   by name of a parameter, its optimizer state, likewise
    training    a text: batches, the settings of groups by their parameters' names, learning-rate schedule, loss scale

As torch reads any part of a saved tensor into any part of another, it loads with another number of stages,
other shards, or none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from avgpipe.checkpoint.content import optimizer_state, parameter_names
from avgpipe.checkpoint.fitting import check_scale
from avgpipe.checkpoint.folder import agreed
from avgpipe.checkpoint.load import OF_STAGE, load_by_name, restore_schedule
from avgpipe.elastic.flat import copied, is_made_of_others, local_part
from avgpipe.errors import CheckpointError, reason
from avgpipe.files import json_object
from avgpipe.model.model import Model
from avgpipe.runtime.trained_stage import TrainedStage
from avgpipe.runtime.worker import Worker

_PARTS = ("model", "optimizer", "training")
_OF_ALL = ("lr_scheduler", "loss_scale")  # settings taken from the first stage that has them


def sharded_state(model: Model, worker: Worker, batches: int) -> dict[str, Any]:
    """Return this rank's part of the state; its tensors of the model are the very ones that train."""
    if any(worker.world.gather(any(trained.has_modes for _, trained in _stages(worker)))):
        raise CheckpointError(
            "the optimizer keeps other weights for evaluation than for training, which torch.distributed.checkpoint "
            "does not distinguish: use save(folder) and load(folder)"
        )
    weights: dict[str, torch.Tensor] = dict(model.unused)
    optimizers: dict[str, dict[str, torch.Tensor]] = {}
    for k, trained in _stages(worker):
        weights.update(_weights(model, k, trained))
        optimizers.update(_optimizer_state(trained, model.trainable[k]))

    def settings() -> list[dict[str, Any]]:
        return [_settings(trained, model.trainable[k]) for k, trained in _stages(worker)]

    everywhere = agreed(worker.world, "there is no state to save", settings)
    found = [of_stage for of_rank in everywhere for of_stage in of_rank]
    merged = {what: next((s[what] for s in found if s[what] is not None), None) for what in _OF_ALL}
    groups = [group for of_stage in found for group in of_stage["groups"]]
    training = json.dumps({"batches": batches, "groups": groups, **merged})
    return {"model": weights, "optimizer": optimizers, "training": training}


@torch.no_grad()
def load_sharded_state(state: Mapping[str, Any], model: Model, worker: Worker) -> int:
    """Load a :func:`sharded_state` that torch has filled; return the number of batches.

    Raises:
        CheckpointError: if it is no such state.
    """
    try:
        weights, optimizers, training = (state[part] for part in _PARTS)
        settings = json_object(
            "training", training, finite=False
        )  # a schedule may wait for less than infinity
        groups = {name: of for members, of in _decoded(settings["groups"]) for name in members}
        for name, tensor in model.unused.items():
            tensor.copy_(weights[name])
        for k, trained in _stages(worker):
            for name, tensor in _weights(model, k, trained).items():
                tensor.copy_(weights[name])
            if trained.optimizer is not None:
                order = parameter_names(trained, trained.optimizer, model.trainable[k])
                load_by_name(trained.optimizer, order, groups, optimizers, _copied)
            schedule, scale = (_decoded(settings[what]) for what in _OF_ALL)
            restore_schedule(trained, schedule, exactly=False)
            if trained.loss_scale is not None and scale is not None:
                check_scale(scale)
                trained.loss_scale.load_state_dict(scale)
            trained.replaced()
        for replica, ema in worker.emas.items():
            ema.restart(worker.weights(replica, "reference"))
        return int(settings["batches"])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise CheckpointError(
            f"this is no state for this pipeline: {type(error).__name__}: {reason(error)}; have "
            "torch.distributed.checkpoint.load fill what sharded_state_dict() returns here, and pass that"
        ) from error


def _stages(worker: Worker) -> Iterator[tuple[int, TrainedStage]]:
    for (replica, _), trained in worker.trained.items():
        yield worker.placement.stage_of(replica), trained


def _weights(model: Model, k: int, trained: TrainedStage) -> dict[str, torch.Tensor]:
    """Return weights and buffers of a stage by every name that they have."""
    trainable = trained.arena.tensors()
    rest = trained.stage.layers.state_dict()
    return {
        name: rest[entry.local] if entry.arena is None else trainable[entry.arena]
        for entry in model.entries[k]
        for name in entry.names
    }


def _optimizer_state(trained: TrainedStage, names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    found = optimizer_state(trained, names)
    if found is None or trained.optimizer is None:
        return {}
    states = found["state"]["state"] or _first_state(trained.optimizer)
    return {
        name: {key: torch.as_tensor(value) for key, value in states[n].items() if value is not None}
        for n, name in enumerate(found["names"])
        if n in states
    }


def _first_state(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Return the optimizer's state after its first step, by number, as zeros: places to load into.

    It makes the state by a step with zero gradients, and restores the optimizer.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    kept = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0
    optimizer.step()
    with torch.no_grad():
        for p, value in zip(parameters, kept):
            p.grad = None
            p.copy_(value)
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
    found = {
        n: {key: _zeroed(torch.as_tensor(v)) for key, v in of.items() if v is not None}
        for n, of in optimizer.state_dict()["state"].items()
    }
    optimizer.state.clear()
    return found


@torch.no_grad()
def _zeroed(value: torch.Tensor) -> torch.Tensor:
    part = local_part(value)
    if not is_made_of_others(part):
        return torch.zeros_like(value)
    part.copy_(torch.zeros(part.shape, dtype=part.dtype, device=part.device))  # its class has no zeros_like
    return value


def _copied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: copied(value) for key, value in state.items()}


def _settings(trained: TrainedStage, names: list[str]) -> dict[str, Any]:
    """Return what training needs beside tensors, for JSON; of groups the names and settings."""
    groups = []
    if (found := optimizer_state(trained, names)) is not None:
        for group in found["state"]["param_groups"]:
            settings = {key: value for key, value in group.items() if key not in OF_STAGE}
            groups.append(_encoded(([found["names"][n] for n in group["params"]], settings)))
    scheduler, scale = trained.lr_scheduler, trained.loss_scale
    return {
        "groups": groups,
        "lr_scheduler": None if scheduler is None else _encoded(scheduler.state_dict()),
        "loss_scale": None if scale is None else _encoded(scale.state_dict()),
    }


# ---- Python's values for JSON, which has neither tuples nor keys that are numbers ------------------------------------


def _encoded(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list):
        return [_encoded(part) for part in value]
    if isinstance(value, tuple):
        return {"tuple": [_encoded(part) for part in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_encoded(key), _encoded(part)] for key, part in value.items()]}
    raise CheckpointError(
        f"the optimizer's settings or lr_scheduler's state have {type(value).__name__}, which is no plain value: save "
        "it yourself, and leave it out of state_dict()"
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(part) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    if kind == "tuple":
        return tuple(map(_decoded, parts))
    return {_decoded(key): _decoded(part) for key, part in parts}
