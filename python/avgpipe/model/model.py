"""The unsplit model in the runtime: a chain of layers, its cut into stages, and the names of its tensors.

Each layer gets the output of the layer before. The chain does not depend on the number of stages, so random
numbers keyed by layer do not either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from avgpipe.model.balance import balance
from avgpipe.model.estimate import Estimate
from avgpipe.model.parts import NO_SKIPS, PartLayer, Skips, Whole, skips_of

# ---- the chain of layers and its cut -----------------------------------------------------------


def stage_layers(layers: Sequence[nn.Module], begin: int, end: int) -> Sequence[nn.Module]:
    """Return modules that compute the layers from ``begin`` on, before ``end``: as many as layers, or fewer."""
    return layers.stage(begin, end) if isinstance(layers, Whole) else layers[begin:end]


def stage_bounds(
    layers: Sequence[nn.Module],
    stages: int,
    partition: Sequence[Any] | None,
    estimate: Estimate | None = None,
) -> list[int]:
    """Return the first layer of every stage, then the number of layers.

    Args:
        layers: Layers of the whole model.
        stages: Number of stages.
        partition: See ``Plan``.
        estimate: Costs of the layers, for the cut if there is no partition; by default the estimate without
            an example.
    """
    count = len(layers)
    if stages > count:
        raise ValueError(
            f"{stages} stages need at least as many layers, and the model has {count}: {_more_layers(layers)}"
        )
    if partition is None:
        if stages in (1, count):
            return [*range(stages), count]
        found = estimate or Estimate.of(layers)
        return [0, *balance(found.costs, stages, found.sent), count]
    first = [p if isinstance(p, int) else _named(layers, p) for p in partition]
    bounds = [0, *first, count]
    if any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(
            f"partition {list(partition)} leaves a stage without layers: the first layers {first} "
            "of stages 1.. must rise "
            f"and stay below {count}"
        )
    return bounds


def _more_layers(layers: Sequence[nn.Module]) -> str:
    """Describe how the model was divided, and what to do if it has too few layers."""
    if not all(isinstance(layer, PartLayer) and layer.recorded is not None for layer in layers):
        return "use fewer stages, or a list of the modules inside larger layers, with Source(names_of=model)"
    return (
        "torch.fx begins a layer where the forward enters one of torch's modules, or one of your modules that hold "
        "parameters themselves; where it finds one layer, and example_inputs= is given, torch.export looks for blocks, "
        "too. Use fewer stages, move parts of the forward into modules of their own, or pass a list of layers, with "
        "Source(names_of=model)"
    )


def _named(layers: Sequence[nn.Module], name: str) -> int:
    """Find the first layer that calls the module ``name`` or one inside of it; its ``calls`` has the name."""
    stated = [getattr(layer, "calls", None) for layer in layers]
    called = [calls if isinstance(calls, str) else str(n) for n, calls in enumerate(stated)]
    for n, target in enumerate(called):
        if (target + ".").startswith(name + "."):
            return n
    raise ValueError(
        f"split point {name!r} is not a module that the model calls; it calls {', '.join(called)}"
    )


def named_tensors(model: nn.Module | Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the ``state_dict`` of the unsplit model, with the original tensors (tied ones under each name)."""
    whole = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    state = whole.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def learning_tensors(model: nn.Module | Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the parameters that require gradients, by their first names, in the order of ``model.parameters()``."""
    first = {id(p): (name, p) for name, p in reversed(named_tensors(model).items()) if p.requires_grad}
    return dict(reversed(first.values()))


def _versions(model: nn.Module | Sequence[nn.Module]) -> dict[str, dict[str, Any]]:
    whole = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    state: Any = whole.state_dict(keep_vars=True)
    return dict(getattr(state, "_metadata", {}))


# ---- everything in the model, by name -----------------------------------------------------------


class Entry(NamedTuple):
    """A tensor of a stage's ``state_dict``.

    Attributes:
        names: Names in the unsplit model.
        local: Name in the stage.
        arena: Number among the parameters in flat buffers; None for a frozen parameter or a buffer.
    """

    names: list[str]
    local: str
    arena: int | None
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Model:
    """Facts about the given model, which later changes of the model do not affect.

    Attributes:
        bounds: First layer of each stage, then the number of layers.
        names: Names of the unsplit model's ``state_dict``, in its order.
        entries: All saved tensors, per stage; a tensor that is tied inside a stage has one entry.
        trainable: First names of each stage's trainable parameters, each once, in the order of its flat
            buffers.
        shapes: A tensor without values for each of these.
        shared: For each stage and every other one that also holds some of its trainable parameters, their
            places in ``trainable``, in an order that both share.
        skips: For each stage, the values that skip the neighbouring stages.
        unused: Copies of the tensors that no stage holds, as no forward uses them.
        versions: Versions of the modules' state, by name, as in the ``_metadata`` of the unsplit model's
            ``state_dict``.
        normalises: Whether some layer normalises by the statistics of all its samples in training.
    """

    bounds: list[int]
    names: list[str]
    entries: list[list[Entry]]
    trainable: list[list[str]]
    shapes: list[list[torch.Tensor]]
    shared: list[dict[int, list[int]]]
    skips: list[Skips]
    unused: dict[str, torch.Tensor]
    versions: dict[str, dict[str, Any]]
    normalises: bool

    @classmethod
    def cut(
        cls,
        model: nn.Module | Sequence[nn.Module],
        layers: Sequence[nn.Module],
        stages: int,
        partition: Sequence[Any] | None,
        estimate: Estimate | None = None,
    ) -> Model:
        """Cut ``model``, which ``layers`` compute, into ``stages``; for the rest see :func:`stage_bounds`."""
        bounds = stage_bounds(layers, stages, partition, estimate)
        if isinstance(layers, Whole):
            layers.prove(bounds)
        tensors = named_tensors(model)
        names: dict[int, list[str]] = {}  # all names of a tensor
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        held = [nn.ModuleList(stage_layers(layers, a, b)) for a, b in pairwise(bounds)]
        trainable = [trainable_parameters(stage) for stage in held]
        shared = [_shared(trainable, k) for k in range(len(held))]
        for of, others in zip(trainable, shared):
            for n in (n for places in others.values() for n in places if of[n]._backward_hooks):
                raise ValueError(
                    f"parameter {names[id(of[n])][0]!r} has a hook and is held by several stages, none of which has "
                    "its whole gradient: remove the hook, or use a partition that keeps its layers together"
                )
        entries = [_entries(stage, names, of) for stage, of in zip(held, trainable)]
        saved = {name for stage in entries for e in stage for name in e.names}
        return cls(
            bounds=bounds,
            names=list(tensors),
            entries=entries,
            trainable=[[names[id(p)][0] for p in of] for of in trainable],
            shapes=[[torch.empty_like(p, device="meta") for p in of] for of in trainable],
            shared=shared,
            skips=_skips(layers, bounds),
            unused={name: t.detach().clone() for name, t in tensors.items() if name not in saved},
            versions=_versions(model),
            normalises=any(isinstance(m, _BatchNorm) for stage in held for m in stage.modules()),
        )

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    def signature(self) -> dict[str, list[Any]]:
        """Return shape and dtype of every saved tensor by name, which a checkpoint must match."""
        return {
            name: [list(e.shape), str(e.dtype)[6:]]
            for stage in self.entries
            for e in stage
            for name in e.names
        }

    def shared_values(self, layers: Sequence[nn.Module]) -> dict[str, str]:
        """Return the SHA-256 of each parameter that several stages hold: their copies must start equal."""
        found: dict[str, str] = {}
        for k in range(self.stages):
            parameters = trainable_parameters(nn.ModuleList(stage_layers(layers, *self.bounds[k : k + 2])))
            found |= self.shared_digests(k, parameters)
        return found

    def shared_digests(self, stage: int, parameters: Sequence[torch.Tensor]) -> dict[str, str]:
        """Return the SHA-256 of those of a stage's trainable parameters that others also hold, by name."""
        return {
            self.trainable[stage][n]: _digest(parameters[n])
            for n in {n for places in self.shared[stage].values() for n in places}
        }


def _digest(tensor: torch.Tensor) -> str:
    return sha256(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def trainable_parameters(layers: nn.Module) -> list[nn.Parameter]:
    """Return a stage's trainable parameters, each once, in the order of its flat buffers."""
    return [p for p in layers.parameters() if p.requires_grad]


def _entries(stage: nn.Module, names: dict[int, list[str]], trainable: Sequence[nn.Parameter]) -> list[Entry]:
    places = {id(p): n for n, p in enumerate(trainable)}
    seen: dict[int, Entry] = {}
    for local, t in stage.state_dict(keep_vars=True).items():
        if id(t) in names and id(t) not in seen:
            seen[id(t)] = Entry(names[id(t)], local, places.get(id(t)), t.shape, t.dtype)
    return list(seen.values())


def _shared(trainable: Sequence[Sequence[nn.Parameter]], k: int) -> dict[int, list[int]]:
    mine = {id(p): n for n, p in enumerate(trainable[k])}
    result = {}
    for other, of in enumerate(trainable):
        theirs = {id(p) for p in of}
        # both stages list them in the order of the earlier one
        places = [mine[id(p)] for p in trainable[min(k, other)] if id(p) in mine and id(p) in theirs]
        if other != k and places:
            result[other] = places
    return result


def _skips(layers: Sequence[nn.Module], bounds: Sequence[int]) -> list[Skips]:
    pieces = [layer.values for layer in layers if isinstance(layer, PartLayer)]
    return skips_of(pieces, bounds) if len(pieces) == len(layers) else [NO_SKIPS] * (len(bounds) - 1)
