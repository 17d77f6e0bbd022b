"""A launcher's port for other hosts, and both ends of what passes there, without any pipeline."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import pytest

from avgpipe.fault.gate import Gates, listen
from avgpipe.fault.membership import environment
from avgpipe.fault.mirror import published_by
from avgpipe.fault.relay import Relay
from avgpipe.fault.roster import VERSION, encoded
from avgpipe.fault.trunk import Trunk, parse_address
from avgpipe_ext.ring import Bell, Memory
from tests.patience import wait_until
from tests.ranks.test_coordinator import Served, enter, heard, served

SECRET = "a secret that all hosts know"


class Joining:
    """Another host, whose pipeline is to have the number 1, as its group has."""

    def __init__(self, one: Served, gates: Gates, folder: Path) -> None:
        self.relay = Relay(Trunk.connect(parse_address(gates.address), SECRET.encode()), folder)
        self._place = self.relay.listen(environment("elsewhere", "a token", 1, 1))
        wait_until(lambda: 0 in gates)
        gates[0].group = 1

    def connect(self, group: int = 1, **changes: Any) -> Connection:
        connection = Client(self._place["AVGPIPE_RUN"], authkey=b"a token")
        about = {"rank": 0, "size": 1, "name": "rank 0", "places": 1, "period": 1, "timeout_s": 9}
        bell = Memory.create(Bell.BYTES)
        about |= {"pipeline": 1, "group": group, "bell": [bell.path, bell.bytes, 0]}
        connection.send_bytes(encoded(["hello", VERSION, about | changes]))
        return connection


@contextmanager
def listening(folder: Path) -> Iterator[tuple[Served, Gates]]:
    with served(folder) as one:
        gates = Gates(listen(("127.0.0.1", 0)), SECRET, (one.coordinator.address, b"a token"))
        try:
            yield one, gates
        finally:
            gates.close()


@contextmanager
def joining(folder: Path) -> Iterator[tuple[Served, Joining]]:
    with listening(folder) as (one, gates):
        (folder / "other host").mkdir()
        other = Joining(one, gates, folder / "other host")
        try:
            yield one, other
        finally:
            gates.close()
            other.relay.finish(5)


def ask_for_memory(connection: Connection, name: str, size: int) -> Memory:
    connection.send_bytes(encoded(["memory", 5, name, size]))
    return Memory.open(*heard(connection, "reply")[1]["place"])


def test_who_is_told_something_there_finds_it_in_memory_here(tmp_path: Path) -> None:
    with joining(tmp_path) as (one, other):
        near, far = one.connect(0, 0), other.connect()
        published = [heard(connection, "welcome")[0]["published"] for connection in (near, far)]
        assert published[0][0] != published[1][0]
        own = ask_for_memory(near, published_by(0), 1024), ask_for_memory(far, published_by(0), 1024)
        for connection in (near, far):
            assert enter(connection) == {}
        (_, about, _), (_, about_far, _) = (heard(connection, "roster") for connection in (near, far))
        assert about_far["1"]["published"] == published[1]
        # As isolated pipelines do: the slot, the count, the others' bells.
        theirs = Memory.open(*about["1"]["memory"][published_by(0)])
        memoryview(own[1])[:24] = b"".join(n.to_bytes(8, "little") for n in (32, 512, 512))
        memoryview(own[1])[24:32] = b"a number"
        Bell(Memory.open(*published[1]), 0).ring()
        path, size, offset = about_far["0"]["bells"][0]
        Bell(Memory.open(path, size), offset).ring()
        count = Bell(Memory.open(*about["1"]["published"]), 0)
        assert count.wait(0, 10) == 1
        assert bytes(memoryview(theirs)[24:32]) == b"a number"
        state = ask_for_memory(far, "state 0", 64)
        memoryview(state)[:5] = b"bytes"
        far.send_bytes(encoded(["hand over", 0, "state 0", [state.path, state.bytes, 5]]))
        name, (path, size, length) = heard(near, "handed over")
        assert (name, bytes(memoryview(Memory.open(path, size))[:length])) == ("state 0", b"bytes")
        far.send_bytes(encoded(["once", 6, "who answers", 1, 9, 9]))
        near.send_bytes(encoded(["once", 6, "who answers", 1, 9, 9]))
        assert heard(near, "reply") == [6, {}]  # what is done to files is done here
        near.send_bytes(encoded(["done", "who answers", 1, 9, "near"]))
        assert heard(far, "reply") == [6, {"value": "near"}]
        far.close()
        near.send_bytes(encoded(["begun", 3, 3]))
        assert one.lost == {} or one.lost == {1: "rank 0 has ended"}
        heard(near, "freeze")


def hand_over(connection: Connection, number: int, name: str, state: bytes) -> None:
    memory = ask_for_memory(connection, name, len(state) + 64)  # as memory of a longer state before
    memoryview(memory)[: len(state)] = state
    connection.send_bytes(encoded(["hand over", number, name, [memory.path, memory.bytes, len(state)]]))


def handed(connection: Connection) -> tuple[str, bytes]:
    name, (path, size, length) = heard(connection, "handed over")
    return name, bytes(memoryview(Memory.open(path, size))[:length])


def test_what_one_begins_with_comes_over_the_line_once_and_is_kept_no_longer_than_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    send = Trunk.send

    def count(trunk: Trunk, *message: Any, **options: Any) -> None:
        sent.extend([message[0]] * (message[0] == "contents"))
        send(trunk, *message, **options)

    monkeypatch.setattr(Trunk, "send", count)
    with joining(tmp_path) as (one, other):
        near, *far = one.connect(0, 0), *(other.connect(rank=n, size=2, places=2) for n in range(2))
        published = Memory.open(
            *[heard(connection, "welcome")[0]["published"] for connection in (near, *far)][1]
        )
        for place in range(2):
            ask_for_memory(far[0], published_by(place), 1024)
        for connection in (near, *far):
            assert enter(connection) == {}
        states = {("state 0", b"first"), ("state 1", b"second")}
        for name, state in sorted(states):
            hand_over(near, 1, name, state)
        hand_over(near, 1, "state 0", b"of one that stands in for who is lost")
        for connection in far:
            assert {handed(connection) for _ in states} == states
        assert len(sent) == len(states)
        near.send_bytes(encoded(["alive", "the first turn", 0]))
        heard(near, "heard")
        giver, receiver = one.coordinator.groups[0], one.coordinator.groups[1]
        assert (list(giver.memory), sorted(receiver.given)) == ([], ["state 0", "state 1"])
        for place in range(2):
            Bell(published, place * Bell.BYTES).ring()
        far[0].send_bytes(encoded(["alive", "the first turn", 0]))
        heard(far[0], "heard")
        assert receiver.given == {}
        assert other.relay.given == {}
        hand_over(far[0], 0, "state 0", b"back")
        assert handed(near) == ("state 0", b"back")
        assert set(other.relay.memory) == {published_by(place) for place in range(2)}


def test_a_process_of_another_group_ends_what_passes(tmp_path: Path) -> None:
    with joining(tmp_path) as (one, other):
        stranger = other.connect(group=7)
        with pytest.raises((EOFError, OSError)):
            stranger.recv_bytes()
        other.relay.wait_until_over(5)
        assert other.relay.is_over
        assert heard(one.connect(0, 0), "welcome")


@pytest.mark.parametrize(
    "message",
    [["nonsense"], ["published", 1, 2, 3], ["say", 99, []], ["open"], ["contents", "state 0", 2**40]],
)
def test_what_makes_no_sense_ends_a_host_alone(tmp_path: Path, message: list[Any]) -> None:
    with listening(tmp_path) as (one, gates):
        trunk = Trunk.connect(parse_address(gates.address), SECRET.encode())
        trunk.send(*message)
        with pytest.raises((EOFError, OSError)):
            trunk.receive()
        assert heard(one.connect(0, 0), "welcome")
        assert Trunk.connect(parse_address(gates.address), SECRET.encode())


def test_who_does_not_know_the_secret_cannot_show_one_callers_answer_to_another(tmp_path: Path) -> None:
    """As if it were the launcher, whose port it has taken after that one's end."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(Trunk.connect, server.getsockname(), SECRET.encode()) for _ in range(2)]
        first, second = (Connection(server.accept()[0].detach()) for _ in calls)
        first.send_bytes(b"#CHALLENGE#" + bytes(20))
        first.recv_bytes()
        first.send_bytes(b"#WELCOME#")
        second.send_bytes(first.recv_bytes())  # the challenge of one
        first.send_bytes(second.recv_bytes())  # and the other's answer
        for caller in (first, second):
            caller.close()
        for call in calls:
            with pytest.raises((AuthenticationError, EOFError, OSError)):
                call.result(20)


def test_strangers_are_refused_and_keep_nobody_out(tmp_path: Path) -> None:
    with listening(tmp_path) as (_, gates):
        address = parse_address(gates.address)
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            Trunk.connect(address, b"another secret that is known")
        silent = [socket.create_connection(address) for _ in range(8)]
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with suppress(ConnectionResetError):
                while stranger.recv(1000):
                    pass
        trunk = Trunk.connect(address, SECRET.encode())
        trunk.cut()
        for end in silent:
            end.close()
