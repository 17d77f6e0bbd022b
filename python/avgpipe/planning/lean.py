"""Replicated stages under 1F1B with a flush: those that need least memory, and the quickest ones within a limit."""

from __future__ import annotations

import math
from typing import NamedTuple

from avgpipe.planning.chain import Chain
from avgpipe.planning.cuts import NOT_THIS, TOO_LONG, Block, fewest, smallest, tightest
from avgpipe.planning.memory import stage_bytes

_CLOSE, _ROUGHLY = 1e-6, 1e-2


class Held(NamedTuple):
    """The memory of a worker of a stage with batches of ``micro_batches`` and a flush."""

    chain: Chain
    micro_batches: int

    def bytes(self, first: int, last: int, workers: int, behind: int) -> float:
        """In flight on each of m workers with n behind are 1 + ceil(n / m), and never more than it has of a batch."""
        own = math.ceil(self.micro_batches / workers)
        in_flight = min(own, 1 + math.ceil(behind / workers))
        return stage_bytes(self.chain, first, last, in_flight=in_flight)


def frugal(
    held: Held, workers: int, stages: int | None, limit: float, stage_s: float = math.inf
) -> list[Block] | None:
    """The fewest workers with which every stage fits into the limit and computes a micro-batch in ``stage_s``."""

    def need(first: int, last: int, behind: int) -> int:
        compute_s = held.chain.compute_s(first, last)
        low = max(1, math.ceil(compute_s / stage_s))
        if low > workers:
            return TOO_LONG

        def fits(own: int) -> bool:
            return held.bytes(first, last, own, behind) <= limit

        return smallest(low, workers - behind, fits) or NOT_THIS

    return fewest(held.chain.layers, need, workers, stages)


def steady(held: Held, workers: int, stages: int | None, limit: float) -> list[Block] | None:
    """Stages of which the slowest is about as quick as can be within the limit; None if nothing fits."""

    def within(stage_s: float) -> tuple[float, list[Block]] | None:
        blocks = frugal(held, workers, stages, limit, stage_s)
        return None if blocks is None else (_slowest_s(held, blocks), blocks)

    start = within(math.inf)
    if start is None:
        return None
    return tightest(within, held.chain.compute_s(0, held.chain.layers) / workers, start, _ROUGHLY)[1]


def _slowest_s(held: Held, blocks: list[Block]) -> float:
    return max(held.chain.compute_s(block.first, block.last) / block.workers for block in blocks)


def least_limit(held: Held, workers: int, stages: int | None) -> float:
    """The least limit for which there is a plan; to a millionth."""

    def within(limit: float) -> tuple[float, list[Block]] | None:
        blocks = frugal(held, workers, stages, limit)
        return None if blocks is None else (most_bytes(held, blocks), blocks)

    start = within(math.inf)
    assert start is not None
    return tightest(within, 0.0, start, _CLOSE)[0]


def most_bytes(held: Held, blocks: list[Block]) -> float:
    behind, most = 0, 0.0
    for block in reversed(blocks):
        most = max(most, held.bytes(*block, behind))
        behind += block.workers
    return most
