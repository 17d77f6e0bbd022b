"""Checks that all ranks get the same batches, ends of loaders, and inputs to predict.

The first stage reads a batch's inputs and the last one its targets, each from the loader of its own rank. A
loader that draws differently on one rank would pair inputs with the targets of other samples, without an
error. So each rank computes checksums of its batches, and compares them with the first ones in the shared
store. No rank waits for another.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.utils import _pytree as pytree

from avgpipe.errors import PipelineError
from avgpipe.model.model import Model, stage_layers
from avgpipe.ranks.world import Loops, World
from avgpipe.runtime.placement import Placement

_log = logging.getLogger("avgpipe")

# Ranks compare the first batches of each loop, then those whose numbers are powers of 2, and every hundredth.
_FIRST, _EVERY = 3, 100
_ROWS, _ROW_BYTES = 64, 1024  # of a tensor that are checksummed
_ADVICE = (
    "every rank must give the same batches in the same order. Whatever draws random numbers must be seeded alike on "
    "all ranks before it draws (torch.manual_seed, random.seed, numpy.random.seed; avgpipe run does so unless --seed "
    "says otherwise), or have its own generator with a fixed seed"
)


def mark(value: Any) -> list[Any]:
    """Return a checksum of a pytree's tensors and plain values, and the shapes of its tensors.

    Large tensors are sampled: the beginnings of some of their rows.
    """
    found, shapes = 0, []
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, torch.Tensor):
            found = crc32(repr(leaf).encode(), found)
            continue
        shapes.append(f"{list(leaf.shape)} {str(leaf.dtype)[6:]}")
        found = crc32(shapes[-1].encode(), found)
        if leaf.layout is torch.strided and not leaf.is_meta and leaf.numel():
            found = crc32(_some(leaf.detach()).numpy().data, found)
    return [found, ", ".join(shapes)]


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Return some of a tensor's bytes, on the CPU."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor[:: -(-len(tensor) // _ROWS)]
    some = rows.reshape(len(rows), -1)[:, : _ROW_BYTES // tensor.element_size()]
    return some.resolve_neg().contiguous().view(torch.uint8).reshape(-1).cpu()


def check_weights(world: World, placement: Placement, model: Model, layers: Sequence[nn.Module]) -> None:
    """Refuse initial weights that differ on ranks that train copies of one stage; warn of other differences.

    Every rank calls this. ValueError on all of them.
    """
    here = [_weights_of(model, layers, k) for k in range(model.stages)]
    marks = world.gather([mark(list(of_stage.values()))[0] for of_stage in here])
    apart = [k for k in range(model.stages) if len({of_rank[k] for of_rank in marks}) > 1]
    for k in apart:
        ranks = sorted(
            {placement.rank_of(n) for i in placement.pipelines for n in placement.replicas_of(k, i)}
        )
        if len({marks[rank][k] for rank in ranks}) > 1:
            found = world.gather({name: mark(tensor)[0] for name, tensor in here[k].items()})
            first = next(name for name in here[k] if len({found[rank].get(name) for rank in ranks}) > 1)
            raise ValueError(
                f"ranks {ranks} train copies of stage {k}, and begin with different weights, as in {first!r}: every "
                "rank must make the same model. Seed it alike on all of them, by torch.manual_seed before the model is "
                "made (avgpipe run does so unless --seed says otherwise), or load the same weights"
            )
    if apart and not world.rank:
        _log.warning(
            "ranks have made models with different weights, and each stage trains those of its own rank: what is "
            "trained is a mixture. Call torch.manual_seed with one number on every rank before the model is made"
        )


def _weights_of(model: Model, layers: Sequence[nn.Module], stage: int) -> dict[str, torch.Tensor]:
    state = nn.ModuleList(stage_layers(layers, *model.bounds[stage : stage + 2])).state_dict()
    return {entry.names[0]: state[entry.local] for entry in model.entries[stage]}


class Alike(Loops):
    """Compares what this rank gets from its loader with other ranks.

    Args:
        fail: ends a wait of this rank.
        is_on: whether anything is compared.
        generation: how often lost ranks were replaced. A new rank runs its script from the beginning, and may
            pass loops that the others have finished. So after a replacement only the batches of the current loop are
            compared.
    """

    def __init__(
        self, world: World, fail: Callable[[BaseException], None], is_on: bool, generation: int = 0
    ) -> None:
        super().__init__(is_on and world.size > 1, generation)
        self._world, self._fail = world, fail

    def batch(self, number: int, inputs: Any, targets: Any) -> None:
        """Compare a batch that begins here, if it is due; ValueError if another rank has a different one."""
        loop = self.here
        loop.begun, loop.seen = number + 1, loop.seen + 1
        is_due = loop.seen <= _FIRST or not number & (number - 1) or not number % _EVERY
        if self._is_on and is_due:
            self._compare(
                f"{loop.session}/{loop.name}/{number}", f"batch {number} of {loop.name}", inputs, targets
            )
        if not self._is_on:
            loop.due = math.inf
        elif loop.seen >= _FIRST:
            loop.due = min(1 << number.bit_length(), (number // _EVERY + 1) * _EVERY)

    def _compare(self, name: str, what: str, inputs: Any, targets: Any) -> None:
        mine = {"inputs": mark(inputs), "targets": mark(targets)}
        rank, theirs = self._first(name, mine)
        different = [part for part in mine if mine[part] != theirs[part]]
        if different:
            shapes = [of[different[0]][1] for of in (theirs, mine)]
            how = f"{shapes[0]} and {shapes[1]}" if shapes[0] != shapes[1] else f"other values of {shapes[0]}"
            raise ValueError(
                f"{what} is not the same on rank {rank} and rank {self._world.rank}: its {' and '.join(different)} "
                f'differ ({how}); {_ADVICE}. Audit("off") leaves this out'
            )

    def _first(self, name: str, mine: Any) -> tuple[int, Any]:
        """Return the first value of this name, and its rank: ``mine`` if it is first, or no store answers."""
        try:
            rank, first = json.loads(self._world.first(name, json.dumps([self._world.rank, mine])))
        except RuntimeError:  # no store answers: training goes on, and later calls do not wait
            self._is_on = False
            return self._world.rank, mine
        return rank, first

    # ---- the ends of loaders -----------------------------------------------------------------------------------------

    def end(self, number: int) -> None:
        """Publish that the loader here has ended before a batch of this number."""
        loop = self.here
        if not self._is_on or self._generation or loop.has_ended:
            return
        loop.has_ended = True
        rank, at = self._first(loop.end, number)
        if at != number:
            raise self._other_end(rank, at, str(number))

    def look(self) -> None:
        """Check whether this rank has begun a batch that another one lacks; called regularly by a thread."""
        loop = self.here
        if not self._is_on or not loop.begun or loop.has_ended:
            return
        with suppress(RuntimeError):  # the store does not answer: next time
            text = self._world.noted(loop.end)
            if text is not None and json.loads(text)[1] < loop.begun:
                rank, at = json.loads(text)
                self._fail(self._other_end(rank, at, f"at least {loop.begun}"))

    def _other_end(self, rank: int, at: int, mine: str) -> PipelineError:
        return PipelineError(
            f"the loaders of {self.here.name} differ in length: rank {rank} has {at} batches, rank {self._world.rank} "
            f"has {mine}. Give all ranks one loader, without a sampler or shard by rank, or end all at the length of "
            f"the shortest one, as by itertools.islice: {_ADVICE}"
        )
