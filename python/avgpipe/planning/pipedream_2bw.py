"""PipeDream-2BW's planner: width, depth, micro-batch size and recomputation (Narayanan et al. 2021, section 4)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from avgpipe.planning.chain import Chain, check_limit, does_not_fit, stage_bytes
from avgpipe.planning.cluster import check_enough, network, ring_s
from avgpipe.planning.cuts import EXACT, NOT_THIS, TOO_LONG, Block, check_stages, fewest, tightest
from avgpipe.planning.partition import Partition, transfer_notes
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe.planning.simulation import check_count

_RECOMPUTE = 4 / 3  # forward, forward again and a backward of twice a forward, over forward and backward


class Shape(NamedTuple):
    """``width`` pipelines, and of each the samples of a micro-batch, and how many of these make its part of a batch."""

    width: int
    samples: int
    micro_batches: int
    recompute: bool


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
    """Method "2bw" of :func:`avgpipe.partition`: the fastest that fits, exactly.

    For every width w, depth d with w d <= workers, micro-batch size b, with and without recomputation: a stage takes
    max(compute + incoming transfers, all-reduce / m) per micro-batch, the slowest stage t, and the workers w b / t
    samples per second. m = batch_size / (w b) must be whole, and at least d, for two versions of the weights to be
    enough. Recomputation makes compute 4/3 of itself. stages: fixes the depth. batch_size: None: one micro-batch of
    the largest measured size for each worker. micro_batch_sizes: None: those of the profile. recompute: None: both.

    memory_limit_bytes: of a worker, for two versions of the weights, gradients and optimizer state, and of d - k
    micro-batches in flight on stage k all that is kept, or with recomputation the inputs, and the rest once. The
    published 2 |W| / d leaves gradients and optimizer state out, which would not fit.
    """
    if stages is not None:
        check_stages(len(profile.layers), stages)
    nets = network(profile, stages, workers, None, link)
    total = nets[0].units
    check_enough(stages, total)
    check_limit(memory_limit_bytes)
    if recompute not in (None, True, False):
        raise ValueError(f"recompute={recompute!r}: must be True, False, or None for what is faster")
    batch = batch_size if batch_size is not None else total * profile.micro_batch_sizes[-1]
    check_count("batch_size", batch)
    sizes = list(profile.micro_batch_sizes if micro_batch_sizes is None else micro_batch_sizes)
    for size in sizes:
        check_count("micro_batch_sizes", size)
    search = _Search(profile, nets[0].link, total, stages, memory_limit_bytes)
    shapes = _shapes(batch, sizes, total, stages or 1, recompute)
    found = search.best(shapes)
    if found is None:
        assert memory_limit_bytes is not None
        raise does_not_fit(
            memory_limit_bytes, search.least_limit(shapes), "use more workers or smaller micro-batches"
        )
    rate, shape, blocks = found
    chain = search.chain(shape.samples)
    return Partition(
        method="2bw",
        layers=chain.layers,
        boundaries=[block.first for block in blocks[1:]],
        replication=[shape.width] * len(blocks),
        stage_s=[search.stage_s(shape, block.first, block.last) / shape.width for block in blocks],
        objective=f"samples per second with {shape.micro_batches} micro-batches of each pipeline"
        + (", recomputing" if shape.recompute else ""),
        value=rate,
        micro_batch_size=shape.samples,
        workers=total,
        memory_bytes=search.sizes(shape, blocks),
        recompute=shape.recompute,
        system="pipedream-2bw",
        micro_batches=shape.micro_batches * shape.width,
        notes=transfer_notes(nets[0].bytes_per_s),
    )


def _shapes(
    batch: int, sizes: Sequence[int], workers: int, depth: int, recompute: bool | None
) -> list[Shape]:
    """Shapes whose micro-batches make the batch, at least ``depth`` of them, with as many workers for each pipeline."""
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


class _Search:
    def __init__(
        self, profile: Profile, link: LinkProfile, workers: int, stages: int | None, limit: float | None
    ) -> None:
        self._profile, self._link, self._workers, self._stages = profile, link, workers, stages
        self._limit = limit
        self._chains: dict[int, Chain] = {}

    def chain(self, samples: int) -> Chain:
        if samples not in self._chains:
            self._chains[samples] = Chain(self._profile, samples, self._link)
        return self._chains[samples]

    def best(self, shapes: Sequence[Shape]) -> tuple[float, Shape, list[Block]] | None:
        """Samples per second, and what has so many; None where nothing fits."""
        best: tuple[float, Shape, list[Block]] | None = None
        for shape in sorted(shapes, key=self._at_best, reverse=True):
            slowest_s = math.inf
            if best is not None:
                if self._at_best(shape) <= best[0]:
                    break
                slowest_s = shape.width * shape.samples / best[0] * (1 - EXACT)
            plan = self._within(shape, slowest_s, self._limit)
            if plan is not None:
                low_s = shape.width * shape.samples / self._at_best(shape)
                within = functools.partial(self._within, shape, limit=self._limit)
                value_s, blocks = tightest(within, low_s, plan)
                best = _rate(shape, value_s), shape, blocks
        return best

    def _depth(self, shape: Shape) -> int:
        """The most stages."""
        return self._stages or min(
            self._workers // shape.width, shape.micro_batches, len(self._profile.layers)
        )

    def _at_best(self, shape: Shape) -> float:
        """Samples per second if all stages took the same time and nothing else did."""
        chain = self.chain(shape.samples)
        whole_s = self._compute_s(shape, 0, chain.layers) / self._depth(shape)
        longest_s = max(self._compute_s(shape, n, n + 1) for n in range(chain.layers))
        return _rate(shape, max(whole_s, longest_s))

    def _compute_s(self, shape: Shape, first: int, last: int) -> float:
        return self.chain(shape.samples).compute_s(first, last) * (_RECOMPUTE if shape.recompute else 1)

    def stage_s(self, shape: Shape, first: int, last: int) -> float:
        """Seconds of a micro-batch; incoming are the activation and, from the stage after, the gradient."""
        chain = self.chain(shape.samples)
        busy_s = self._compute_s(shape, first, last) + chain.incoming_s(first) + chain.outgoing_s(last)
        size = chain.parameter_bytes(first, last)
        return max(busy_s, ring_s(size, shape.width, self._link.bytes_per_s) / shape.micro_batches)

    def _bytes(self, shape: Shape, first: int, last: int, behind: int) -> float:
        return stage_bytes(
            self.chain(shape.samples),
            first,
            last,
            in_flight=behind + 1,
            versions=2,
            recompute=shape.recompute,
        )

    def sizes(self, shape: Shape, blocks: Sequence[Block]) -> list[float]:
        return [
            self._bytes(shape, block.first, block.last, len(blocks) - 1 - k) for k, block in enumerate(blocks)
        ]

    def _within(
        self, shape: Shape, slowest_s: float, limit: float | None = None
    ) -> tuple[float, list[Block]] | None:
        """Stages of which none takes longer, and the longest."""

        def need(first: int, last: int, behind: int) -> int:
            if self._compute_s(shape, first, last) > slowest_s:
                return TOO_LONG
            fits = limit is None or self._bytes(shape, first, last, behind) <= limit
            return 1 if fits and self.stage_s(shape, first, last) <= slowest_s else NOT_THIS

        blocks = fewest(len(self._profile.layers), need, self._depth(shape), self._stages)
        if blocks is None:
            return None
        return max(self.stage_s(shape, block.first, block.last) for block in blocks), blocks

    def least_limit(self, shapes: Sequence[Shape]) -> float:
        """The least memory limit that something fits into; the deepest of each micro-batch size need least."""
        deepest: dict[tuple[int, bool], Shape] = {}
        for shape in shapes:
            known = deepest.setdefault((shape.samples, shape.recompute), shape)
            if self._depth(shape) > self._depth(known):
                deepest[shape.samples, shape.recompute] = shape
        return min(map(self._least_limit, deepest.values()))

    def _least_limit(self, shape: Shape) -> float:
        def within(limit: float) -> tuple[float, list[Block]] | None:
            plan = self._within(shape, math.inf, limit)
            return None if plan is None else (max(self.sizes(shape, plan[1])), plan[1])

        start = within(math.inf)
        assert start is not None
        return tightest(within, 0.0, start)[0]


def _rate(shape: Shape, slowest_s: float) -> float:
    return shape.width * shape.samples / slowest_s if slowest_s else math.inf
