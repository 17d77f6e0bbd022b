"""Distances of replicas from their reference and each other, over the whole model, without copies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

import torch

from avgpipe.elastic.flat import Layout
from avgpipe.model.model import Model
from avgpipe.runtime.worker import Worker

_PIECE = 2**18  # elements that are converted to float64 at once
_NORM = "norm"


@dataclass(frozen=True)
class Distances:
    """Euclidean distances of N replicas over all weights that were trainable from the beginning.

    Attributes:
        norm: Norm of the reference's weights; of a single pipeline, of its own.
        to_reference: Distance of each replica from the reference.
        between: N x N, the distances between replicas; None if they are in different processes.
    """

    norm: float
    to_reference: tuple[float, ...]
    between: tuple[tuple[float, ...], ...] | None

    @property
    def relative(self) -> Distances:
        """The distances divided by the reference's norm; NaN if that is 0."""

        def shares(distances: Sequence[float]) -> tuple[float, ...]:
            return tuple(d / self.norm if self.norm else math.nan for d in distances)

        between = None if self.between is None else tuple(map(shares, self.between))
        return replace(self, to_reference=shares(self.to_reference), between=between)


@torch.no_grad()
def gather_distances(model: Model, worker: Worker) -> Distances:
    """Measure the distances; no batch is in flight. Every rank calls this.

    Squares are summed in float64. A parameter that several stages hold counts once, and so does a stage with replicas,
    which hold the same weights.
    """
    placement, pipelines = worker.placement, worker.placement.pipelines
    total: dict[str, float] = defaultdict(float)
    for stages in worker.world.gather([_squares(model, worker, k) for k in range(placement.stages)]):
        for name, square in chain.from_iterable(found.items() for found in stages):
            total[name] += square
    to_reference = tuple(math.sqrt(total[_name(i)]) for i in pipelines)
    between = None
    if not placement.is_dedicated or worker.world.size == 1:
        between = tuple(tuple(math.sqrt(total[_name(i, j)]) for j in pipelines) for i in pipelines)
    return Distances(math.sqrt(total[_NORM]), to_reference, between)


def _squares(model: Model, worker: Worker, k: int) -> dict[str, float]:
    """Return squared distances on a stage, by name, between weights that are both in this process."""
    found: dict[str, torch.Tensor] = {}
    held: dict[int, list[torch.Tensor]] = {}
    for i in worker.placement.pipelines:
        replica = worker.placement.replicas_of(k, i)[0]
        if replica not in worker.held:
            continue
        arena = worker.trained[replica, i].arena
        held[i] = _pieces(model, k, arena.layout, arena.weights)
        reference = _pieces(model, k, arena.layout, worker.weights(replica, "reference"))
        found[_name(i)] = _square(held[i], reference)
        if i == worker.placement.evaluates:
            found[_NORM] = _square(reference)
    found |= {_name(i, j): _square(held[i], held[j]) for i, j in combinations(held, 2)}
    return dict(zip(found, torch.stack(list(found.values())).tolist())) if found else {}


def _name(*replicas: int) -> str:
    """Return the name of the distance of a replica from the reference, or of two from each other."""
    return " ".join(map(str, sorted(replicas)))


def _pieces(model: Model, k: int, layout: Layout, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return flat weights of a stage in pieces, without the parameters that an earlier stage also holds."""
    earlier = {n for other, places in model.shared[k].items() if other < k for n in places}
    found = []
    for number, flat in enumerate(flats):
        regions = [r for n, r in enumerate(layout.regions) if n in earlier and r.buffer == number]
        begins = [0, *(r.stop for r in regions)]
        ends = [*(r.offset for r in regions), len(flat)]
        found += [piece for a, b in zip(begins, ends) if a < b for piece in torch.split(flat[a:b], _PIECE)]
    return found


def _square(pieces: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Return the squared distance of pieces from others, or without others their squared norm, float64 []."""
    sums = []
    for n, piece in enumerate(pieces):
        difference = piece.double() - others[n] if others else piece.double()
        sums.append(torch.dot(difference, difference))
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)
