"""The unsplit model as the runtime sees it: layers, the cut into stages, and the names of everything in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
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
    """``bounds``: first layer of each stage, then the number of layers."""

    layers: list[nn.Module]
    bounds: list[int]
    tensors: dict[str, torch.Tensor]  # the unsplit model's, by name

    @classmethod
    def split(
        cls, model: nn.Module | Sequence[nn.Module], stages: int, partition: Sequence[Any] | None
    ) -> Model:
        layers = layers_of(model)
        return cls(layers, stage_bounds(layers, stages, partition), named_tensors(model))

    @cached_property
    def names(self) -> dict[int, list[str]]:
        """All names of a tensor, by its identity."""
        names: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            names.setdefault(id(tensor), []).append(name)
        return names

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def skips(self) -> list[Skips]:
        """Of every stage, the values that go past the stages beside it."""
        pieces = [layer.values for layer in self.layers if isinstance(layer, Segment)]
        traced = len(pieces) == len(self.layers)
        return skips(pieces, self.bounds) if traced else [NO_SKIPS] * self.stages

    def stage_layers(self, k: int) -> list[nn.Module]:
        return self.layers[self.bounds[k] : self.bounds[k + 1]]

    def trainable(self, k: int) -> list[nn.Parameter]:
        """Trainable parameters of stage ``k``, each once, in the order of its arena."""
        return [p for p in nn.ModuleList(self.stage_layers(k)).parameters() if p.requires_grad]

    @cached_property
    def entries(self) -> list[list[Entry]]:
        """Everything that is saved, per stage; a tensor that is tied inside a stage stands there once."""
        result = []
        for k in range(self.stages):
            places = {id(p): n for n, p in enumerate(self.trainable(k))}
            seen: dict[int, Entry] = {}
            for local, t in nn.ModuleList(self.stage_layers(k)).state_dict(keep_vars=True).items():
                if id(t) in self.names and id(t) not in seen:
                    seen[id(t)] = Entry(self.names[id(t)], local, places.get(id(t)), t.shape, t.dtype)
            result.append(list(seen.values()))
        return result

    def trainable_names(self, k: int) -> list[str]:
        """First names of the parameters of ``trainable(k)``."""
        return [self.names[id(p)][0] for p in self.trainable(k)]

    def shared(self, k: int) -> dict[int, list[int]]:
        """For every other stage that holds trainable parameters of stage ``k`` too: their places in
        ``trainable(k)``.
        """
        mine = {id(p): n for n, p in enumerate(self.trainable(k))}
        result = {}
        for other in range(self.stages):
            if other == k:
                continue
            theirs = {id(p) for p in self.trainable(other)}
            # both stages list them in the order of the earlier one
            places = [mine[id(p)] for p in self.trainable(min(k, other)) if id(p) in mine and id(p) in theirs]
            if places:
                result[other] = places
        return result

    def shared_values(self) -> dict[str, str]:
        """SHA-256 of every parameter that several stages hold: copies that must begin alike."""
        held = [self.trainable(k) for k in range(self.stages)]
        counts = Counter(id(p) for stage in held for p in stage)
        shared = {id(p): p for stage in held for p in stage if counts[id(p)] > 1}
        return {
            self.names[n][0]: sha256(
                p.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            ).hexdigest()
            for n, p in shared.items()
        }

    def signature(self) -> dict[str, list[Any]]:
        """Shape and dtype of every saved tensor by name: what a checkpoint must agree with."""
        return {
            name: [list(e.shape), str(e.dtype)[6:]]
            for stage in self.entries
            for e in stage
            for name in e.names
        }
