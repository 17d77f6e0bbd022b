"""PipeDream's partitioner: the fewest seconds of the slowest stage, with replicated stages (Narayanan et al. 2019).

The bottleneck of layers i to j on m workers is T = max(sum of T_l, W(m)) / m, with W(m) = 4 (m - 1) |w| / (m B) for
the synchronisation of their weights; a cut behind layer i costs 2 C_i. The paper's table A(j, m) takes
O(layers^2 workers^2). Here a bound on the bottleneck is halved until it is exact, and for each bound the rests of the
chain need a fewest number of workers, which takes O(layers^2 log workers).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from avgpipe.planning.chain import Chain
from avgpipe.planning.cuts import (
    EXACT,
    NOT_THIS,
    TOO_LONG,
    Block,
    check_stages,
    fewest,
    smallest,
    tightest,
)
from avgpipe.planning.memory import check_limit, does_not_fit
from avgpipe.planning.network import Levels, check_enough, network, pipedream_sync_s
from avgpipe.planning.options import micro_batch_size_of, transfer_notes
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe.planning.result import Partition
from avgpipe.planning.units import Group, Piece, Unit, Worker, replicated, whole, worker_bytes


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
    if stages is not None:
        check_stages(len(profile.layers), stages)
    nets = network(profile, stages, workers, levels, link)
    total = math.prod(level.units for level in nets)
    chain = Chain(profile, micro_batch_size_of(profile, micro_batch_size), nets[-1].link)
    if stages is not None and len(nets) > 1:
        raise ValueError(
            f"stages={stages} with {len(nets)} levels: they follow from the levels, leave stages out"
        )
    check_enough(stages, total)
    check_limit(memory_limit_bytes)
    search = _Search(chain, nets, memory_limit_bytes, stages)
    plan = search.plan_within(math.inf)
    if plan is None:
        assert memory_limit_bytes is not None
        least = _least_limit(chain, nets, stages)
        raise does_not_fit(memory_limit_bytes, least, "use more workers or smaller micro-batches")
    value, blocks = tightest(search.plan_within, search.low_s, plan)
    pieces = search.pieces(blocks)
    return Partition(
        method="pipedream",
        layers=chain.layers,
        boundaries=[piece.first for piece in pieces[1:]],
        replication=[piece.workers for piece in pieces],
        stage_s=[piece.seconds for piece in pieces],
        objective="slowest stage, link or synchronisation, per micro-batch",
        value=value,
        micro_batch_size=chain.micro_batch_size,
        workers=total,
        memory_bytes=_sizes(chain, pieces),
        notes=transfer_notes(nets[-1].bytes_per_s),
    )


class _Search:
    """Over the highest level, whose units are what the levels below make of them."""

    def __init__(self, chain: Chain, nets: Levels, limit: float | None, stages: int | None) -> None:
        self._chain, self._level, self._limit, self._stages = chain, nets[-1], limit, stages
        self._most_behind: dict[tuple[int, int], float] = {}
        self._sizes: dict[tuple[int, int], float] = {}
        unit: Unit = Worker(chain, limit)
        for level in nets[:-1]:
            unit = Group(chain, unit, level, limit)
        self._unit = unit

    @property
    def low_s(self) -> float:
        """All workers busy all the time."""
        return self._chain.compute_s(0, self._chain.layers) / (self._unit.workers * self._level.units)

    def plan_within(self, bound_s: float) -> tuple[float, list[Block]] | None:
        """A plan with no stage, synchronisation or transfer above the bound, and its longest."""

        alone: dict[tuple[int, int], int] = {}

        def need(first: int, last: int, behind: int) -> int:
            if (first, last) not in alone:
                alone[first, last] = self._alone(first, last, bound_s)
            return self._fewest(first, last, behind, alone[first, last], bound_s)

        blocks = fewest(self._chain.layers, need, self._level.units, self._stages)
        return None if blocks is None else (self._longest_s(blocks), blocks)

    def _alone(self, first: int, last: int, bound_s: float) -> int:
        """How many units these layers need to be done within the bound, if no layers came after them."""
        if self._cut_s(first) > bound_s:
            return NOT_THIS
        compute_s = self._chain.compute_s(first, last)
        # Not one more than is enough: a quotient may be a rounding error above a whole number.
        low = max(1, math.ceil(compute_s / (self._unit.workers * bound_s) - 1e-9)) if bound_s > 0 else 1
        if low > self._level.units:
            return TOO_LONG
        return self._fewest_from(first, last, 0, low, bound_s)

    def _fewest(self, first: int, last: int, behind: int, alone: int, bound_s: float) -> int:
        """The same with so many units behind them, which only memory minds."""
        if alone in (NOT_THIS, TOO_LONG) or self._limit is None:
            return alone
        if (first, last) not in self._most_behind:
            self._most_behind[first, last] = self._unit.most_behind(first, last)
        most = self._most_behind[first, last]
        if most <= 0 < behind:
            return NOT_THIS
        low = max(alone, whole(behind / most)) if behind else alone
        return self._fewest_from(first, last, behind, low, bound_s)

    def _fewest_from(self, first: int, last: int, behind: int, low: int, bound_s: float) -> int:
        """The fewest units, at least ``low``, that are enough."""
        most = self._level.units - behind

        def enough(units: int) -> bool:
            return self._fits(first, last, units, behind, bound_s)

        # One unit has nothing to synchronise; from two on, more take less.
        if low == 1 and enough(1):
            return 1
        return smallest(max(low, self._synchronised(first, last, bound_s)), most, enough) or NOT_THIS

    def _synchronised(self, first: int, last: int, bound_s: float) -> int:
        """Fewer units, but one alone, take too long to synchronise: solves 4 (m - 1) |w| / (m^2 B) = bound."""
        size = self._size(first, last)
        share = bound_s * self._level.bytes_per_s / size if size else 1.0
        if share >= 1:
            return 2
        root = (2 + 2 * math.sqrt(1 - share)) / share if share > 0 else math.inf
        return max(2, math.floor(min(root, self._level.units + 1) - 1e-6))

    def _size(self, first: int, last: int) -> float:
        if (first, last) not in self._sizes:
            self._sizes[first, last] = self._chain.parameter_bytes(first, last)
        return self._sizes[first, last]

    def _fits(self, first: int, last: int, units: int, behind: int, bound_s: float) -> bool:
        seconds = self._stage_s(first, last, units, behind)
        return seconds <= bound_s and seconds < math.inf

    def _stage_s(self, first: int, last: int, units: int, behind: int) -> float:
        """T(i, j, m)."""
        unit_s = self._unit.seconds(first, last, self._behind(units, behind))
        if units == 1:
            return unit_s
        sync_s = pipedream_sync_s(self._size(first, last), units, self._level.bytes_per_s)
        return max(unit_s, sync_s) / units

    def _behind(self, units: int, behind: int) -> float:
        return self._unit.rounded(behind * self._unit.workers / units)

    def _cut_s(self, first: int) -> float:
        return 2 * self._chain.incoming_s(first)

    def _longest_s(self, blocks: list[Block]) -> float:
        return max(
            max(self._stage_s(*block, after), self._cut_s(block.first))
            for block, after in zip(blocks, _behind(blocks))
        )

    def pieces(self, blocks: list[Block]) -> list[Piece]:
        """The stages, with their workers, over all levels."""
        found = []
        for block, after in zip(blocks, _behind(blocks)):
            share = self._behind(block.workers, after)
            inside = self._unit.pieces(block.first, block.last, share)
            found += [replicated(self._chain, piece, block.workers, self._level) for piece in inside]
        return found


def _behind(blocks: Sequence[Block] | Sequence[Piece]) -> list[int]:
    """Workers, or units, behind each."""
    return [sum(block.workers for block in blocks[k + 1 :]) for k in range(len(blocks))]


def _sizes(chain: Chain, pieces: Sequence[Piece]) -> list[float]:
    return [
        worker_bytes(chain, piece.first, piece.last, after / piece.workers)
        for piece, after in zip(pieces, _behind(pieces))
    ]


def _least_limit(chain: Chain, nets: Levels, stages: int | None) -> float:
    """The least memory limit with which there is a plan; to a per cent where there are several levels."""
    total = math.prod(level.units for level in nets)
    enough = worker_bytes(chain, 0, chain.layers, total)

    def within(limit: float) -> tuple[float, list[Block]] | None:
        search = _Search(chain, nets, limit, stages)
        plan = search.plan_within(math.inf)
        if plan is None:
            return None
        return limit if len(nets) > 1 else max(_sizes(chain, search.pieces(plan[1]))), plan[1]

    start: tuple[float, list[Block]] = (enough, [])
    return tightest(within, 0.0, start, 1e-2 if len(nets) > 1 else EXACT)[0]
