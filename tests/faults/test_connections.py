"""What befalls TCP connections, as both ends see it."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from avgpipe.faults.kinds import begin_message, connections, cut, reset
from tests.patience import limit


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        closing(server.accept()[0]) as theirs,
    ):
        yield ours, theirs


def test_connections_are_those_of_tcp_without_the_store_unless_wanted(pair: Any, monkeypatch: Any) -> None:
    numbers = {end.fileno() for end in pair}
    port = pair[0].getpeername()[1]
    with socket.socket(socket.AF_UNIX), socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket():
        before = set(connections())
        assert numbers <= before
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert before - set(connections()) == numbers
        assert set(connections(store=True)) == before


def test_both_ends_see_a_reset(pair: Any) -> None:
    reset(pair[0].fileno())
    for end in pair:
        with pytest.raises(ConnectionResetError):
            end.recv(1)


def test_a_message_is_begun(pair: Any) -> None:
    begin_message(pair[0].fileno())
    assert 0 < len(pair[1].recv(100)) < 8
    pair[1].close()
    for _ in range(3):
        begin_message(pair[0].fileno())  # whoever has gone is no error


def test_a_line_that_is_cut_carries_nothing_and_raises_nothing(pair: Any) -> None:
    ours, theirs = pair
    for end in pair:
        end.setblocking(False)
    with select.epoll() as at_ours, select.epoll() as at_theirs:
        at_ours.register(ours.fileno(), select.EPOLLIN)
        at_theirs.register(theirs.fileno(), select.EPOLLIN)
        theirs.send(b"before")
        assert at_ours.poll(limit(5))
        cut(ours.fileno())
        ours.send(b"lost")
        theirs.send(b"lost")
        assert at_ours.poll(0.05) == at_theirs.poll(0.05) == []
        for end in pair:
            with pytest.raises(BlockingIOError):
                end.recv(1)
        # Whoever polls it may go on as before, and stop.
        at_ours.modify(ours.fileno(), select.EPOLLIN | select.EPOLLOUT)
        assert at_ours.poll(0.05) == [(ours.fileno(), select.EPOLLOUT)]
        at_ours.unregister(ours.fileno())
        ours.close()
        assert at_theirs.poll(0.05) == []  # nor of the end of its number
