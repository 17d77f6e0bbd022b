"""Which callers a launcher admits, and how long a caller may take."""

from __future__ import annotations

import hmac
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from avgpipe.fault import door
from avgpipe.fault.door import Door, connect, listen, listen_here, parse_address
from tests.patience import Deadline

_SECRET = b"correct horse battery staple"


@contextmanager
def opened() -> Iterator[tuple[Door, str]]:
    listening = listen(("127.0.0.1", 0))
    address = "127.0.0.1:{1}".format(*listening.getsockname())
    one = Door([(listening, _SECRET)])
    try:
        yield one, address
    finally:
        one.close()


def entered(one: Door) -> Connection:
    deadline = Deadline(10)
    while not (found := one.entered()):
        assert not deadline.has_passed
    return found[0]


class Caller:
    """A stranger that speaks the protocol byte by byte."""

    def __init__(self, address: str) -> None:
        self.end = socket.create_connection(parse_address(address), 10)

    def frame(self) -> bytes:
        (size,) = struct.unpack("!i", self.end.recv(4, socket.MSG_WAITALL))
        return self.end.recv(size, socket.MSG_WAITALL)

    def put(self, text: bytes) -> None:
        self.end.sendall(struct.pack("!i", len(text)) + text)


def answer(key: bytes, challenge: bytes) -> bytes:
    """As Python 3.11 answers, or later versions with the digest that the challenge names."""
    message = challenge[len(b"#CHALLENGE#") :]
    if named := re.match(rb"{(\w+)}", message):
        return named[0] + hmac.new(key, message, named[1].decode()).digest()
    return hmac.new(key, message, "md5").digest()


def test_who_knows_the_secret_is_let_in_and_both_may_speak() -> None:
    with opened() as (one, address):
        caller = connect(address, _SECRET)
        inside = entered(one)
        inside.send_bytes(b"hello")
        assert caller.recv_bytes() == b"hello"


def test_a_wrong_secret_a_replayed_answer_and_the_other_direction_s_are_refused() -> None:
    with opened() as (one, address):
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            connect(address, b"another secret of some length")
        first = Caller(address)
        captured = answer(b"caller/" + _SECRET, first.frame())
        first.put(captured)
        assert first.frame() == b"#WELCOME#"
        for key in (None, b"called/" + _SECRET, _SECRET):
            stranger = Caller(address)
            challenge = stranger.frame()
            stranger.put(captured if key is None else answer(key, challenge))
            assert stranger.frame() == b"#FAILURE#"
        assert not one.entered()


def test_a_launcher_without_the_secret_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def let_in() -> None:
            end, _ = impostor.accept()
            with Connection(end.detach()) as connection:
                connection.send_bytes(b"#CHALLENGE#" + b"x" * 20)
                connection.recv_bytes()
                connection.send_bytes(b"#WELCOME#")
                connection.recv_bytes()
                connection.send_bytes(b"y" * 16)

        thread = threading.Thread(target=let_in)
        thread.start()
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            connect("127.0.0.1:{1}".format(*impostor.getsockname()), _SECRET)
        thread.join()


def test_a_caller_that_drips_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "GREET_S", 0.5)
    monkeypatch.setattr(door, "_MOST_CALLERS", 2)
    with opened() as (one, address):
        drips = [Caller(address) for _ in range(2)]
        for drip in drips:
            drip.frame()
            drip.end.sendall(struct.pack("!i", 200))
        is_over = threading.Event()

        def go_on() -> None:
            while not is_over.wait(0.05):
                for drip in drips:
                    try:
                        drip.end.sendall(b"x")
                    except OSError:
                        return

        thread = threading.Thread(target=go_on)
        thread.start()
        monkeypatch.setattr(door, "GREET_S", 10.0)
        try:
            connect(address, _SECRET)
            entered(one)
        finally:
            is_over.set()
            thread.join()


def test_idle_callers_of_one_socket_take_no_place_of_another(tmp_path: Path) -> None:
    listening = listen(("127.0.0.1", 0))
    address = "127.0.0.1:{1}".format(*listening.getsockname())
    here = str(tmp_path / "door")
    one = Door([(listen_here(here), b"a token"), (listening, _SECRET)])
    idle = [Caller(address) for _ in range(door._MOST_CALLERS)]
    try:
        for caller in idle:
            caller.frame()
        connect(here, b"a token")
        entered(one)
    finally:
        one.close()


def test_a_caller_that_has_no_thread_is_dropped_and_the_next_one_is_let_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, refused = threading.Thread.start, list[str]()

    def refuse_first(thread: threading.Thread) -> None:
        if thread.name == "avgpipe-greeting" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_first)
    with opened() as (one, address):
        with pytest.raises((EOFError, OSError)):
            connect(address, _SECRET)
        connect(address, _SECRET)
        entered(one)
    assert refused


@pytest.mark.parametrize("text", ["", "host", "host:", ":7", "host:x", "host:99999"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write HOST:PORT"):
        parse_address(text)


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot listen at 198\.51\.100\.1:7"):
        listen(("198.51.100.1", 7))


def test_looking_at_a_socket_takes_no_descriptor() -> None:
    """A launcher that has none left must not end by it."""
    one, other = socket.socketpair()
    with other:
        connection = Connection(one.detach())
        before = len(list(Path("/proc/self/fd").iterdir()))
        with door.socket_of(connection) as end:
            assert end.family == socket.AF_UNIX
            assert len(list(Path("/proc/self/fd").iterdir())) == before
        connection.send_bytes(b"still open")
        connection.close()
