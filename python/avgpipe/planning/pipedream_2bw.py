"""PipeDream-2BW's planner: width, depth, micro-batch size and recomputation (Narayanan et al. 2021, section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from avgpipe.errors import check_count
from avgpipe.planning.chain import Chain, does_not_fit, limit_of
from avgpipe.planning.cluster import Level, network, ring_s
from avgpipe.planning.costs import Array
from avgpipe.planning.cuts import EXACT, Block, Divisions, table_of
from avgpipe.planning.partition import Partition
from avgpipe.planning.profile import LinkProfile, Profile

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
    net = network(profile, stages, workers, None, link)[0]
    limit = limit_of(memory_limit_bytes)
    if recompute not in (None, True, False):
        raise ValueError(f"recompute={recompute!r}: must be True, False, or None for what is faster")
    batch = batch_size if batch_size is not None else net.units * profile.micro_batch_sizes[-1]
    check_count("batch_size", batch)
    sizes = list(profile.micro_batch_sizes if micro_batch_sizes is None else micro_batch_sizes)
    for size in sizes:
        check_count("micro_batch_sizes", size)
    chains = {size: Chain(profile, size, net.link) for size in sizes}
    shapes = _shapes(batch, sizes, net.units, stages or 1, recompute)
    every = [_Shaped(chains[shape.samples], shape, net, stages) for shape in shapes]
    rate, best, blocks = 0.0, every[0], list[Block]()
    for shaped in every:
        slowest_s, found = shaped.divided(shaped.where_fits(limit))
        samples_per_s = shaped.shape.width * shaped.shape.samples / slowest_s if slowest_s else math.inf
        if samples_per_s > rate * (1 + EXACT):
            rate, best, blocks = samples_per_s, shaped, found
    if not blocks:
        least = min(shaped.divided(shaped.bytes)[0] for shaped in every)
        raise does_not_fit(limit, least, "use more workers or smaller micro-batches")
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


class _Shaped:
    """The stages of a shape: what they take and hold, by first layer and the one after the last."""

    def __init__(self, chain: Chain, shape: Shape, net: Level, stages: int | None) -> None:
        self.shape, self._chain, self._stages = shape, chain, stages
        self._most = stages or min(net.units // shape.width, shape.micro_batches, chain.layers)

        def stage_s(first: Any, last: Any) -> Any:
            """Seconds of a micro-batch; incoming are the activation and, from the stage after, the gradient."""
            compute_s = chain.compute_s(first, last) * (_RECOMPUTE if shape.recompute else 1)
            reduce_s = ring_s(chain.parameter_bytes(first, last), shape.width, net.bytes_per_s)
            transfer_s = chain.transfer_s[first] + chain.transfer_s[last]
            return np.maximum(compute_s + transfer_s, reduce_s / shape.micro_batches)

        self.stage_s = table_of(chain.layers, stage_s)

    def bytes(self, own: int, behind: int) -> Array:
        """Bytes of a worker with ``behind`` stages after its own."""
        bytes_of = partial(
            self._chain.stage_bytes, in_flight=behind + 1, versions=2, recompute=self.shape.recompute
        )
        return table_of(self._chain.layers, bytes_of)

    def where_fits(self, limit: float) -> Callable[[int, int], Array]:
        """Seconds of a micro-batch, math.inf beyond the memory limit."""
        if limit == math.inf:
            return lambda own, behind: self.stage_s
        return lambda own, behind: np.where(self.bytes(own, behind) <= limit, self.stage_s, math.inf)

    def divided(self, stage: Callable[[int, int], Array]) -> tuple[float, list[Block]]:
        """The stages whose bottleneck, of what ``stage`` says, is least."""
        return Divisions(self._chain.layers, stage, replicas=1).best(self._most, self._stages)
