"""Connections of processes of one host to a launcher on another: an end of the trunk that carries them.

On the launcher's host, the *gate* opens a connection to the coordinator for each process of the other host;
there, the *relay* acts as the coordinator. Messages pass unchanged except for places of memory: each end has
its own memory, and a :class:`~avgpipe.fault.mirror.Mirror` keeps both alike::

    process -- relay ==== trunk ==== gate -- coordinator
"""

from __future__ import annotations

import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

from avgpipe.fault.mirror import PUBLISHED, Mirror, published_by
from avgpipe.fault.roster import encoded, received
from avgpipe.fault.trunk import Trunk
from avgpipe_ext.ring import Memory

OPEN, CLOSE, SAY, CONTENTS = "open", "close", "say", "contents"
_GONE = (OSError, EOFError, AuthenticationError)
_INVALID = (ValueError, TypeError, KeyError, IndexError)
_END_S = 5.0


class Passage(ABC):
    """The common part of both ends.

    The relay numbers the connections. What arrives as memory is passed on as memory.

    Attributes:
        group: the number of the processes on the joining host, once it is known.
        asked: requests for memory, by connection and request number: name and size.
        memory: of the group, by name.
        given: by name, what one process hands over to another, as long as it is needed here.
        is_over: whether the trunk brings no more messages.
    """

    def __init__(self, trunk: Trunk) -> None:
        self._trunk = trunk
        self.group: int | None = None
        self.mirror = Mirror(trunk, self.is_near)
        self._connections: dict[int, Connection] = {}
        self.asked: dict[tuple[int, int], tuple[str, int]] = {}
        self.memory: dict[str, Memory] = {}
        self.given: dict[str, Memory] = {}
        self._lock = threading.Lock()
        self.is_over = False
        self._threads = [
            threading.Thread(target=target, name="avgpipe-passage", daemon=True)
            for target in (self._receive, self._ship)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @abstractmethod
    def is_near(self, number: int) -> bool:
        """Whether a group's processes are on this side."""

    @abstractmethod
    def outward(self, key: int, kind: str, values: list[Any]) -> list[Any]:
        """Return the values of a message from a connection here, as they are sent over the trunk."""

    @abstractmethod
    def inward(self, key: int, kind: str, values: list[Any]) -> list[Any]:
        """Return the values of a message from the trunk, as they are sent to a connection here."""

    @abstractmethod
    def opened(self, key: int) -> None:
        """Handle a connection that the other end has opened."""

    # ---- memory ------------------------------------------------------------------------------------------------------

    def send_contents(self, name: str, place: list[Any]) -> None:
        """Send the contents of memory ahead of the messages about it."""
        path, size, length = place
        self._trunk.send(CONTENTS, name, length, parts=[memoryview(Memory.open(path, size))[:length]])

    def _take_contents(self, name: str, length: int) -> None:
        memory = self.memory_for(name, length)
        self._trunk.receive_into(memoryview(memory)[:length])
        self.given[name] = memory

    @abstractmethod
    def memory_for(self, name: str, length: int) -> Memory:
        """Return memory for ``length`` bytes that one process hands over to another."""

    def note_memory(self, name: str, places: int) -> None:
        """Note memory of the group, which has ``places`` stage replicas, where one of them publishes in it."""
        assert self.group is not None
        published = self.mirror.of(self.group, places)
        published.memory |= {p: self.memory[name] for p in range(places) if published_by(p) == name}

    # ---- threads -----------------------------------------------------------------------------------------------------

    def _ship(self) -> None:
        try:
            self.mirror.run()
        except OSError:
            self.cut()

    def serve(self, key: int, connection: Connection) -> None:
        """Start a thread that passes on the messages of a connection here, until its end."""
        with self._lock:
            self._connections[key] = connection
        thread = threading.Thread(target=self._pass_on, args=(key, connection), daemon=True)
        thread.start()

    def _pass_on(self, key: int, connection: Connection) -> None:
        try:
            while (message := _next(connection)) is not None:
                kind, *values = message
                values = self.outward(key, kind, values)
                self.mirror.ship()  # what was published before the message must arrive before it
                self._trunk.send(SAY, key, [kind, *values])
            self.mirror.ship()
            self._trunk.send(CLOSE, key)
        except (OSError, *_INVALID):
            self.cut()
        self._forget(key)
        connection.close()

    def _receive(self) -> None:
        try:
            while True:
                self._take(*self._trunk.receive())
        except (*_GONE, MemoryError, *_INVALID):
            self.cut()
        finally:
            for key in list(self._connections):  # only now: nothing writes to this host's memory any more
                self._forget(key)
            self.is_over = True

    def _take(self, kind: str, *values: Any) -> None:
        if kind == PUBLISHED:
            self.mirror.take(*values)
        elif kind == CONTENTS:
            self._take_contents(*values)
        elif kind == OPEN:
            self.opened(*values)
        elif kind == CLOSE:
            self._forget(*values)
        elif kind == SAY:
            key, (said, *rest) = values
            message = self.inward(key, said, rest)
            if (connection := self._connections.get(key)) is not None:
                with suppress(OSError, ValueError):  # its own thread handles its end
                    connection.send_bytes(encoded([said, *message]))
        else:
            raise ValueError(f"unknown message {kind!r}")

    def _forget(self, key: int) -> None:
        with self._lock:
            connection = self._connections.pop(key, None)
        if connection is not None:  # its thread closes it
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)

    # ---- ending ------------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """End the trunk."""
        self._trunk.cut()
        self.mirror.close()

    def wait_until_over(self, limit_s: float) -> None:
        """Wait for the other end to close the trunk."""
        self._threads[0].join(limit_s)

    def close(self) -> None:
        """End the trunk, and return once nothing more comes from it."""
        self.cut()
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(_END_S)


def _next(connection: Connection) -> list[Any] | None:
    """Return the next message; None at the end."""
    try:
        return received(connection)
    except (OSError, EOFError):
        return None


def published_memory(about: Mapping[str, Any]) -> dict[int, Any]:
    """Return the memory in which a group publishes, by stage replica, from a roster's facts."""
    return {
        p: about["memory"][published_by(p)]
        for p in range(about["places"])
        if published_by(p) in about["memory"]
    }
