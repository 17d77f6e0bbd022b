"""The unsplit model as the runtime sees it: layers, the cut into stages, and the names of everything in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from avgpipe.runtime.skips import NO_SKIPS, Skips, skips
from avgpipe.runtime.split import Segment, layers_of, named_tensors, stage_bounds


class Entry(NamedTuple):
    """A tensor of a stage's ``state_dict``: its names in the unsplit model, its name in the stage, its place in
    the arena.
    """

    names: list[str]
    local: str
    arena: int | None  # None: a frozen parameter or a buffer
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Model:
    """What is known of the model that was given: nothing here changes with it afterwards.

    bounds: first layer of each stage, then the number of layers. names: of the unsplit model's ``state_dict``, in its
    order. entries: everything that is saved, per stage; a tensor that is tied inside a stage stands there once.
    trainable: of each stage the first names of its trainable parameters, each once, in the order of its arena.
    shapes: of each stage a tensor without values for each of them. shared: of each stage, for every other one that
    holds trainable parameters of it too, their places in ``trainable``, in an order that both agree on. skips: of each
    stage, the values that go past the stages beside it. unused: copies of what no stage holds, as no forward uses it.
    """

    bounds: list[int]
    names: list[str]
    entries: list[list[Entry]]
    trainable: list[list[str]]
    shapes: list[list[torch.Tensor]]
    shared: list[dict[int, list[int]]]
    skips: list[Skips]
    unused: dict[str, torch.Tensor]

    @classmethod
    def split(
        cls, model: nn.Module | Sequence[nn.Module], stages: int, partition: Sequence[Any] | None
    ) -> Model:
        return cls.cut(model, layers_of(model), stages, partition)

    @classmethod
    def cut(
        cls,
        model: nn.Module | Sequence[nn.Module],
        layers: Sequence[nn.Module],
        stages: int,
        partition: Sequence[Any] | None,
    ) -> Model:
        """``layers``: those of ``model``."""
        bounds = stage_bounds(layers, stages, partition)
        tensors = named_tensors(model)
        names: dict[int, list[str]] = {}  # all names of a tensor
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        held = [nn.ModuleList(layers[a:b]) for a, b in pairwise(bounds)]
        trainable = [trainable_parameters(stage) for stage in held]
        shared = [_shared(trainable, k) for k in range(len(held))]
        for of, others in zip(trainable, shared):
            for n in (n for places in others.values() for n in places if of[n]._backward_hooks):
                raise ValueError(
                    f"parameter {names[id(of[n])][0]!r} has a hook and is held by several stages, none of which sees "
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
        )

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    def signature(self) -> dict[str, list[Any]]:
        """Shape and dtype of every saved tensor by name: what a checkpoint must agree with."""
        return {
            name: [list(e.shape), str(e.dtype)[6:]]
            for stage in self.entries
            for e in stage
            for name in e.names
        }

    def shared_values(self, layers: Sequence[nn.Module]) -> dict[str, str]:
        """SHA-256 of every parameter of ``layers`` that several stages hold: copies that must begin alike."""
        found = {}
        for k, others in enumerate(self.shared):
            parameters = trainable_parameters(nn.ModuleList(layers[self.bounds[k] : self.bounds[k + 1]]))
            for n in {n for places in others.values() for n in places}:
                data = parameters[n].detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
                found[self.trainable[k][n]] = sha256(data).hexdigest()
        return found


def trainable_parameters(layers: nn.Module) -> list[nn.Parameter]:
    """Those of a stage, each once, in the order of its arena."""
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
    pieces = [layer.values for layer in layers if isinstance(layer, Segment)]
    return skips(pieces, bounds) if len(pieces) == len(layers) else [NO_SKIPS] * (len(bounds) - 1)
