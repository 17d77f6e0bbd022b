"""Another host's end of a run: it acts as the coordinator for the processes of a pipeline there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from avgpipe.fault.coordinator import offer, place_of
from avgpipe.fault.membership import GROUP, TOKEN
from avgpipe.fault.mirror import bells_at, published_by
from avgpipe.fault.passage import OPEN, Passage
from avgpipe.fault.roster import Roster
from avgpipe.fault.trunk import Trunk, let_in
from avgpipe.ranks.environment import RUN
from avgpipe_ext.ring import Memory


class Relay(Passage):
    """Acts as the coordinator for one pipeline.

    Args:
        folder: for the socket at which its processes find the run; readable for this user alone.

    Attributes:
        command: the connection of the command that starts them, like a connection to a launcher on its own
            host.
    """

    def __init__(self, trunk: Trunk, folder: Path) -> None:
        super().__init__(trunk)
        self._keys = count()
        self._path = str(folder / "run")
        self._socket: socket.socket | None = None
        self._places = 0  # stage replicas of its pipeline
        self._bells: dict[int, list[Any]] = {}  # of the processes here, by rank
        self.command, passed_on = Pipe()
        self._open(passed_on)
        self.start()

    def is_near(self, number: int) -> bool:
        return number == self.group

    def opened(self, key: int) -> None:
        raise ValueError("a connection from the launcher's host")

    def memory_for(self, name: str, length: int) -> Memory:
        return Memory.create(length)

    def _open(self, connection: Connection) -> None:
        key = next(self._keys)
        self._trunk.send(OPEN, key)
        self.serve(key, connection)

    # ---- processes ---------------------------------------------------------------------------------------------------

    def listen(self, place: Mapping[str, str]) -> dict[str, str]:
        """Serve the processes of the pipeline here; return their ``place`` with the address."""
        self.group = int(place[GROUP])
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self._path)
        self._socket.listen(64)
        arguments = self._socket, place[TOKEN].encode()
        threading.Thread(target=self._accept, args=arguments, daemon=True).start()
        return {**place, RUN: self._path}

    def _accept(self, listening: socket.socket, token: bytes) -> None:
        while True:
            try:
                end, _ = listening.accept()
            except OSError:  # closed
                return
            with suppress(OSError, EOFError, AuthenticationError):  # the process, or the trunk, has ended
                self._open(let_in(end, token))

    def finish(self, limit_s: float) -> None:
        """End once the launcher has received all messages and closes the trunk, or after ``limit_s``."""
        if self.group is not None:
            self.wait_until_over(limit_s)
        self.close()
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
            self._socket.close()

    # ---- messages ----------------------------------------------------------------------------------------------------

    def outward(self, key: int, kind: str, values: list[Any]) -> list[Any]:
        if kind == "hello" and self.group is not None:
            _, about = values
            self._bells[int(about["rank"])] = about.pop("bell")
            self.mirror.bells = bells_at([*self._bells.values()])
            self._places = int(about["places"])
            self.mirror.of(self.group, self._places)
        elif kind == "memory":
            request, name, size = values
            self.asked[key, request] = name, size
        elif kind == "hand over":
            number, name, place = values
            self.send_contents(name, place)
            self.memory.pop(name, None)  # a second request for it gets new memory
            return [number, name, place[-1]]
        elif kind == "alive" and self.given and self._has_begun():
            self.given.clear()
        return values

    def inward(self, key: int, kind: str, values: list[Any]) -> list[Any]:
        if kind == "welcome" and "batches" in values[0] and self.group is not None:
            published = self.mirror.of(self.group, self._places)
            return [{**values[0], "published": place_of(published.counts)}]
        if kind == "reply" and (key, values[0]) in self.asked:
            name, size = self.asked.pop((key, values[0]))
            reply = offer(self.memory, name, size) if "place" in values[1] else values[1]
            if "place" in reply:
                self.note_memory(name, self._places)
            return [values[0], reply]
        if kind == "roster":
            return self._roster_in(*values)
        if kind == "handed over":
            name, length = values
            memory = self.given.get(name)  # None: all have begun, and this process needed another part
            return [name, None if memory is None else [*place_of(memory), length]]
        return values

    def _has_begun(self) -> bool:
        return self.group is not None and self.mirror.of(self.group, self._places).turns_published() > 0

    def _roster_in(self, terms: list[Any], facts: dict[str, Any], stop: int | None) -> list[Any]:
        known = {}
        for number, about in facts.items():
            published = self.mirror.of(int(number), about["places"])
            sizes = {int(place): size for place, size in about["sizes"].items()}
            memory = {
                published_by(p): place_of(self.mirror.memory(published, p, size)) for p, size in sizes.items()
            }
            bells = [*self._bells.values()] if self.is_near(int(number)) else [self.mirror.place]
            known[number] = {
                "published": place_of(published.counts),
                "places": about["places"],
                "memory": memory,
                "bells": bells,
            }
        self.mirror.learn(Roster.from_json(terms).terms, map(int, facts))
        return [terms, known, stop]
