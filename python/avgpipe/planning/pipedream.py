"""PipeDream's partitioner: the fewest seconds of the slowest stage, with replicated stages (Narayanan et al. 2019).

The bottleneck of layers i to j on m workers is T = max(sum of T_l, W(m)) / m, with W(m) = 4 (m - 1) |w| / (m B) for
the synchronisation of their weights; a cut behind layer i costs 2 C_i. As the paper's table A(j, m), it takes
O(layers^2 workers^2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from avgpipe.planning.chain import Chain, does_not_fit, limit_of
from avgpipe.planning.cluster import Levels, network
from avgpipe.planning.costs import Array
from avgpipe.planning.cuts import Block, Divisions, least_of, table_of
from avgpipe.planning.partition import Partition
from avgpipe.planning.profile import LinkProfile, Profile


def pipedream(
    profile: Profile,
    stages: int | None = None,
    *,
    workers: int | None = None,
    levels: Sequence[Sequence[float]] | None = None,
    link: LinkProfile | None = None,
    micro_batch_size: float | None = None,
    memory_limit_bytes: float | None = None,
) -> Partition:
    """Method "pipedream" of :func:`avgpipe.partition`; the exact optimum with up to ``workers`` workers.

    Workers that would not make the bottleneck shorter stay unused. On several levels a stage has whole units of a
    level, and each of its units is cut further in the same way over the units inside; what crosses a cut takes the
    cut's level. stages: only with one level.

    memory_limit_bytes: of a worker, for gradients and optimizer state, and for each micro-batch in flight a version of
    the weights and what is kept for its backward. In flight on each of m workers with n behind are 1 + ceil(n / m);
    inside units, n / m is rounded up to a power of 2.
    """
    nets = network(profile, stages, workers, levels, link)
    total = math.prod(level.units for level in nets)
    chain = Chain(profile, micro_batch_size, nets[-1].link)
    if stages is not None and len(nets) > 1:
        raise ValueError(
            f"stages={stages} with {len(nets)} levels: they follow from the levels, leave stages out"
        )
    limit = limit_of(memory_limit_bytes)
    top, units = len(nets) - 1, nets[-1].units
    search = _Search(chain, nets, limit)
    value, blocks = search.divided(top, 0).best(units, stages)
    if value == math.inf:
        least, _ = _Search(chain, nets, math.inf, by_bytes=True).divided(top, 0).best(units, stages)
        raise does_not_fit(limit, least, "use more workers or smaller micro-batches")
    pieces = search.pieces(top, blocks, 0)
    return Partition.of_chain(
        chain,
        [piece.first for piece in pieces],
        method="pipedream",
        replication=[len(piece.placed) for piece in pieces],
        stage_s=[piece.seconds for piece in pieces],
        objective="slowest stage, link or synchronisation, per micro-batch",
        value=value,
        workers=total,
        memory_bytes=_sizes(chain, pieces),
        placement=_numbered(pieces) if len(nets) > 1 else None,
        system="pipedream",
    )


class Piece(NamedTuple):
    """Layers ``first`` to ``last`` - 1 on workers of a unit, by their numbers in it; seconds per micro-batch."""

    first: int
    last: int
    placed: tuple[int, ...]
    seconds: float


class _Search:
    """Divisions of the chain over the units of each level: workers, or above all units of the level below.

    ``behind``: workers that micro-batches still have before them, over those that share them with a unit.
    ``by_bytes``: the bottleneck is the worker that needs most memory.
    """

    def __init__(self, chain: Chain, levels: Levels, limit: float, by_bytes: bool = False) -> None:
        self._chain, self._levels, self._limit, self._by_bytes = chain, levels, limit, by_bytes
        self._counts_bytes = by_bytes or limit < math.inf
        self._workers = [math.prod(level.units for level in levels[:n]) for n in range(len(levels))]
        self._compute_s = table_of(chain.layers, chain.compute_s)
        self._weights = chain.parameter_bytes(*np.ogrid[: chain.layers + 1, : chain.layers + 1])
        self._unit = cache(self._of_unit)
        self.divided = cache(self._divided)

    def _divided(self, n: int, behind: int) -> Divisions:
        """Over the units of level ``n``."""
        level = self._levels[n]

        def stage(own: int, after: int) -> Array:
            found = self._unit(n, self._behind(n, own, after, behind))
            if not self._by_bytes:
                found = np.maximum(found, _sync_s(self._weights, own, level.bytes_per_s)) / own
            return found

        cut_s = 0.0 if self._by_bytes else 2 * level.link.seconds(self._chain.boundary_bytes)
        top = n == len(self._levels) - 1
        return Divisions(
            self._chain.layers, stage, ends=None if top else range(self._chain.layers + 1), cut=cut_s
        )

    def _of_unit(self, n: int, behind: int) -> Array:
        """The bottleneck of layers on one unit of level ``n``; math.inf where they do not fit."""
        if n:
            inside = self.divided(n - 1, behind)
            return least_of([inside.least(own) for own in self._counts(n - 1)])
        if not self._counts_bytes:
            return self._compute_s
        size = table_of(self._chain.layers, partial(_worker_bytes, self._chain, behind))
        return size if self._by_bytes else np.where(size <= self._limit, self._compute_s, math.inf)

    def _counts(self, n: int) -> range:
        return range(1, self._levels[n].units + 1)

    def _behind(self, n: int, own: int, after: int, behind: int) -> int:
        """Workers behind each of ``own`` units of level ``n`` that ``after`` follow; few numbers, so few tables."""
        if not self._counts_bytes:
            return 0
        share = math.ceil((behind + after * self._workers[n]) / own)
        return 1 << (share - 1).bit_length() if n and share else share

    def pieces(self, n: int, blocks: Sequence[Block], behind: int) -> list[Piece]:
        """The stages of ``blocks``, which are on units of level ``n``, with their workers."""
        found: list[Piece] = []
        taken = 0
        for block in blocks:
            rate = self._levels[n].bytes_per_s
            for piece in self._inside(n, block, self._behind(n, block.workers, block.behind, behind)):
                units = range(taken, taken + block.workers)
                placed = tuple(unit * self._workers[n] + w for unit in units for w in piece.placed)
                sync_s = _sync_s(self._weights[piece.first, piece.last], block.workers, rate)
                found.append(
                    piece._replace(placed=placed, seconds=max(piece.seconds, sync_s) / block.workers)
                )
            taken += block.workers
        return found

    def _inside(self, n: int, block: Block, behind: int) -> list[Piece]:
        """How a unit of level ``n`` divides the layers of a block."""
        first, last = block.first, block.last
        if n == 0:
            return [Piece(first, last, (0,), self._compute_s[first, last])]
        divided = self.divided(n - 1, behind)
        units = min(self._counts(n - 1), key=lambda own: divided.least(own)[first, last])
        return self.pieces(n - 1, divided.blocks(first, last, units), behind)


def _sync_s(size_bytes: Any, workers: int, bytes_per_s: float) -> Any:
    """W_l(m) = 4 (m - 1) |w_l| / (m B)."""
    return 4 * (workers - 1) * size_bytes / (workers * bytes_per_s)


def _worker_bytes(chain: Chain, behind: int, first: Any, last: Any) -> Any:
    """PipeDream's memory: for each micro-batch in flight a version of the weights beside what it holds."""
    return chain.stage_bytes(first, last, in_flight=1 + behind, versions=1 + behind)


def _numbered(pieces: Sequence[Piece]) -> list[list[int]]:
    """Per stage its workers, when those that nobody uses are left out."""
    numbers = {w: n for n, w in enumerate(sorted(w for piece in pieces for w in piece.placed))}
    return [[numbers[w] for w in piece.placed] for piece in pieces]


def _sizes(chain: Chain, pieces: Sequence[Piece]) -> list[float]:
    found, behind = [], 0
    for piece in reversed(pieces):
        own = len(piece.placed)
        found.append(_worker_bytes(chain, math.ceil(behind / own), piece.first, piece.last))
        behind += own
    return found[::-1]
