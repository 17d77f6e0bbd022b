"""PipeDream on a hierarchical network: what one unit of a level, a machine for example, makes of layers.

A unit on level k holds the units of level k - 1; it is to level k + 1 what a worker is to level 1. So with A(i, j) the
bottleneck of layers i to j - 1 on a whole unit inside, T(i, j, m) = max(A(i, j), W(m)) / m on m of them (Narayanan et
al. 2019, section 3.1).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from avgpipe.planning.chain import Chain
from avgpipe.planning.memory import stage_bytes
from avgpipe.planning.network import Level, pipedream_sync_s

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Piece(NamedTuple):
    """Layers ``first`` to ``last`` - 1 on so many workers; seconds per micro-batch."""

    first: int
    last: int
    workers: int
    seconds: float


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
        return [Piece(first, last, 1, self._chain.compute_s(first, last))]

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
        while first < last:
            own, cut = self._first_stage(first, last, units, behind)
            share = self._inner_behind(own, units - own, behind)
            inside = self._inner.pieces(first, cut, share)
            found += [replicated(self._chain, piece, own, self._level) for piece in inside]
            first, units = cut, units - own
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


def replicated(chain: Chain, piece: Piece, units: int, level: Level) -> Piece:
    """A piece of one unit on each of several, which synchronise its weights over the level."""
    sync_s = pipedream_sync_s(chain.parameter_bytes(piece.first, piece.last), units, level.bytes_per_s)
    return Piece(piece.first, piece.last, piece.workers * units, max(piece.seconds, sync_s) / units)


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
