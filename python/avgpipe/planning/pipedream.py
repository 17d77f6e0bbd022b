"""PipeDream's partitioner: the fewest seconds of the slowest stage, with replicated stages (Narayanan et al. 2019).

The bottleneck of layers i to j on m workers is T = max(sum of T_l, W(m)) / m, with W(m) = 4 (m - 1) |w| / (m B) for
the synchronisation of their weights; a cut behind layer i costs 2 C_i. The paper's table A(j, m) takes
O(layers^2 workers^2). Here a bound on the bottleneck is halved until it is exact, and for each bound the rests of the
chain need a fewest number of workers, which takes O(layers^2 log workers).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from avgpipe.planning.chain import Chain, stage_bytes
from avgpipe.planning.cluster import Level, pipedream_sync_s

if TYPE_CHECKING:
    from numpy.typing import NDArray
from collections.abc import Sequence

from avgpipe.planning.chain import check_limit, does_not_fit
from avgpipe.planning.cluster import Levels, check_enough, network
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
from avgpipe.planning.partition import Partition, micro_batch_size_of, transfer_notes
from avgpipe.planning.profile import LinkProfile, Profile

# ---- what one unit of a level makes of layers ----------------------------------------------------------------------


class Piece(NamedTuple):
    """Layers ``first`` to ``last`` - 1 on workers of a unit, by their numbers in it; seconds per micro-batch."""

    first: int
    last: int
    placed: tuple[int, ...]
    seconds: float

    @property
    def workers(self) -> int:
        return len(self.placed)


class Unit(Protocol):
    """``behind``: workers that the micro-batches have still before them, over those that share them with this unit."""

    workers: int

    def seconds(self, first: int, last: int, behind: float) -> float:
        """The bottleneck of these layers on one unit; math.inf where they do not fit."""

    def pieces(self, first: int, last: int, behind: float) -> list[Piece]:
        """How the unit divides them."""

    def table(self, behind: float) -> NDArray[Any]:
        """``seconds`` by first and last."""

    def rounded(self, behind: float) -> float:
        """The value, not below, at which the unit is looked at."""

    def most_behind(self, first: int, last: int) -> float:
        """More than this need not be tried; math.inf where that is not known."""


class Worker:
    """The lowest unit: one device."""

    workers = 1

    def __init__(self, chain: Chain, limit: float | None) -> None:
        self._chain, self._limit = chain, limit
        self._known: dict[tuple[int, int], tuple[float, float, float]] = {}
        self._tables: list[NDArray[Any]] | None = None

    def seconds(self, first: int, last: int, behind: float) -> float:
        compute_s, alone, more = self._of(first, last)
        if self._limit is not None and alone + whole(behind) * more > self._limit:
            return math.inf
        return compute_s

    def _of(self, first: int, last: int) -> tuple[float, float, float]:
        """Seconds; bytes with one micro-batch in flight; bytes of each more."""
        known = self._known.get((first, last))
        if known is None:
            alone = worker_bytes(self._chain, first, last, 0)
            more = worker_bytes(self._chain, first, last, 1) - alone
            known = self._known[first, last] = self._chain.compute_s(first, last), alone, more
        return known

    def _part(self, n: int, first: int, last: int) -> float:
        return self._of(first, last)[n]

    def pieces(self, first: int, last: int, behind: float) -> list[Piece]:
        return [Piece(first, last, (0,), self._chain.compute_s(first, last))]

    def table(self, behind: float) -> NDArray[Any]:
        import numpy as np

        if self._tables is None:
            layers = self._chain.layers
            self._tables = [
                table_of(layers, functools.partial(self._part, n), outside)
                for n, outside in enumerate((math.inf, math.inf, 0.0))
            ]
        compute_s, alone, more = self._tables
        if self._limit is None:
            return compute_s
        return np.where(alone + behind * more <= self._limit, compute_s, np.inf)

    def rounded(self, behind: float) -> float:
        return 0.0 if self._limit is None else float(whole(behind))

    def most_behind(self, first: int, last: int) -> float:
        """The most ``behind`` with which these layers fit, if they do at all; possibly one more, by rounding."""
        if self._limit is None:
            return math.inf
        _, alone, more = self._of(first, last)
        return math.floor((self._limit - alone) / more + 1e-6) if more else math.inf


class Group:
    """The units of one level together, as a unit of the next."""

    def __init__(self, chain: Chain, inner: Unit, level: Level, limit: float | None) -> None:
        self.workers = inner.workers * level.units
        self._chain, self._inner, self._level, self._limit = chain, inner, level, limit
        self._tables: dict[float, list[NDArray[Any]]] = {}
        self._best: dict[float, NDArray[Any]] = {}
        self._inner_tables: dict[float, NDArray[Any]] = {}
        self._sizes: NDArray[Any] | None = None

    def seconds(self, first: int, last: int, behind: float) -> float:
        return float(self.table(behind)[first, last])

    def rounded(self, behind: float) -> float:
        """Up to a power of 2, so that few tables are needed."""
        if self._limit is None or behind == 0:
            return 0.0
        return float(2.0 ** math.ceil(math.log2(behind)))

    def most_behind(self, first: int, last: int) -> float:
        return math.inf

    def table(self, behind: float) -> NDArray[Any]:
        if behind not in self._best:
            import numpy as np

            self._best[behind] = np.min(self._of_counts(behind)[1:], axis=0)
        return self._best[behind]

    def _of_counts(self, behind: float) -> list[NDArray[Any]]:
        """The bottlenecks on exactly 1, 2, ... units inside, by their number."""
        if behind in self._tables:
            return self._tables[behind]
        import numpy as np

        layers = self._chain.layers
        found = [np.full((layers + 1, layers + 1), np.inf) for _ in range(self._level.units + 1)]
        for many in range(1, self._level.units + 1):
            np.minimum(found[many], self._stage(many, 0, behind), out=found[many])
            for own in range(1, many):
                rest = many - own
                self._join(self._stage(own, rest, behind), found[rest], found[many])
        self._tables[behind] = found
        return found

    def _stage(self, own: int, rest: int, behind: float) -> NDArray[Any]:
        """T(i, j, own) with ``rest`` units of this group behind it."""
        import numpy as np

        share = self._inner_behind(own, rest, behind)
        if share not in self._inner_tables:
            self._inner_tables[share] = self._inner.table(share)
        found: NDArray[Any] = np.maximum(self._inner_tables[share], self._sync_s(own)) / own
        return found

    def _inner_behind(self, own: int, rest: int, behind: float) -> float:
        return self._inner.rounded((behind + rest * self._inner.workers) / own)

    def _sync_s(self, own: int) -> NDArray[Any]:
        if self._sizes is None:
            self._sizes = table_of(self._chain.layers, self._chain.parameter_bytes, 0.0)
        return self._sizes * pipedream_sync_s(1.0, own, self._level.bytes_per_s)

    def _cut_s(self, place: int) -> float:
        return 2 * self._level.link.seconds(self._chain.boundary_bytes[place - 1])

    def _join(self, stage: NDArray[Any], rest: NDArray[Any], found: NDArray[Any]) -> None:
        """Lower ``found`` to the best of a stage up to some cut and a rest from there on."""
        import numpy as np

        for cut in range(1, self._chain.layers):
            before = np.maximum(stage[:cut, cut], self._cut_s(cut))
            joined = np.maximum(before[:, None], rest[cut, cut + 1 :][None, :])
            np.minimum(found[:cut, cut + 1 :], joined, out=found[:cut, cut + 1 :])

    def pieces(self, first: int, last: int, behind: float) -> list[Piece]:
        tables = self._of_counts(behind)
        units = min(range(1, len(tables)), key=lambda m: tables[m][first, last])
        found: list[Piece] = []
        taken = 0
        while first < last:
            own, cut = self._first_stage(first, last, units, behind)
            share = self._inner_behind(own, units - own, behind)
            inside = self._inner.pieces(first, cut, share)
            on = range(taken, taken + own)
            found += [
                replicated(self._chain, piece, on, self._inner.workers, self._level) for piece in inside
            ]
            first, units, taken = cut, units - own, taken + own
        return found

    def _first_stage(self, first: int, last: int, units: int, behind: float) -> tuple[int, int]:
        """How many units the first stage has, and where it ends, in the best division of these layers."""
        tables = self._of_counts(behind)
        aim = tables[units][first, last]
        if self._stage(units, 0, behind)[first, last] <= aim:
            return units, last
        for own in range(1, units):
            stage = self._stage(own, units - own, behind)
            for cut in range(first + 1, last):
                if max(stage[first, cut], self._cut_s(cut), tables[units - own][cut, last]) <= aim:
                    return own, cut
        raise AssertionError(f"layers {first} to {last - 1}: no division is as good as {aim}")


def replicated(chain: Chain, piece: Piece, units: range, unit_workers: int, level: Level) -> Piece:
    """A piece of one unit on each of several, which synchronise its weights over the level."""
    size = chain.parameter_bytes(piece.first, piece.last)
    sync_s = pipedream_sync_s(size, len(units), level.bytes_per_s)
    placed = tuple(unit * unit_workers + w for unit in units for w in piece.placed)
    return Piece(piece.first, piece.last, placed, max(piece.seconds, sync_s) / len(units))


def table_of(layers: int, cost: Callable[[int, int], float], outside: float) -> NDArray[Any]:
    """By first layer and the one after the last; ``outside`` where there is no layer between."""
    import numpy as np

    found = np.full((layers + 1, layers + 1), outside)
    for i in range(layers):
        for j in range(i + 1, layers + 1):
            found[i, j] = cost(i, j)
    return found


def whole(behind: float) -> int:
    """Rounded up; a quotient may be a rounding error above the whole number that it is."""
    return math.ceil(behind - 1e-9)


def worker_bytes(chain: Chain, first: int, last: int, behind: float) -> float:
    """PipeDream's memory: for each micro-batch in flight a version of the weights beside what it holds."""
    in_flight = 1 + whole(behind)
    return stage_bytes(chain, first, last, in_flight=in_flight, versions=in_flight)


# ---- the highest level ---------------------------------------------------------------------------------------------


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
    search = _PipeDreamSearch(chain, nets, memory_limit_bytes, stages)
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
        placement=_numbered(pieces) if len(nets) > 1 else None,
        system="pipedream",
        notes=transfer_notes(nets[-1].bytes_per_s),
    )


class _PipeDreamSearch:
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
        """Fewest units with so many behind them, which only matters for memory."""
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
        found: list[Piece] = []
        taken = 0
        for block, after in zip(blocks, _behind(blocks)):
            share = self._behind(block.workers, after)
            inside = self._unit.pieces(block.first, block.last, share)
            on = range(taken, taken + block.workers)
            found += [replicated(self._chain, piece, on, self._unit.workers, self._level) for piece in inside]
            taken += block.workers
        return found


def _numbered(pieces: Sequence[Piece]) -> list[list[int]]:
    """Per stage its workers, when those that nobody uses are left out."""
    numbers = {w: n for n, w in enumerate(sorted(w for piece in pieces for w in piece.placed))}
    return [[numbers[w] for w in piece.placed] for piece in pieces]


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
        search = _PipeDreamSearch(chain, nets, limit, stages)
        plan = search.plan_within(math.inf)
        if plan is None:
            return None
        return limit if len(nets) > 1 else max(_sizes(chain, search.pieces(plan[1]))), plan[1]

    start: tuple[float, list[Block]] = (enough, [])
    return tightest(within, 0.0, start, 1e-2 if len(nets) > 1 else EXACT)[0]
