"""How quick this worker is at its micro-batches; and, on the first rank, the warning that names a slow one."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from avgpipe.ranks.world import World
from avgpipe.runtime.placement import Placement
from avgpipe.runtime.scheduler import Scheduler
from avgpipe.schedule.event import ACTIONS, EventKind
from avgpipe.timeline.pace import Reading, Stragglers

_log = logging.getLogger("avgpipe")

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
