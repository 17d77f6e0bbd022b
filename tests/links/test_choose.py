"""Which link serves two workers, with both of them in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from avgpipe import links
from avgpipe.errors import PeerLost, PipelineError
from avgpipe.links import LinkRow, agree, shared
from avgpipe.links.choose import Links
from avgpipe.links.group import GroupLink, GroupTransport
from avgpipe.links.link import Key, Message
from avgpipe.links.transport import Endpoint, Transport
from tests.links.ends import BACK, CHANNELS, CPU, groups
from tests.patience import limit


class Meeting:
    """Where the ranks gather what each of them says."""

    def __init__(self, size: int) -> None:
        self.size, self.groups = size, groups(size)
        self._said: dict[tuple[int, int], Any] = {}
        self._met = threading.Barrier(size, timeout=limit(20))

    def gather(self, rank: int, turn: int, value: Any) -> list[Any]:
        self._said[turn, rank] = value
        self._met.wait()
        return [self._said[turn, r] for r in range(self.size)]


class Rank:
    """Stands for a World of two ranks."""

    timeout_s = 20.0

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size, self._turn = meeting, rank, meeting.size, 0
        self.group = meeting.groups[rank]

    def gather(self, value: Any) -> list[Any]:
        self._turn += 1
        return self._meeting.gather(self.rank, self._turn, value)

    def connect(self, make: Any) -> Any:
        return make()

    def role(self, rank: int) -> str:
        return f"stage {rank}"

    def lost(self, rank: int, doing: str) -> PeerLost:
        return PeerLost(f"rank {rank}: {doing}")


def joined(kind: str) -> list[Links | Exception]:
    """The links of both ranks, or why there are none."""
    meeting = Meeting(2)
    found: list[Any] = [None, None]

    def join(rank: int) -> None:
        try:
            world: Any = Rank(meeting, rank)
            found[rank] = Links(world, [0, 1], [BACK, CHANNELS], CPU, kind, None)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit(60))
    return found


def names_and_message(found: Sequence[Any]) -> tuple[list[str], float]:
    """The name of each rank's link to the other one, after a message has gone over it, and the seconds it took."""
    key = Key(Message.ACTIVATION, 0, 0, 1, 0, 0)
    begin = time.monotonic()
    found[0].by_replica[1].send(key, torch.ones(3))
    box = found[1].mailbox
    assert box.wait_until(lambda: key in box, limit(20))
    assert torch.equal(box.take(key), torch.ones(3))
    seconds = time.monotonic() - begin
    closing = [threading.Thread(target=links.close, args=(10,)) for links in found]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(limit(30))
    return [found[rank].by_replica[1 - rank].name.split(" (")[0] for rank in range(2)], seconds


def test_processes_of_a_host_share_memory_and_name_each_other() -> None:
    found: Any = joined("auto")
    assert [set(links.processes) for links in found] == [{1}, {0}]
    assert names_and_message(found)[0] == ["shared memory"] * 2


def test_the_link_that_is_asked_for_is_taken() -> None:
    found: Any = joined("gloo")
    assert [links.processes for links in found] == [{}, {}]
    assert names_and_message(found)[0] == ["torch.distributed"] * 2


def test_what_one_of_them_cannot_have_neither_has(monkeypatch: pytest.MonkeyPatch) -> None:
    open_inbox = shared.Inbox.open

    def refused(offer: Any, channels: Any) -> Any:
        if list(channels) == CHANNELS:  # rank 0 opens the inbox of rank 1
            raise OSError("no access")
        return open_inbox(offer, channels)

    monkeypatch.setattr(shared.Inbox, "open", refused)
    assert names_and_message(joined("auto"))[0] == ["torch.distributed"] * 2
    for error in joined("shm"):
        assert isinstance(error, PipelineError)
        assert str(error).startswith("link 'shm' cannot join ranks 0 and 1: no access; use 'auto' or 'gloo'")


class LateLink(GroupLink):
    name = "late"

    def send(self, key: Key, value: Any) -> None:
        time.sleep(0.2)
        super().send(key, value)


class LateTransport(GroupTransport):
    """A link of a stranger, that delays every message."""

    def link(self, rank: int, end: Endpoint, others: Sequence[Transport]) -> GroupLink:
        made = super().link(rank, end, others)
        made.__class__ = LateLink
        made.name = "late"
        return made


def test_another_link_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = LinkRow("late", f"{__name__}:LateTransport")
    monkeypatch.setattr(agree, "LINKS", (row, *links.LINKS))
    for kind in ("late", "auto"):
        names, seconds = names_and_message(joined(kind))
        assert names == ["late"] * 2
        assert seconds >= 0.2


def test_names_are_those_of_the_rows() -> None:
    assert {"auto", "shm", "gloo", "cuda-ipc", "nccl"} <= set(links.NAMES)
    assert {row.name for row in links.LINKS} == {*links.NAMES[1:]}
