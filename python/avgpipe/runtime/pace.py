"""How fast this worker runs micro-batches; and, on the first rank, the warning that names a slow worker.

A worker is compared with its own past, as the largest stage is no straggler; with workers that have the same
work, as a worker may be slow from the beginning; and with all other workers, as what slows all of them, such
as longer sentences, is no fault of one.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from statistics import median
from typing import NamedTuple

from avgpipe.ranks.world import World
from avgpipe.runtime.placement import Placement
from avgpipe.runtime.scheduler import Scheduler
from avgpipe.schedule.row import ACTIONS, EventKind
from avgpipe.units import format_seconds

_log = logging.getLogger("avgpipe")

# Slowdowns against itself and the others: above the first a worker is slow, below the second well again.
SLOW, WELL = 1.5, 1.2
IN_A_ROW = 5  # readings that must agree, and the first ones that later ones are compared with
_WINDOW_S = 5.0  # of one reading, or longer, until there are enough actions of each kind
_ENOUGH = 5
KINDS = frozenset(kind.value for kind in (*ACTIONS, EventKind.GRAPH)) - {EventKind.UPDATE.value}


class Pace:
    """Reads the scheduler's record as batches end, in its thread; a watchdog thread publishes a reading."""

    def __init__(self, scheduler: Scheduler, world: World, placement: Placement) -> None:
        self._scheduler = scheduler
        self.reading = ""  # the newest reading, as text
        self._number, self._begin, self._end = 0, time.perf_counter(), 0.0
        ranks = range(world.size)
        stages = [{placement.stage_of(replica) for replica in placement.held_by(rank)} for rank in ranks]
        alike = [[r for r in ranks if r != rank and stages[r] == stages[rank]] for rank in ranks]
        self._stragglers = Stragglers([world.name(rank) for rank in ranks], alike)

    def note(self) -> None:
        """Record that a batch has ended."""
        now = time.perf_counter()
        if now < self._end:
            return
        if self._end:  # the first batch, which sets much up, does not count
            seconds = self._micro_batch_s()
            if seconds is None:
                return
            self._number += 1
            self.reading = f"{self._number} {seconds:.9f}"
        self._begin, self._end = now, now + _WINDOW_S

    def _micro_batch_s(self) -> float | None:
        """Return the seconds of a forward and backward in all stages here; None after too few of them."""
        taken: dict[tuple[int, str], list[float]] = defaultdict(list)
        for replica, _, _, _, kind, start, end, _ in self._scheduler.rows_since(self._begin):
            if kind in KINDS:
                taken[replica, kind].append(end - start)
        if not taken or min(map(len, taken.values())) < _ENOUGH:
            return None
        return sum(map(median, taken.values()))

    def compare(self, readings: Sequence[str | None]) -> None:
        """Warn of workers that have become slow, from the readings that all have published."""
        for text in self._stragglers.look([_reading(text) for text in readings]):
            _log.warning("%s", text)


def _reading(text: str | None) -> Reading | None:
    number, _, seconds = (text or "").partition(" ")
    return Reading(int(number), float(seconds)) if seconds else None


class Reading(NamedTuple):
    """Recent seconds of a forward and backward on a worker. ``number``: rises with each reading."""

    number: int
    seconds: float


class Stragglers:
    """Follows the readings of all workers.

    Args:
        names: of the workers, for messages.
        alike: for each, the other workers with the same work.
    """

    def __init__(self, names: Sequence[str], alike: Sequence[Collection[int]]) -> None:
        self._names, self._alike = names, alike
        self._read = [-1] * len(names)  # the number of the newest reading
        self._first: list[list[float]] = [[] for _ in names]
        self._last: list[list[float]] = [[] for _ in names]  # equally many, the newest at the end
        self._named = [False] * len(names)

    def look(self, readings: Sequence[Reading | None]) -> list[str]:
        """Add the newest readings; return a sentence for each worker that is slow now, or well again."""
        new = [n for n, r in enumerate(readings) if r is not None and r.number != self._read[n]]
        for n in new:
            self._take(n, readings[n])
        expected = [self._expected(n) for n in range(len(self._names))]
        return [text for n in new if (text := self._judge(n, expected))]

    def _take(self, n: int, reading: Reading | None) -> None:
        assert reading is not None
        self._read[n] = reading.number
        if len(self._first[n]) < IN_A_ROW:
            self._first[n].append(reading.seconds)
        self._last[n] = [*self._last[n], reading.seconds][-IN_A_ROW:]

    def _expected(self, n: int) -> float | None:
        """Return the first seconds of a worker's micro-batch, or its peers' if less; None at first."""
        at_first = [
            median(of) if len(of := self._first[m]) == IN_A_ROW else None for m in (n, *self._alike[n])
        ]
        own, *others = at_first
        known = [seconds for seconds in others if seconds is not None]
        return own if own is None or not known else min(own, median(known))

    def _judge(self, n: int, expected: Sequence[float | None]) -> str | None:
        others = [median(self._last[m]) / e for m, e in enumerate(expected) if m != n and e]
        own = expected[n]
        if not own or not others:
            return None
        usual = max(1.0, median(others))
        factors = [seconds / own for seconds in self._last[n]]
        if not self._named[n] and min(factors) > SLOW * usual:
            self._named[n] = True
            return self._says(
                n, own, f", the others {median(others):.1f} times: its device or host is slow, or shared"
            )
        if self._named[n] and max(factors) < WELL * usual:
            self._named[n] = False
            return self._says(n, own, " again")
        return None

    def _says(self, n: int, expected: float, more: str) -> str:
        now, first = median(self._last[n]), median(self._first[n])
        than = "it did at first" if expected == first else "others do with the same work"
        return (
            f"{self._names[n]} takes {now / expected:.1f} times as long for a micro-batch as {than} "
            f"({format_seconds(now)}, not {format_seconds(expected)}){more}"
        )
