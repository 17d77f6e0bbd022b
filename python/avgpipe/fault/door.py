"""Connections to a launcher: by a Unix socket on its host, and over TCP from other hosts; and messages.

Both ends prove that they know a secret (HMAC, by ``multiprocessing.connection``), each in its own direction, before
anything else is read; the whole greeting has one limit. After it nothing is authenticated or encrypted. Messages are
JSON of a fixed version; nothing received is unpickled.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from queue import SimpleQueue
from typing import Any

VERSION = 3
JOIN = "join"  # first message of another command that starts a pipeline
ALIVE, ENDED = "alive", "ended"  # its other messages; the last one
MOST_BYTES = 2**24  # of a message
_READ_BYTES = 2**16
_SIZE = struct.Struct("!i")  # of a message, before it: as multiprocessing sends it
GREET_S = 10.0  # timeout for the whole greeting
_LOOK_S = 0.1
SEND_S = 5  # in which a peer must take a message
_MOST_CALLERS = 16  # of one socket, that have not proved yet that they know the secret
# Each end proves with a prefix of its own that it knows the secret, or an answer could be replayed to another.
_CALLER, _CALLED = b"caller/", b"called/"
# Notices a host that is lost, also where nothing is sent for long.
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "host:port"; ValueError for any other text."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdigit() and int(port) < 2**16):
        raise ValueError(f"{text!r} is no address: write HOST:PORT, as in 10.0.0.1:7000")
    return host.strip("[]"), int(port)


def listen(address: tuple[str, int]) -> socket.socket:
    """Listen at a host and port. ValueError where they are not this host's, or in use."""
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=64)
    except OSError as error:
        what, *_ = (error.strerror or str(error)).partition(" (while")
        raise ValueError(f"cannot listen at {host}:{port}: {what}") from None


def listen_here(path: str) -> socket.socket:
    """Listen at a path of this host."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    return listening


def called(listening: socket.socket) -> str:
    """Return the address at which other hosts find a listening socket."""
    host, port, *_ = listening.getsockname()
    if host in ("0.0.0.0", "::"):  # all addresses
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def connect(where: str, secret: bytes) -> Connection:
    """Connect to a launcher, at a path or at "host:port".

    OSError, EOFError or AuthenticationError: nothing answers there, or it has another secret.
    """
    if where.startswith("/"):
        end = socket.socket(socket.AF_UNIX)
        end.settimeout(GREET_S)
        end.connect(where)
    else:
        end = socket.create_connection(parse_address(where), GREET_S)
    end.settimeout(None)
    _prepare(end)
    connection = Connection(end.detach())
    _prove(connection, (answer_challenge, _CALLER + secret), (deliver_challenge, _CALLED + secret))
    return connection


def _prepare(end: socket.socket) -> None:
    """Limit what one peer can delay: what is sent to it, and how long the loss of its host is not noticed."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
    if end.family != socket.AF_UNIX:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            end.setsockopt(socket.IPPROTO_TCP, option, value)


@contextmanager
def socket_of(connection: Connection) -> Iterator[socket.socket]:
    """Give the socket of a connection, which stays open; no other descriptor is needed, as there may be none left."""
    end = socket.socket(fileno=connection.fileno())
    try:
        yield end
    finally:
        end.detach()


def cut(connection: Connection) -> None:
    """End a connection for both ends, even while another thread sends or receives."""
    with suppress(OSError), socket_of(connection) as end:
        end.shutdown(socket.SHUT_RDWR)


def _prove(connection: Connection, *steps: tuple[Callable[[Connection, bytes], object], bytes]) -> None:
    """Greet the other end, within a limit; where that fails the connection is closed."""
    timer = threading.Timer(GREET_S, cut, [connection])
    timer.daemon = True
    try:
        timer.start()
        for step, key in steps:
            step(connection, key)
    except BaseException as error:
        connection.close()
        if isinstance(error, AssertionError):  # another protocol
            raise AuthenticationError("the peer sent no challenge") from error
        raise
    finally:
        timer.cancel()


# ---- messages --------------------------------------------------------------------------------------------------------


def encoded(message: Sequence[Any]) -> bytes:
    """Return a message as it is sent; ValueError for one that its receiver would refuse."""
    text = json.dumps(message).encode()
    if len(text) > MOST_BYTES:
        what = " ".join(str(part) for part in message[:3] if isinstance(part, str | int))
        raise ValueError(f"{what[:200]!r} has {len(text)} bytes as JSON, and a message at most {MOST_BYTES}")
    return text


def received(connection: Connection) -> list[Any]:
    """Read a message; OSError or EOFError for a closed connection, ValueError for an invalid message."""
    return _decoded(connection.recv_bytes(MOST_BYTES))


def _decoded(text: bytes) -> list[Any]:
    try:
        message = json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(message, list) or not message:
        raise ValueError(f"not a message: {str(message)[:200]!r}")
    return message


class Messages:
    """Reads what has arrived: the rest of a message may never come, where its sender is stopped or cut off."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._bytes = connection, bytearray()

    def read(self) -> list[list[Any]]:
        """Return the messages that have arrived whole, of a connection that has something to read.

        OSError or EOFError for a closed connection, ValueError for an invalid message.
        """
        found, data = [], os.read(self._connection.fileno(), _READ_BYTES)
        if not data:
            raise EOFError
        self._bytes += data
        while len(self._bytes) >= _SIZE.size:
            (size,) = _SIZE.unpack_from(self._bytes)
            if not 0 <= size <= MOST_BYTES:
                raise ValueError(f"a message of {size} bytes")
            end = _SIZE.size + size
            if len(self._bytes) < end:
                break
            found.append(_decoded(bytes(self._bytes[_SIZE.size : end])))
            del self._bytes[:end]
        return found


# ---- the launcher's end ----------------------------------------------------------------------------------------------


class Door:
    """Lets callers in that know the secret, in threads of its own: a caller that is slow delays no other one.

    Args:
        listening: the sockets and the secret of each; closed with this.
    """

    def __init__(self, listening: Sequence[tuple[socket.socket, bytes]]) -> None:
        self._entered = SimpleQueue[Connection]()
        self._is_closed = False
        self._threads = [threading.Thread(target=self._run, args=one, daemon=True) for one in listening]
        for thread in self._threads:
            thread.start()

    def entered(self) -> list[Connection]:
        """Return the connections of those that have been let in since the last call."""
        return [self._entered.get() for _ in range(self._entered.qsize())]

    def close(self) -> None:
        self._is_closed = True
        for thread in self._threads:
            thread.join()
        for connection in self.entered():
            connection.close()

    def _run(self, listening: socket.socket, secret: bytes) -> None:
        # Each socket has places of its own: callers of other hosts take none from the processes here.
        places, its, mine = threading.Semaphore(_MOST_CALLERS), _CALLER + secret, _CALLED + secret

        def greet(connection: Connection) -> None:
            with suppress(Exception):  # it has ended, or does not know the secret
                _prove(connection, (deliver_challenge, its), (answer_challenge, mine))
                self._entered.put(connection)
            places.release()

        with listening:
            while not self._is_closed:
                if not (wait([listening], _LOOK_S) and places.acquire(timeout=_LOOK_S)):
                    continue
                try:
                    end, _ = listening.accept()
                    _prepare(end)
                    threading.Thread(
                        target=greet, args=[Connection(end.detach())], name="avgpipe-greeting", daemon=True
                    ).start()
                except (OSError, RuntimeError):  # such as when no descriptors or threads are left for now
                    places.release()
                    time.sleep(_LOOK_S)
