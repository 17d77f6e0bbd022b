"""How quick this worker is at its micro-batches; and, on the first rank, the warning that names a slow one.

A worker is compared with itself, for the largest stage is no straggler; with those that have the same work, for a
worker may be slow from the beginning; and with all others, for what makes everybody slower, as longer sentences do, is
nobody's fault.
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
from avgpipe.schedule.event import ACTIONS, EventKind
from avgpipe.units import format_seconds

_log = logging.getLogger("avgpipe")

SLOW, WELL = (
    1.5,
    1.2,
)  # times as long as expected, and as the others: above the first it is named, below the second well
IN_A_ROW = 5  # readings that must agree, and the first ones by which later ones are measured
_WINDOW_S = 5.0  # of which a reading is made, or longer: until there are enough actions of each kind
_ENOUGH = 5
_KINDS = frozenset(kind.value for kind in ACTIONS) - {EventKind.UPDATE.value}


class Pace:
    """Reads the scheduler's record at batches' ends, in its thread; a watchdog's thread tells what is read.

    Attributes:
        told: the newest reading, as text; "" before there is one.
    """

    def __init__(self, scheduler: Scheduler, world: World, placement: Placement) -> None:
        self._scheduler = scheduler
        self.told = ""
        self._number, self._begin, self._end = 0, time.perf_counter(), 0.0
        ranks = range(world.size)
        stages = [{placement.stage_of(replica) for replica in placement.held_by(rank)} for rank in ranks]
        alike = [[r for r in ranks if r != rank and stages[r] == stages[rank]] for rank in ranks]
        self._stragglers = Stragglers([world.name(rank) for rank in ranks], alike)

    def note(self) -> None:
        """A batch has ended."""
        now = time.perf_counter()
        if now < self._end:
            return
        if self._end:  # the first batch, in which much is new, does not count
            seconds = self._micro_batch_s()
            if seconds is None:
                return
            self._number += 1
            self.told = f"{self._number} {seconds:.9f}"
        self._begin, self._end = now, now + _WINDOW_S

    def _micro_batch_s(self) -> float | None:
        """Return what a micro-batch takes all stages here, forward and backward; None where there were too few."""
        taken: dict[tuple[int, str], list[float]] = defaultdict(list)
        for replica, _, _, _, kind, start, end, _ in self._scheduler.rows_since(self._begin):
            if kind in _KINDS:
                taken[replica, kind].append(end - start)
        if not taken or min(map(len, taken.values())) < _ENOUGH:
            return None
        return sum(map(median, taken.values()))

    def compare(self, told: Sequence[str | None]) -> None:
        """Warn of workers that have become slow, by what all have told."""
        for text in self._stragglers.look([_reading(text) for text in told]):
            _log.warning("%s", text)


def _reading(text: str | None) -> Reading | None:
    number, _, seconds = (text or "").partition(" ")
    return Reading(int(number), float(seconds)) if seconds else None


class Reading(NamedTuple):
    """What a micro-batch's forward and backward have taken a worker lately. ``number``: rises with each new one."""

    number: int
    seconds: float


class Stragglers:
    """Follows the readings of all workers.

    Args:
        names: of the workers, in words.
        alike: for each, the others that have the same work.
    """

    def __init__(self, names: Sequence[str], alike: Sequence[Collection[int]]) -> None:
        self._names, self._alike = names, alike
        self._read = [-1] * len(names)  # the number of the newest reading
        self._first: list[list[float]] = [[] for _ in names]
        self._last: list[list[float]] = [[] for _ in names]  # as many, the newest at the end
        self._named = [False] * len(names)

    def look(self, readings: Sequence[Reading | None]) -> list[str]:
        """Take in the newest readings; return a sentence for each worker that is slow now, or well again."""
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
        """Return what a micro-batch took worker ``n`` at first, or most of its like if that is less; None at first."""
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
