"""The levels of a network, and divisions of a chain of layers over its workers, exact for the least bottleneck."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from avgpipe.errors import check_count
from avgpipe.model.balance import EXACT, Array, check_stages
from avgpipe.planning.cluster import MOST_LEVELS, Cluster, Level
from avgpipe.planning.costs import number
from avgpipe.planning.profile import LinkProfile, Profile

Levels = tuple[Level, ...]


def network(
    profile: Profile,
    stages: int | None,
    workers: int | None,
    levels: Sequence[Sequence[float]] | None,
    link: LinkProfile | None,
) -> Levels:
    """Return the levels that a partitioner's options describe, lowest first.

    Without levels, there is one level of ``workers`` (None: as many as stages, or 4) on ``link`` (None: the
    profile's; without one, transfers count as free).
    """
    check_stages(len(profile.layers), stages)
    if levels is None:
        count = workers if workers is not None else 4 if stages is None else stages
        check_count("workers", count)
        made = Cluster.like(profile, count, link=link).levels
    else:
        if link is not None:
            raise ValueError("link and levels both give the speed of the network: leave one out")
        if not levels:
            raise ValueError(
                "levels is empty: give (units, bytes_per_s) of each, lowest first, or leave it out"
            )
        check_count("the number of levels", len(levels), most=MOST_LEVELS)
        made = tuple(_checked_level(n, level) for n, level in enumerate(levels))
    total = math.prod(level.units for level in made)
    if workers not in (None, total):
        units = " x ".join(str(level.units) for level in made)
        raise ValueError(f"workers={workers!r}, but the levels have {units} = {total}: leave workers out")
    if stages is not None and total < stages:
        raise ValueError(
            f"workers={total}: {stages} stages need a worker each, give {stages} or fewer stages"
        )
    return made


def _checked_level(n: int, level: Sequence[float]) -> Level:
    try:
        made = Level(*level)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(
            f"levels[{n}]={level!r}: must be (units, bytes_per_s) or (units, bytes_per_s, latency_s)"
        ) from error
    check_count(f"levels[{n}]: units", made.units)
    number(f"levels[{n}]: latency_s", made.latency_s)
    if made.bytes_per_s != math.inf and not number(f"levels[{n}]: bytes_per_s", made.bytes_per_s):
        raise ValueError(f"levels[{n}]: bytes_per_s={made.bytes_per_s!r}: must be above 0")
    return made


# ---- divisions ------------------------------------------------------------------------------------------------------


def least_of(tables: Sequence[Array]) -> Array:
    found: Array = np.min(tables, axis=0)
    return found


class Block(NamedTuple):
    """Layers ``first`` to ``last`` - 1 on a number of workers (or units of workers), with ``behind`` of them after."""

    first: int
    last: int
    workers: int
    behind: int


class Divisions:
    """Divisions of a chain into stages on one or more workers each, by the least bottleneck.

    The recursion is PipeDream's A(j, m), from the last stage on, since the memory of a stage depends on later
    ones.

    Args:
        stage: Cost of every stage on ``own`` workers with ``behind`` after it, as :func:`table_of` makes it.
        layers: Number of layers of the chain.
        ends: Where the divided part may end; by default at the end of the chain.
        replicas: The most workers of a stage.
        cut: Cost of beginning a stage, other than the first, with a layer.
    """

    def __init__(
        self,
        layers: int,
        stage: Callable[[int, int], Array],
        *,
        ends: Sequence[int] | None = None,
        replicas: int = sys.maxsize,
        cut: Array | float = 0.0,
    ) -> None:
        self._layers, self._stage, self._most = layers, stage, replicas
        self._ends = np.array([layers] if ends is None else ends)
        self._cut: Array = np.broadcast_to(cut, layers + 1)[:, None]
        self.least = cache(self._least)

    def _least(self, workers: int, stages: int | None = None) -> Array:
        """Return the least bottleneck of exactly these workers and stages (None: any), by first layer and end."""
        owns = range(1, min(workers, self._most) + 1)
        return least_of([self._joined(own, workers, stages) for own in owns])

    def _behind(self, own: int, workers: int, stages: int | None) -> Array:
        """Return the bottleneck behind a first stage on ``own`` of the workers, by its first layer and end."""
        if workers > own and stages != 1:
            found: Array = self.least(workers - own, None if stages is None else stages - 1)
            return np.maximum(found, self._cut)
        at_end = np.arange(self._layers + 1)[:, None] == self._ends
        return np.where(at_end & (workers == own and stages in (None, 1)), 0.0, math.inf)

    def _joined(self, own: int, workers: int, stages: int | None) -> Array:
        stage, behind = self._stage(own, workers - own), self._behind(own, workers, stages)
        return np.stack([np.maximum(stage, end).min(axis=1) for end in behind.T], axis=1)

    def best(self, most: int, stages: int | None = None) -> tuple[float, list[Block]]:
        """Return the best division of the whole chain on up to ``most`` workers; math.inf if none is possible."""
        values = [float(self.least(workers, stages)[0, -1]) for workers in range(1, most + 1)]
        workers = next(n for n, value in enumerate(values, 1) if value <= min(values) * (1 + EXACT))
        value = values[workers - 1]
        return value, [] if value == math.inf else self.blocks(0, -1, workers, stages)

    def blocks(self, first: int, end: int, workers: int, stages: int | None = None) -> list[Block]:
        """Return the best division on exactly ``workers`` from layer ``first`` to the ``end``-th of the ends."""
        found: list[Block] = []
        while workers:
            worst = [
                np.maximum(self._stage(own, workers - own)[first], self._behind(own, workers, stages)[:, end])
                for own in range(1, min(workers, self._most) + 1)
            ]
            own, last = divmod(int(np.argmin(worst)), self._layers + 1)
            found.append(Block(first, last, own + 1, workers - own - 1))
            first, workers = last, workers - own - 1
            stages = None if stages is None else stages - 1
        return found
