"""Copies what isolated pipelines publish between the memory of two hosts.

Processes of one host publish in shared memory (:mod:`avgpipe.fault.exchange`): they write a slot, then raise
a count. Each of two hosts has memory of the same layout. Of pipelines that are *near*, the mirror sends what
their processes have published; of the others it receives that, the slot first, then the count::

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

SLOTS, HEAD_BYTES = 2, 24  # of a stage replica; a slot's head has three numbers
PUBLISHED = "published"  # the message
_UNKNOWN = 2**62  # a step
_LOOK_S = 1.0  # between checks whether the mirror is closed


def published_by(place: int) -> str:
    """Name the memory in which a stage replica of a pipeline publishes."""
    return f"published by {place}"


def read_head(slot: memoryview) -> list[int]:
    """Return where a slot's text ends, and where its tensors published this time begin and end."""
    return [int.from_bytes(slot[n : n + 8], "little") for n in range(0, HEAD_BYTES, 8)]


def write_head(slot: memoryview, text_end: int, begin: int, end: int) -> None:
    for n, number in enumerate((text_end, begin, end)):
        slot[8 * n : 8 * n + 8] = number.to_bytes(8, "little")


def bells_at(places: Iterable[list[Any]]) -> list[Bell]:
    """Return the bells, each at a path, bytes, and an offset, of processes that have not ended."""
    bells = []
    for path, size, offset in places:
        with suppress(OSError):
            bells.append(Bell(Memory.open(path, size), offset))
    return bells


@dataclass
class PublishedMemory:
    """What the processes of one pipeline have published, on this host.

    Attributes:
        counts: for each stage replica, the number of steps published since its pipeline joined.
        memory: by stage replica, both slots.
        first: the pipeline's first step.
        sent: for each stage replica, the number of steps sent on.
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
        """Return how many steps all its stage replicas have published."""
        return min(self.count(place).count() for place in range(self.places))

    def slot(self, place: int, number: int) -> memoryview:
        memory = self.memory[place]
        size = memory.bytes // SLOTS
        return memoryview(memory)[number * size : (number + 1) * size]


class Mirror:
    """One host's end.

    Args:
        is_near: whether the pipeline of a term, by its number, has its processes on this side of the trunk.

    Attributes:
        place: where processes here ring for those of the other host: path, bytes, and an offset.
        bells: bells of processes here, rung when something has arrived.
    """

    def __init__(self, trunk: Trunk, is_near: Callable[[int], bool]) -> None:
        self._trunk, self._is_near = trunk, is_near
        self._published: dict[int, PublishedMemory] = {}  # by the number of a term
        # Two locks: a thread that waits for the other host must not block the one that receives.
        self._lock, self._shipping = threading.Lock(), threading.Lock()
        self._memory = Memory.create(Bell.BYTES)
        self._bell = Bell(self._memory, 0)
        self._is_closed = False
        self.place = [self._memory.path, self._memory.bytes, 0]
        self.bells: Sequence[Bell] = ()

    def of(self, number: int, places: int, counts: Memory | None = None) -> PublishedMemory:
        """Return what a pipeline publishes; its first call takes ``counts``, or makes that memory."""
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
        """Note the first steps of the pipelines; forget all pipelines but those in ``about``."""
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
        """Send what was published here and not sent yet. OSError where the other host has ended."""
        with self._shipping:
            with self._lock:  # all first steps of one roster, which may change meanwhile
                known = [
                    (number, published, published.first) for number, published in self._published.items()
                ]
            # No process there reads steps before the first one of a pipeline there.
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
        """Ship whenever a process here has rung, until the mirror is closed; for a thread."""
        seen = 0
        while not self._is_closed:
            now = self._bell.wait(seen, _LOOK_S)
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
        """Receive what was published there. ValueError for an invalid message."""
        if self._is_near(number):
            raise ValueError(f"the pipeline of term {number} is on this side")
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
            raise ValueError(f"{count} steps are published, and {rings.count()} were before")
        while rings.count() < count:
            rings.ring()
        for bell in self.bells:
            bell.ring()

    def memory(self, published: PublishedMemory, place: int, size: int) -> Memory:
        """Return the memory in which a stage replica publishes; it is made here at the first call for it."""
        with self._lock:
            if place not in published.memory:
                published.memory[place] = Memory.create(size)
            return published.memory[place]
