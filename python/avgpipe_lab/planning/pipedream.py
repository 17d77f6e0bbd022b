"""PipeDream's partitioner with replicated stages, and PipeDream-2BW's planner (Narayanan et al. 2019, 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from avgpipe.errors import check_count
from avgpipe.model.balance import EXACT, table_of
from avgpipe.planning.chain import Chain, does_not_fit, limit_of
from avgpipe.planning.cluster import Level, ring_s
from avgpipe.planning.costs import Array
from avgpipe.planning.partition import Partition
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe_lab.planning.divisions import Block, Divisions, Levels, least_of, network

_RECOMPUTE = 4 / 3  # forward, forward again and a backward of twice a forward, over forward and backward


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

    The bottleneck of layers i to j on m workers is T = max(sum of T_l, W(m)) / m, with W(m) = 4 (m - 1) |w| /
    (m B) for the synchronisation of their weights; a cut behind layer i costs 2 C_i. Like the paper's table
    A(j, m), it takes O(layers^2 workers^2).

    Workers that would not shorten the bottleneck stay unused. With several levels a stage has whole units of
    a level, and each of its units is divided further in the same way over the units inside; transfers at a
    cut use the link of the cut's level.

    Args:
        profile: Profile of the model.
        stages: Number of stages K, with one level only; None: the optimum.
        workers: The most workers to use.
        levels: Levels of the network, instead of ``workers`` and ``link``.
        link: Link between two workers.
        micro_batch_size: Samples of a micro-batch.
        memory_limit_bytes: Memory of a worker, for gradients and optimizer state, and for each micro-batch in
            flight a version of the weights and the values kept for its backward. In flight on each of m
            workers with n behind are 1 + ceil(n / m); inside units, n / m is rounded up to a power of 2.
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
        memory_bytes=_bytes_of(chain, pieces),
        placement=_numbered(pieces) if len(nets) > 1 else None,
        system="pipedream",
    )


def _bytes_of(chain: Chain, pieces: Sequence[Piece]) -> list[float]:
    """Return the bytes of a worker of each piece."""
    own = [len(piece.placed) for piece in pieces]
    behind = [math.ceil(sum(own[k + 1 :]) / own[k]) for k in range(len(own))]
    return [_worker_bytes(chain, n, piece.first, piece.last) for n, piece in zip(behind, pieces)]


class Piece(NamedTuple):
    """Layers ``first`` to ``last`` - 1 on workers of a unit, by their numbers in it; seconds per micro-batch."""

    first: int
    last: int
    placed: tuple[int, ...]
    seconds: float


class _Search:
    """Divisions of the chain over the units of each level: workers, or on higher levels units of the level below.

    ``behind``: number of later workers, divided by the number of workers that share them with a unit.
    ``by_bytes``: minimize the memory of the worker that needs most.
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
        """Return the divisions over the units of level ``n``."""
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
        """Return the bottleneck of layers on one unit of level ``n``; math.inf if they do not fit."""
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
        """Return the workers behind each of ``own`` units of level ``n``, ``after`` following, rounded."""
        if not self._counts_bytes:
            return 0
        share = math.ceil((behind + after * self._workers[n]) / own)
        return 1 << (share - 1).bit_length() if n and share else share

    def pieces(self, n: int, blocks: Sequence[Block], behind: int) -> list[Piece]:
        """Return the stages of ``blocks``, which are on units of level ``n``, with their workers."""
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
        """Return how a unit of level ``n`` divides the layers of a block."""
        first, last = block.first, block.last
        if n == 0:
            return [Piece(first, last, (0,), self._compute_s[first, last])]
        divided = self.divided(n - 1, behind)
        units = min(self._counts(n - 1), key=lambda own: divided.least(own)[first, last])
        return self.pieces(n - 1, divided.blocks(first, last, units), behind)


def _sync_s(size_bytes: Any, workers: int, bytes_per_s: float) -> Any:
    """Return W_l(m) = 4 (m - 1) |w_l| / (m B)."""
    return 4 * (workers - 1) * size_bytes / (workers * bytes_per_s)


def _worker_bytes(chain: Chain, behind: int, first: Any, last: Any) -> Any:
    """Return PipeDream's memory: for each micro-batch in flight, its held bytes and a version of the weights."""
    return chain.stage_bytes(first, last, in_flight=1 + behind, versions=1 + behind)


def _numbered(pieces: Sequence[Piece]) -> list[list[int]]:
    """Return the workers of each stage, numbered without the unused ones."""
    numbers = {w: n for n, w in enumerate(sorted(w for piece in pieces for w in piece.placed))}
    return [[numbers[w] for w in piece.placed] for piece in pieces]


# ---- PipeDream-2BW: width, depth, micro-batch size and recomputation -------------------------------------------------


class Shape(NamedTuple):
    """``width`` pipelines, the samples of a micro-batch, and the micro-batches of each pipeline's share of a batch."""

    width: int
    samples: int
    micro_batches: int
    recompute: bool


def _fastest(every: Sequence[_Shaped], limit: float) -> tuple[float, _Shaped, list[Block]]:
    """Return samples per second, the shape and the blocks of the fastest that fits; ValueError if none does."""
    rate, best, blocks = 0.0, every[0], list[Block]()
    for shaped in every:
        slowest_s, found = shaped.divided(shaped.where_fits(limit))
        samples_per_s = shaped.shape.width * shaped.shape.samples / slowest_s if slowest_s else math.inf
        if samples_per_s > rate * (1 + EXACT):
            rate, best, blocks = samples_per_s, shaped, found
    if not blocks:
        least = min(shaped.divided(shaped.bytes)[0] for shaped in every)
        raise does_not_fit(limit, least, "use more workers or smaller micro-batches")
    return rate, best, blocks


def pipedream_2bw(
    profile: Profile,
    stages: int | None = None,
    *,
    workers: int | None = None,
    batch_size: int | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    recompute: bool | None = None,
    link: LinkProfile | None = None,
    memory_limit_bytes: float | None = None,
) -> Partition:
    """Method "2bw" of :func:`avgpipe.partition`: the fastest plan that fits, exactly.

    For every width w, depth d with w d <= workers, micro-batch size b, with and without recomputation: a
    stage takes max(compute + incoming transfers, all-reduce / m) per micro-batch, t is that of the slowest
    stage, and the workers process w b / t samples per second. m = batch_size / (w b) must be whole, and at
    least d, so that two versions of the weights are enough. Recomputation multiplies compute by 4/3.

    Args:
        profile: Profile of the model.
        stages: The depth; None: the optimum.
        workers: The most workers to use.
        batch_size: Samples of a batch; None: one micro-batch of the largest measured size for each worker.
        micro_batch_sizes: Sizes to try; None: those of the profile.
        recompute: Whether to recompute; None: both are tried.
        link: Link between two workers.
        memory_limit_bytes: Memory of a worker, for two versions of the weights, gradients and optimizer
            state, and for d - k micro-batches in flight on stage k all kept values, or with recomputation
            their inputs, and the rest once. The published 2 |W| / d leaves out gradients and optimizer state,
            which would not fit.
    """
    net = network(profile, stages, workers, None, link)[0]
    limit = limit_of(memory_limit_bytes)
    if recompute not in (None, True, False):
        raise ValueError(f"recompute={recompute!r}: must be True, False, or None for the faster one")
    batch = batch_size if batch_size is not None else net.units * profile.micro_batch_sizes[-1]
    check_count("batch_size", batch)
    sizes = list(profile.micro_batch_sizes if micro_batch_sizes is None else micro_batch_sizes)
    for size in sizes:
        check_count("micro_batch_sizes", size)
    chains = {size: Chain(profile, size, net.link) for size in sizes}
    shapes = _shapes(batch, sizes, net.units, stages or 1, recompute)
    every = [_Shaped(chains[shape.samples], shape, net, stages) for shape in shapes]
    rate, best, blocks = _fastest(every, limit)
    shape = best.shape
    return Partition.of_chain(
        chains[shape.samples],
        [block.first for block in blocks],
        method="2bw",
        replication=[shape.width] * len(blocks),
        stage_s=[best.stage_s[block.first, block.last] / shape.width for block in blocks],
        objective=f"samples per second with {shape.micro_batches} micro-batches of each pipeline"
        + (", recomputing" if shape.recompute else ""),
        value=rate,
        workers=net.units,
        memory_bytes=[best.bytes(1, block.behind)[block.first, block.last] for block in blocks],
        recompute=shape.recompute,
        system="pipedream-2bw",
        micro_batches=shape.micro_batches * shape.width,
    )


def _shapes(
    batch: int, sizes: Sequence[int], workers: int, depth: int, recompute: bool | None
) -> list[Shape]:
    """Return the shapes with a whole number of micro-batches in a batch, at least ``depth`` per pipeline."""
    again = (False, True) if recompute is None else (recompute,)
    found = [
        Shape(width, size, batch // (width * size), r)
        for r in again
        for size in sizes
        for width in range(1, workers // depth + 1)
        if batch % (width * size) == 0 and batch // (width * size) >= depth
    ]
    if not found:
        raise ValueError(
            f"batch_size={batch}: makes no whole number of at least {depth} micro-batches of {list(sizes)} samples: "
            "give a multiple, or other micro_batch_sizes"
        )
    return found


class _Shaped:
    """The stages of a shape: their time and memory, by first layer and the one after the last."""

    def __init__(self, chain: Chain, shape: Shape, net: Level, stages: int | None) -> None:
        self.shape, self._chain, self._stages = shape, chain, stages
        self._most = stages or min(net.units // shape.width, shape.micro_batches, chain.layers)

        def stage_s(first: Any, last: Any) -> Any:
            """Return the seconds of a micro-batch, with incoming activations and gradients."""
            compute_s = chain.compute_s(first, last) * (_RECOMPUTE if shape.recompute else 1)
            reduce_s = ring_s(chain.parameter_bytes(first, last), shape.width, net.bytes_per_s)
            transfer_s = chain.transfer_s[first] + chain.transfer_s[last]
            return np.maximum(compute_s + transfer_s, reduce_s / shape.micro_batches)

        self.stage_s = table_of(chain.layers, stage_s)

    def bytes(self, own: int, behind: int) -> Array:
        """Return the bytes of a worker with ``behind`` stages after its own."""
        bytes_of = partial(
            self._chain.stage_bytes, in_flight=behind + 1, versions=2, recompute=self.shape.recompute
        )
        return table_of(self._chain.layers, bytes_of)

    def where_fits(self, limit: float) -> Callable[[int, int], Array]:
        """Return the seconds of a micro-batch, math.inf beyond the memory limit."""
        if limit == math.inf:
            return lambda own, behind: self.stage_s
        return lambda own, behind: np.where(self.bytes(own, behind) <= limit, self.stage_s, math.inf)

    def divided(self, stage: Callable[[int, int], Array]) -> tuple[float, list[Block]]:
        """Return the stages with the least bottleneck, by the costs ``stage``."""
        return Divisions(self._chain.layers, stage, replicas=1).best(self._most, self._stages)
