"""What isolated pipelines tell each other, in the memory of two hosts: what is told on one comes to be on the other.

Processes of one host tell in shared memory (:mod:`avgpipe.fault.exchange`): a slot is written, then a count rises. On
each of two hosts lies memory of the same kind. Of pipelines that are *near*, what their processes have told is sent on;
of the others it comes from there, the slot first, then the count::

    process            slot, count, bell ->|            |             |-> slot, count, bells -> processes
    mirror, near                           | slot, count over a trunk |                    mirror, far
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from avgpipe.fault.roster import Stay
from avgpipe.fault.trunk import Trunk
from avgpipe_ext.ring import Bell, Memory

SLOTS, HEAD_BYTES = 2, 24  # of what a stage replica tells in; a slot's head has three numbers
TOLD = "told"  # the message
_UNKNOWN = 2**62  # a turn


def told_by(place: int) -> str:
    """Name the memory in which a stage replica of a pipeline tells."""
    return f"told by {place}"


def read_head(slot: memoryview) -> list[int]:
    """Return where a slot's text ends, and where of its tensors those begin and end that were told this time."""
    return [int.from_bytes(slot[n : n + 8], "little") for n in range(0, HEAD_BYTES, 8)]


def write_head(slot: memoryview, text_end: int, begin: int, end: int) -> None:
    for n, number in enumerate((text_end, begin, end)):
        slot[8 * n : 8 * n + 8] = number.to_bytes(8, "little")


def bells_at(places: Iterable[list[Any]]) -> list[Bell]:
    """Return the bells of processes, each at a path, bytes, and an offset; one that has ended needs none."""
    bells = []
    for path, size, offset in places:
        with suppress(OSError):
            bells.append(Bell(Memory.open(path, size), offset))
    return bells


@dataclass
class ToldMemory:
    """What the processes of one pipeline tell, here.

    Attributes:
        counts: of each stage replica, how many turns it has told since its pipeline came.
        memory: by stage replica, both slots.
        first: the pipeline's first turn.
        sent: of each stage replica, how many turns were sent on.
    """

    counts: Memory
    places: int
    memory: dict[int, Memory] = field(default_factory=dict)
    first: int = _UNKNOWN
    sent: list[int] = field(default_factory=list)

    def count(self, place: int) -> Bell:
        if not 0 <= place < self.places:
            raise ValueError(f"no stage replica {place}")
        return Bell(self.counts, place * Bell.BYTES)

    def turns_told(self) -> int:
        """Return how many turns all of it have told."""
        return min(self.count(place).count() for place in range(self.places))

    def slot(self, place: int, number: int) -> memoryview:
        memory = self.memory[place]
        size = memory.bytes // SLOTS
        return memoryview(memory)[number * size : (number + 1) * size]


class Mirror:
    """One host's end.

    Args:
        is_near: whether the pipeline of a stay, by its number, has its processes on this side of the trunk.

    Attributes:
        place: where processes here ring for those of the other host: path, bytes, and an offset.
        bells: of processes here, that are rung when something has come.
    """

    def __init__(self, trunk: Trunk, is_near: Callable[[int], bool]) -> None:
        self._trunk, self._is_near = trunk, is_near
        self._told: dict[int, ToldMemory] = {}  # by the number of a stay
        # Who sends may wait for the other host, and must not keep waiting who takes in what comes from there.
        self._lock, self._shipping = threading.Lock(), threading.Lock()
        self._memory = Memory.create(Bell.BYTES)
        self._bell = Bell(self._memory, 0)
        self._is_closed = False
        self.place = [self._memory.path, self._memory.bytes, 0]
        self.bells: Sequence[Bell] = ()

    def of(self, number: int, places: int, counts: Memory | None = None) -> ToldMemory:
        """Return what a pipeline tells; its memory is ``counts``, or made here, when it is first heard of."""
        with self._lock:
            if number not in self._told:
                if not 0 < places < 2**16:
                    raise ValueError(f"{places} stage replicas")
                counts = counts or Memory.create(places * Bell.BYTES)
                self._told[number] = ToldMemory(counts, places, sent=[0] * places)
            told = self._told[number]
        if told.places != places:
            raise ValueError(f"{places} stage replicas, and {told.places} before")
        return told

    def learn(self, stays: Iterable[Stay], about: Iterable[int]) -> None:
        """Take in which pipelines there are, and from which turns on; forget all but those in ``about``."""
        with self._lock:
            for stay in stays:
                if stay.number in self._told:
                    self._told[stay.number].first = stay.first
            known = set(about)
            self._told = {n: told for n, told in self._told.items() if n in known or told.first == _UNKNOWN}

    # ---- near to far -------------------------------------------------------------------------------------------------

    def ship(self) -> None:
        """Send what was told here and is not there yet. OSError where the other host is gone."""
        with self._shipping:
            with self._lock:  # all first turns of one roster: another one may be taken in meanwhile
                known = [(number, told, told.first) for number, told in self._told.items()]
            # Turns before one in which a pipeline there has a part are told there to nobody.
            theirs = min((first for number, _, first in known if not self._is_near(number)), default=_UNKNOWN)
            for number, told, first in known:
                if self._is_near(number) and first != _UNKNOWN:
                    for place in list(told.memory):
                        self._ship(number, told, place, first, theirs)

    def _ship(self, number: int, told: ToldMemory, place: int, first: int, theirs: int) -> None:
        count = told.count(place).count()
        for n in range(max(told.sent[place], theirs - first), count):
            slot_number = (first + n) % SLOTS
            slot = told.slot(place, slot_number)
            text_end, begin, end = read_head(slot)
            ranges = [(a, b) for a, b in ((0, text_end), (begin, end)) if b > a]
            where = [number, told.places, place, n + 1, told.memory[place].bytes, slot_number]
            self._trunk.send(TOLD, *where, ranges, parts=[slot[a:b] for a, b in ranges])
            told.sent[place] = n + 1
        if count > told.sent[place]:
            where = [number, told.places, place, count, told.memory[place].bytes, 0]
            self._trunk.send(TOLD, *where, [])
            told.sent[place] = count

    def run(self) -> None:
        """Ship whenever a process here has rung, until the end; for a thread."""
        seen = 0
        while not self._is_closed:
            now = self._bell.wait(seen, 1.0)
            if now != seen:
                seen = now
                self.ship()

    def close(self) -> None:
        self._is_closed = True
        self._bell.ring()

    # ---- far to near -------------------------------------------------------------------------------------------------

    def take(
        self,
        number: int,
        places: int,
        place: int,
        count: int,
        size: int,
        slot_number: int,
        ranges: list[list[int]],
    ) -> None:
        """Take in what was told there. ValueError for what makes no sense."""
        if self._is_near(number):
            raise ValueError(f"the pipeline of stay {number} is on this side")
        told = self.of(number, places)
        rings = told.count(place)
        memory = self.memory(told, place, size)
        if ranges and (memory.bytes != size or not 0 <= slot_number < SLOTS):
            raise ValueError(f"{size} bytes, slot {slot_number}")
        for begin, end in ranges:
            slot = told.slot(place, slot_number)
            if not 0 <= begin < end <= len(slot):
                raise ValueError(f"bytes {begin} to {end} of a slot")
            self._trunk.receive_into(slot[begin:end])
        if not 0 <= count - rings.count() < 2**31:
            raise ValueError(f"{count} turns are told, and were {rings.count()}")
        while rings.count() < count:
            rings.ring()
        for bell in self.bells:
            bell.ring()

    def memory(self, told: ToldMemory, place: int, size: int) -> Memory:
        """Return where a stage replica tells, which is made here when it is first heard of."""
        with self._lock:
            if place not in told.memory:
                told.memory[place] = Memory.create(size)
            return told.memory[place]
