"""The one connection between a run's launcher and another host, for all messages of their processes.

Both ends must know a token. A message is JSON, and raw parts may follow it; nothing is unpickled, and nothing
is encrypted.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from avgpipe.fault.roster import encoded, received

_MOST_BYTES = 2**24  # of a message, without its parts
# Each end proves with a prefix of its own that it knows the token, or an answer could be replayed to another.
_CALLER, _CALLED = b"caller/", b"called/"
_GREET_S = 10  # timeout for a peer to prove that it knows the token
_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 6,
}  # notices a host that is lost


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "host:port"; ValueError for any other text."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdigit() and int(port) < 2**16):
        raise ValueError(f"{text!r} is no address: write HOST:PORT, as in 10.0.0.1:7000")
    return host.strip("[]"), int(port)


class Trunk:
    """One end of the connection; any thread may send, and one receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        with _socket_of(connection) as end:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEP_ALIVE.items():
                end.setsockopt(socket.IPPROTO_TCP, option, value)

    @classmethod
    def connect(cls, address: tuple[str, int], token: bytes) -> Trunk:
        """Connect to a launcher. OSError, EOFError or AuthenticationError: no answer, or another token."""
        with socket.create_connection(address, _GREET_S) as end:
            end.settimeout(None)
            connection = Connection(end.detach())
        return cls(
            _greeted(connection, (answer_challenge, _CALLER + token), (deliver_challenge, _CALLED + token))
        )

    @classmethod
    def answer(cls, end: socket.socket, token: bytes) -> Trunk:
        """Answer a caller; raises as :meth:`connect`."""
        connection = Connection(end.detach())
        return cls(
            _greeted(connection, (deliver_challenge, _CALLER + token), (answer_challenge, _CALLED + token))
        )

    def send(self, *message: Any, parts: Sequence[memoryview] = ()) -> None:
        """Send a message and its parts, none of which is empty. OSError where the connection is closed."""
        with self._sending:
            self._connection.send_bytes(encoded(message))
            for part in parts:
                self._connection.send_bytes(part)

    def receive(self) -> list[Any]:
        """Return the next message. OSError or EOFError: the connection is closed; ValueError: invalid."""
        return received(self._connection, _MOST_BYTES)

    def receive_into(self, target: memoryview) -> None:
        """Receive a part of the message before, whose size the receiver knows."""
        if (size := self._connection.recv_bytes_into(target)) != len(target):
            raise ValueError(f"received {size} bytes, and expected {len(target)}")

    def cut(self) -> None:
        """End the connection for both ends, even while a thread of this end sends or receives."""
        with suppress(OSError), _socket_of(self._connection) as end:
            end.shutdown(socket.SHUT_RDWR)


def _socket_of(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))


def let_in(end: socket.socket, token: bytes, within_s: int = _GREET_S) -> Connection:
    """Return the connection of a ``multiprocessing.connection.Client``; raises as :meth:`Trunk.connect`."""
    steps = (deliver_challenge, token), (answer_challenge, token)
    return _greeted(Connection(end.detach()), *steps, within_s=within_s)


def _greeted(connection: Connection, *steps: tuple[Any, bytes], within_s: int = _GREET_S) -> Connection:
    """Prove to each other, within a timeout, that both ends know the keys."""
    try:
        _limit(connection, within_s)
        for step, key in steps:
            try:
                step(connection, key)
            except AssertionError as error:  # another protocol
                raise AuthenticationError("the peer sent no challenge") from error
        _limit(connection, 0)
        return connection
    except BaseException:
        connection.close()
        raise


def _limit(connection: Connection, seconds: int) -> None:
    with _socket_of(connection) as end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
