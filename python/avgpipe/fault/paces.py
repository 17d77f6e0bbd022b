"""Shares of batches by pace: of unequal isolated pipelines, faster ones get more micro-batches of each batch.

All processes decide the same from what every pipeline publishes with a step, without other messages::

    step t, a multiple of EVERY     each process notes its seconds for a micro-batch where its pipeline's others read it
    step t + 4                      each pipeline publishes those of its slowest process
    step t + 6 and later            have shares by these, if that is better by _GAIN, now and EVERY steps before

At most two steps are in flight, so in each process the step before these three lines has ended everywhere. A
pipeline that joined after the last decision knows none, and all know that: shares are equal until the next one.
A step's shares are kept with it, so steps that are lost are trained on again whatever was decided since.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from avgpipe.fault.exchange import TurnExchange
from avgpipe.model.batch import sizes_of
from avgpipe.runtime.pace import KINDS
from avgpipe.runtime.scheduler import Scheduler

EVERY = 16  # steps
PUBLISHED_AT = 4  # steps after a multiple of EVERY
_IN_FLIGHT = 2  # steps
_GAIN = 0.9  # of the time of a step: a smaller one is not worth other shares


def shares_by(paces: Sequence[float], micro_batches: int) -> list[int]:
    """Return how many micro-batches each pipeline gets, so that the last one ends as early as possible.

    Each has at least one, if there are as many. ``paces``: seconds for a micro-batch.
    """
    counts = sizes_of(min(micro_batches, len(paces)), len(paces))
    ends = [(2 * pace, n) for n, pace in enumerate(paces)]  # of each, with one more
    heapq.heapify(ends)
    for _ in range(micro_batches - sum(counts)):
        _, n = ends[0]
        counts[n] += 1
        heapq.heapreplace(ends, ((counts[n] + 1) * paces[n], n))
    return counts


class SharesByPace:
    """The shares that all processes of all pipelines decide on.

    Args:
        board: where the processes of the pipeline read each other's paces.
        micro_batches: of a whole batch.
    """

    def __init__(self, scheduler: Scheduler, board: TurnExchange, micro_batches: int) -> None:
        self._scheduler, self._board, self._micro_batches = scheduler, board, micro_batches
        self._paces: dict[int, float] = {}  # by term, those decided on
        self._next: tuple[int, dict[int, float]] | None = None  # the first step with these
        self._better: frozenset[int] = frozenset()  # terms for which other shares were better the last time
        self._trained: dict[int, int] = {}  # micro-batches of each step
        self._since = time.perf_counter()

    def counts(self, turn: int, terms: Sequence[int], micro_batches: int) -> list[int]:
        """Return the micro-batches of each member of a step, which begins; ``terms``: the members' terms."""
        if self._next is not None and turn >= self._next[0]:
            (_, self._paces), self._next = self._next, None
        return self._shares(terms, micro_batches)

    def _shares(self, terms: Sequence[int], micro_batches: int) -> list[int]:
        if not all(number in self._paces for number in terms):
            return sizes_of(micro_batches, len(terms))
        return shares_by([self._paces[number] for number in terms], micro_batches)

    def published(self, turn: int) -> dict[str, float]:
        """Return what this pipeline publishes of its pace with a step, which begins."""
        if turn % EVERY != PUBLISHED_AT:
            return {}
        noted = self._board.noted()
        slowest = max(noted) if all(noted) else 0.0
        return {"pace": slowest} if slowest and math.isfinite(slowest) else {}

    def end(self, turn: int, micro_batches: int, published: Mapping[int, float | None]) -> None:
        """Note a step that has ended.

        Args:
            micro_batches: of this pipeline.
            published: by the term of each pipeline that counts, its pace, if it has published one.
        """
        self._trained[turn] = micro_batches
        if turn % EVERY == 0:
            self._board.note(self._measured())
            self._trained, self._since = {}, time.perf_counter()
        elif turn % EVERY == PUBLISHED_AT:
            self._decide(turn, {number: pace for number, pace in published.items() if pace}, len(published))

    def _measured(self) -> float:
        """Return the seconds in which this process computes a micro-batch, the median of steps; infinity after none.

        Without the waits between its forwards and backwards. The steps that were in flight at the last time are
        left out.
        """
        seconds: dict[int, float] = defaultdict(float)
        for _, _, turn, _, kind, start, end, _ in self._scheduler.rows_since(self._since):
            if kind in KINDS:
                seconds[turn] += end - start
        steps = [
            turn for turn in sorted(self._trained)[_IN_FLIGHT:] if self._trained[turn] and turn in seconds
        ]
        return median(seconds[turn] / self._trained[turn] for turn in steps) if steps else math.inf

    def _decide(self, turn: int, paces: dict[int, float], count: int) -> None:
        terms = list(paces)
        before, self._better = self._better, frozenset()
        if len(terms) < count:
            return
        needs = [
            max(pace * share for pace, share in zip(paces.values(), shares))
            for shares in (
                self._shares(terms, self._micro_batches),
                shares_by([*paces.values()], self._micro_batches),
            )
        ]
        if needs[1] <= _GAIN * needs[0]:
            if before == frozenset(terms):
                self._next = turn + _IN_FLIGHT, paces
            else:
                self._better = frozenset(terms)
