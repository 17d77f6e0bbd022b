"""What is told in the memory of one host comes to be in that of another: over a trunk, in one process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError

import pytest

from avgpipe.fault.mirror import HEAD_BYTES, SLOTS, Mirror, published_by, write_head
from avgpipe.fault.roster import Term
from avgpipe.fault.trunk import Trunk, parse_address
from avgpipe_ext.ring import Bell, Memory

TOKEN = b"a secret of some length"
SLOT_BYTES = 256


@contextmanager
def trunks(theirs: bytes = TOKEN) -> Iterator[list[Trunk]]:
    """Both ends of a trunk; what the first one raises where it is refused."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends: list[Trunk] = []

        def answer() -> None:
            end, _ = server.accept()
            try:
                ends.append(Trunk.answer(end, TOKEN))
            except (OSError, EOFError, AuthenticationError):
                end.close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            ends.append(Trunk.connect(server.getsockname(), theirs))
        finally:
            thread.join()
        yield ends
        for end in ends:
            end.cut()


def write(memory: Memory, turn: int, text: bytes, tensors: tuple[int, bytes] = (0, b"")) -> None:
    """Tell a turn: a text, and bytes of tensors from an offset on."""
    slot = memoryview(memory)[turn % SLOTS * SLOT_BYTES :][:SLOT_BYTES]
    slot[HEAD_BYTES : HEAD_BYTES + len(text)] = text
    begin, data = tensors
    slot[begin : begin + len(data)] = data
    write_head(slot, HEAD_BYTES + len(text), begin, begin + len(data))


class Sides:
    """Term 0 has its processes on the first side, term 1 on the second; each has one stage replica."""

    def __init__(self, near: Trunk, far: Trunk, firsts: tuple[int, int]) -> None:
        self.trunks = near, far
        self.mirrors = [Mirror(near, lambda n: n == 0), Mirror(far, lambda n: n == 1)]
        self.bells = [Bell.local(), Bell.local()]
        terms = [Term(number, number, first) for number, first in enumerate(firsts)]
        for mirror, bell in zip(self.mirrors, self.bells):
            mirror.bells = [bell]
            for number in (0, 1):
                mirror.memory(mirror.of(number, 1), 0, SLOTS * SLOT_BYTES)
            mirror.learn(terms, (0, 1))

    def tell(self, side: int, turn: int, text: bytes, tensors: tuple[int, bytes] = (0, b"")) -> None:
        published = self.mirrors[side].of(side, 1)
        write(published.memory[0], turn, text, tensors)
        published.count(0).ring()

    def ship(self, side: int, messages: int) -> list[list[object]]:
        self.mirrors[side].ship()
        taken = []
        for _ in range(messages):
            _, *values = self.trunks[1 - side].receive()
            taken.append(list(values))
            self.mirrors[1 - side].take(*values)
        return taken

    def slot(self, side: int, number: int, turn: int) -> bytes:
        return bytes(self.mirrors[side].of(number, 1).slot(0, turn % SLOTS))


def test_what_is_told_is_there_before_its_count_and_the_bells() -> None:
    with trunks() as ends:
        sides = Sides(*ends, firsts=(4, 4))
        sides.tell(0, 4, b"turn four", (64, b"x" * 100))
        sides.tell(0, 5, b"5")
        (first, second) = sides.ship(0, 2)
        assert [first[3], second[3]] == [1, 2]
        assert second[-1] == [[0, HEAD_BYTES + 1]]  # no tensors were told
        for turn in (4, 5):
            assert sides.slot(1, 0, turn) == sides.slot(0, 0, turn)
        assert sides.mirrors[1].of(0, 1).count(0).count() == 2
        assert sides.bells[1].count() == 2
        sides.tell(1, 4, b"from there")
        sides.ship(1, 1)
        assert sides.slot(0, 1, 4) == sides.slot(1, 1, 4)
        assert sides.ship(0, 0) == []


def test_turns_before_another_host_has_a_part_are_counted_and_not_sent() -> None:
    with trunks() as ends:
        sides = Sides(*ends, firsts=(0, 7))
        for turn in range(6):
            sides.tell(0, turn, b"early")
        ((*_, ranges),) = sides.ship(0, 1)
        assert ranges == []
        assert sides.mirrors[1].of(0, 1).count(0).count() == 6
        for turn in (6, 7):
            sides.tell(0, turn, b"later")
        assert [message[-1] for message in sides.ship(0, 1)] == [[[0, HEAD_BYTES + 5]]]
        assert sides.mirrors[1].of(0, 1).count(0).count() == 8
        assert sides.slot(1, 0, 7) == sides.slot(0, 0, 7)


def test_a_roster_that_comes_while_something_is_sent_counts_whole_from_the_next_time_on() -> None:
    with trunks() as ends:
        sides = Sides(*ends, firsts=(0, 2))
        asked = []

        def is_near(number: int) -> bool:
            asked.append(number)
            if asked == [0, 1, 0]:  # it has found that no other host has a part in any turn
                mirror.learn([Term(0, 0, 0), Term(1, 1, 2)], (0, 1))
                published.count(0).ring()
                write(published.memory[0], 2, b"turn two")
                published.count(0).ring()
            return number == 0

        sides.mirrors[0] = mirror = Mirror(ends[0], is_near)
        for number in (0, 1):
            mirror.memory(mirror.of(number, 1), 0, SLOTS * SLOT_BYTES)
        published = mirror.of(0, 1)
        published.count(0).ring()
        sides.ship(0, 0)
        assert asked == [0, 1, 0, 1]
        ((*_, ranges),) = sides.ship(0, 1)
        assert ranges
        assert sides.slot(1, 0, 2) == sides.slot(0, 0, 2)


def test_nothing_is_sent_of_a_pipeline_that_nobody_has_named() -> None:
    with trunks() as ends:
        mirror = Mirror(ends[0], lambda n: n == 0)
        published = mirror.of(0, 1)
        mirror.memory(published, 0, SLOTS * SLOT_BYTES)
        published.count(0).ring()
        mirror.ship()
        mirror.learn([Term(1, 1, 0)], (1,))
        assert mirror.of(0, 1) is published  # it has not entered, and is not forgotten
        mirror.learn([Term(0, 0, 0)], (0,))
        mirror.learn([], ())
        assert mirror.of(0, 1) is not published


@pytest.mark.parametrize(
    "message",
    [
        [1, 1, 0, 1, 512, 0, []],  # of its own side
        [0, 0, 0, 1, 512, 0, []],
        [0, 1, 1, 1, 512, 0, []],
        [0, 1, 0, 1, 512, 2, [[0, 8]]],
        [0, 1, 0, 1, 512, 0, [[0, 300]]],
        [0, 1, 0, 1, 512, 0, [[8, 8]]],
        [0, 1, 0, 1, 600, 0, [[0, 8]]],
        [0, 1, 0, -1, 512, 0, []],
    ],
)
def test_what_makes_no_sense_is_refused(message: list[object]) -> None:
    with trunks() as ends:
        sides = Sides(*ends, firsts=(0, 0))
        with pytest.raises(ValueError, match=r"term|stage replica|slot|steps"):
            sides.mirrors[1].take(*message)


def test_who_does_not_know_the_token_gets_no_trunk() -> None:
    with pytest.raises((AuthenticationError, EOFError, OSError)), trunks(b"another secret"):
        pass


@pytest.mark.parametrize("text", ["7000", "host", "host:", ":7000", "host:70000", "host:port"])
def test_addresses_have_a_host_and_a_port(text: str) -> None:
    with pytest.raises(ValueError, match="write HOST:PORT"):
        parse_address(text)


def test_addresses_may_be_of_the_sixth_version() -> None:
    assert parse_address("[::1]:7000") == ("::1", 7000)
    assert parse_address("host:0") == ("host", 0)
    assert published_by(3) == "published by 3"
