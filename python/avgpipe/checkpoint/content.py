"""The content of a checkpoint for a stage replica: plain containers and tensors."""

from __future__ import annotations

import io
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from avgpipe.elastic.flat import is_made_of_others
from avgpipe.errors import CheckpointError, reason
from avgpipe.model.context import Carry
from avgpipe.model.model import Model
from avgpipe.runtime.optimizers import members_of
from avgpipe.runtime.trained_stage import TrainedStage
from avgpipe.runtime.weights import published_average, stage_state
from avgpipe.runtime.worker import Worker


def content_of(model: Model, worker: Worker, number: int, whole: bool = False) -> dict[str, Any]:
    """Return plain containers and tensors only, so that they load with ``weights_only=True``. Names are first names.

    The workers of a replicated stage hold the same, except for the state carried from batch to batch: unless
    ``whole``, the first one's content has all, the others' only the carried state.
    """
    content = changed_by_updates(model, worker, number, whole)
    for i in worker.placement.pipelines_of(number):
        content["replicas"][i] |= changed_by_forwards(model, worker, number, i, whole)
    if worker.others is not None:  # another run resumes with one pipeline's optimizer
        content["replicas"] = dict(enumerate(content["replicas"].values()))
    return content


def changed_by_forwards(
    model: Model, worker: Worker, number: int, pipeline: int, whole: bool = False
) -> dict[str, Any]:
    """Return the part of the content that a pipeline's forwards change."""
    k, copy, _ = worker.placement.replicas[number]
    trained = worker.trained[number, pipeline]
    carry = {place: dict(carry.values) for place, carry in carries(trained).items()}
    if copy > 0 and not whole:
        return {"carry": readable(carry)}
    rest = stage_state(worker, number, pipeline)
    if worker.others is not None:
        rest |= published_average(worker, number)
    found = {
        "carry": carry,
        "rest": {e.names[0]: rest[e.local] for e in model.entries[k] if e.arena is None},
        "loss_scale": None if trained.loss_scale is None else trained.loss_scale.state_dict(),
    }
    return readable(found)  # type: ignore[no-any-return]


def changed_by_updates(model: Model, worker: Worker, number: int, whole: bool = False) -> dict[str, Any]:
    """Return the part of the content that updates change: reference, pipelines' weights and optimizers.

    Under some rules the optimizers' states are the reference's.
    """
    k, copy, _ = worker.placement.replicas[number]
    replicas = {i: worker.trained[number, i] for i in worker.placement.pipelines_of(number)}
    if copy > 0 and not whole:
        return {"replicas": {i: {} for i in replicas}}
    content: dict[str, Any] = {
        "reference": None,
        "replicas": {i: _state_of(trained, model.trainable[k]) for i, trained in replicas.items()},
    }
    for i, replica in content["replicas"].items():
        replica["skipped"] = worker.lanes[number, i].update.skipped
    layout = next(iter(replicas.values())).arena.layout
    if (reference := worker.references[number]) is not None:
        weights = dict(zip(model.trainable[k], layout.tensors(reference.parameters)))
        state = reference.state_dict()
        content["reference"] = {"weights": weights, "state": {**state, "outer": taken_apart(state["outer"])}}
    if (ema := worker.emas.get(number)) is not None:
        weights = dict(zip(model.trainable[k], layout.tensors(ema.flats)))
        content["ema"] = {"weights": weights, "updates": ema.updates}
    return readable(content)  # type: ignore[no-any-return]


def _state_of(trained: TrainedStage, names: list[str]) -> dict[str, Any]:
    arena = trained.arena

    def by_name(flats: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(zip(names, arena.layout.tensors(flats)))

    state: dict[str, Any] = {
        "weights": by_name(arena.weights),
        "older": {},  # versions that the next batches run on, by their distance in updates
        "optimizer": optimizer_state(trained, names),
        "lr_scheduler": None if trained.lr_scheduler is None else trained.lr_scheduler.state_dict(),
    }
    if trained.has_modes:
        with trained.evaluated():
            state["evaluated"] = by_name([flat.clone() for flat in arena.weights])
    if trained.versions is not None:
        state["older"] = {behind: by_name(flats) for behind, flats in trained.versions.older().items()}
    if (found := state["optimizer"]) is not None:
        found["state"] = {**found["state"], "state": taken_apart(found["state"]["state"])}
    return state


def carries(trained: TrainedStage) -> dict[str, Carry]:
    """Return carried states by place in the unsplit model: layer number, and number within the layer."""
    return {
        f"{number}.{n}": carry
        for number, layer in enumerate(trained.stage.layers, trained.stage.first)
        for n, carry in enumerate(m for m in layer.modules() if isinstance(m, Carry))
    }


def optimizer_state(trained: TrainedStage, names: list[str]) -> dict[str, Any] | None:
    """Return the optimizer's ``state_dict``, and the first names of its parameters, in the order of numbers in it."""
    optimizer = trained.optimizer
    if optimizer is None:
        return None
    return {"state": optimizer.state_dict(), "names": parameter_names(trained, optimizer, names)}


def parameter_names(trained: TrainedStage, optimizer: torch.optim.Optimizer, names: list[str]) -> list[str]:
    """Return first names of the optimizer's parameters, in the order of numbers in its ``state_dict``."""
    by_id = {id(p): name for p, name in zip(trained.arena.parameters, names)}
    return [by_id[id(p)] for group in optimizer.param_groups for p in group["params"]]


# ---- what a file may hold, as it is written --------------------------------------------------------------------------

_NUMBERS = bool, int, float, complex, str
_PLAIN = {type(None), bytes, torch.Tensor, torch.nn.Parameter, *_NUMBERS}


def readable(state: Any, name: str = "state") -> Any:
    """Return a state with Python's own numbers for NumPy's, such as a rate computed by ``np.cos``.

    CheckpointError, with ``name``, for types that ``weights_only=True`` does not read.
    """
    kind = type(state)
    if kind in _PLAIN:
        return state
    if kind in (dict, OrderedDict):
        return kind((readable(key), readable(value, str(key))) for key, value in state.items())
    if kind in (list, tuple):
        return kind(readable(value, name) for value in state)
    if isinstance(state, np.generic):
        state = state.item()
    number = next((number for number in _NUMBERS if isinstance(state, number)), None)
    if number is not None:
        return number(state)
    try:
        torch.save(state, written := io.BytesIO())
        torch.load(io.BytesIO(written.getvalue()), weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{name!r} is of {kind.__module__}.{kind.__qualname__}, which no checkpoint can hold ({reason(error)}): "
            "use plain numbers, containers and tensors"
        ) from error
    return state


# ---- subclasses of tensors -------------------------------------------------------------------------------------------


_CLASS = "class of a tensor"  # the key that distinguishes a tensor in its plain form from other containers


def taken_apart(value: Any) -> Any:
    """Return an optimizer's state as plain containers and tensors; CheckpointError if it has no such form."""
    if isinstance(value, Mapping):
        return {key: taken_apart(part) for key, part in value.items()}
    if not isinstance(value, torch.Tensor) or type(value) in (torch.Tensor, torch.nn.Parameter):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if not is_made_of_others(value):
        raise CheckpointError(
            f"the optimizer's state has a tensor of {kind}, which has no plain form (__tensor_flatten__) to be saved "
            "in: use another optimizer"
        )
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: taken_apart(getattr(value, name)) for name in names}
    shape = [list(value.shape), list(value.stride())]
    return {_CLASS: kind, "parts": parts, "context": context, "shape": shape}


def put_together(value: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Invert :func:`taken_apart`, for ``optimizer``.

    Raises:
        ValueError: for a class that is not of its package: a file must not decide what is imported.
    """
    if not isinstance(value, Mapping):
        return value
    if _CLASS not in value:
        return {key: put_together(part, optimizer) for key, part in value.items()}
    module, _, name = value[_CLASS].rpartition(".")
    kinds = [kind for member in members_of(optimizer) for kind in type(member).__mro__]
    found = getattr(sys.modules.get(module), name, None)
    if found is None or _package(module) not in {_package(kind.__module__) for kind in kinds}:
        raise ValueError(
            f"the optimizer that was saved keeps {name} of {_package(module)}, and {type(optimizer).__name__} has no "
            "such tensors"
        )
    parts = {key: put_together(part, optimizer) for key, part in value["parts"].items()}
    return found.__tensor_unflatten__(parts, value["context"], *map(torch.Size, value["shape"]))


def _package(module: str) -> str:
    return module.partition(".")[0]
