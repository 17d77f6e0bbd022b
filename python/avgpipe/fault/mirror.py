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

from avgpipe.fault.roster import Term
from avgpipe.fault.trunk import Trunk
from avgpipe_ext.ring import Bell, Memory

SLOTS, HEAD_BYTES = 2, 24  # of what a stage replica tells in; a slot's head has three numbers
PUBLISHED = "published"  # the message
_UNKNOWN = 2**62  # a turn


def published_by(place: int) -> str:
    """Name the memory in which a stage replica of a pipeline tells."""
    return f"published by {place}"


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
class PublishedMemory:
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

    def turns_published(self) -> int:
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
        self._published: dict[int, PublishedMemory] = {}  # by the number of a stay
        # Who sends may wait for the other host, and must not keep waiting who takes in what comes from there.
        self._lock, self._shipping = threading.Lock(), threading.Lock()
        self._memory = Memory.create(Bell.BYTES)
        self._bell = Bell(self._memory, 0)
        self._is_closed = False
        self.place = [self._memory.path, self._memory.bytes, 0]
        self.bells: Sequence[Bell] = ()

    def of(self, number: int, places: int, counts: Memory | None = None) -> PublishedMemory:
        """Return what a pipeline tells; its memory is ``counts``, or made here, when it is first heard of."""
        with self._lock:
            if number not in self._published:
                if not 0 < places < 2**16:
                    raise ValueError(f"{places} stage replicas")
                counts = counts or Memory.create(places * Bell.BYTES)
                self._published[number] = PublishedMemory(counts, places, sent=[0] * places)
            published = self._published[number]
        if published.places != places:
            raise ValueError(f"{places} stage replicas, and {published.places} before")
        return published

    def learn(self, terms: Iterable[Term], about: Iterable[int]) -> None:
        """Take in which pipelines there are, and from which turns on; forget all but those in ``about``."""
        with self._lock:
            for term in terms:
                if term.number in self._published:
                    self._published[term.number].first = term.first
            known = set(about)
            self._published = {
                n: published
                for n, published in self._published.items()
                if n in known or published.first == _UNKNOWN
            }

    # ---- near to far -------------------------------------------------------------------------------------------------

    def ship(self) -> None:
        """Send what was told here and is not there yet. OSError where the other host is gone."""
        with self._shipping:
            with self._lock:  # all first turns of one roster: another one may be taken in meanwhile
                known = [
                    (number, published, published.first) for number, published in self._published.items()
                ]
            # Turns before one in which a pipeline there has a part are told there to nobody.
            theirs = min((first for number, _, first in known if not self._is_near(number)), default=_UNKNOWN)
            for number, published, first in known:
                if self._is_near(number) and first != _UNKNOWN:
                    for place in list(published.memory):
                        self._ship(number, published, place, first, theirs)

    def _ship(self, number: int, published: PublishedMemory, place: int, first: int, theirs: int) -> None:
        count = published.count(place).count()
        for n in range(max(published.sent[place], theirs - first), count):
            slot_number = (first + n) % SLOTS
            slot = published.slot(place, slot_number)
            text_end, begin, end = read_head(slot)
            ranges = [(a, b) for a, b in ((0, text_end), (begin, end)) if b > a]
            where = [number, published.places, place, n + 1, published.memory[place].bytes, slot_number]
            self._trunk.send(PUBLISHED, *where, ranges, parts=[slot[a:b] for a, b in ranges])
            published.sent[place] = n + 1
        if count > published.sent[place]:
            where = [number, published.places, place, count, published.memory[place].bytes, 0]
            self._trunk.send(PUBLISHED, *where, [])
            published.sent[place] = count

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
        published = self.of(number, places)
        rings = published.count(place)
        memory = self.memory(published, place, size)
        if ranges and (memory.bytes != size or not 0 <= slot_number < SLOTS):
            raise ValueError(f"{size} bytes, slot {slot_number}")
        for begin, end in ranges:
            slot = published.slot(place, slot_number)
            if not 0 <= begin < end <= len(slot):
                raise ValueError(f"bytes {begin} to {end} of a slot")
            self._trunk.receive_into(slot[begin:end])
        if not 0 <= count - rings.count() < 2**31:
            raise ValueError(f"{count} turns are told, and were {rings.count()}")
        while rings.count() < count:
            rings.ring()
        for bell in self.bells:
            bell.ring()

    def memory(self, published: PublishedMemory, place: int, size: int) -> Memory:
        """Return where a stage replica tells, which is made here when it is first heard of."""
        with self._lock:
            if place not in published.memory:
                published.memory[place] = Memory.create(size)
            return published.memory[place]
