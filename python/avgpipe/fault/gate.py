"""The launcher's end of the trunks to other hosts: it admits them, and represents their processes here."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from itertools import count
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any
from weakref import WeakValueDictionary

from avgpipe.fault.coordinator import place_of
from avgpipe.fault.membership import GROUP
from avgpipe.fault.mirror import bells_at
from avgpipe.fault.passage import Passage, published_memory
from avgpipe.fault.roster import JOIN, Roster
from avgpipe.fault.trunk import Trunk
from avgpipe_ext.ring import Memory

_MOST_CALLERS = 16  # that have not proved yet that they know the token
_RETRY_S = 0.5


class Gate(Passage):
    """Represents one pipeline of another host, with a connection to the coordinator for each process.

    Args:
        number: by which the launcher finds it.
        address, token: of the coordinator.
    """

    def __init__(self, trunk: Trunk, number: int, address: str, token: bytes) -> None:
        super().__init__(trunk)
        self._number, self._address, self._token = number, address, token
        self._places: dict[int, int] = {}  # by connection: how many stage replicas its pipeline has
        self._handing = threading.Lock()
        self._handed: set[str] = set()  # names of the states sent, with which the pipeline begins

    def is_near(self, number: int) -> bool:
        return number != self.group

    def opened(self, key: int) -> None:
        self.serve(key, Client(self._address, authkey=self._token))

    def memory_for(self, name: str, length: int) -> Memory:
        memory = self.memory[name]
        if memory.bytes < length:
            raise ValueError(f"{length} bytes for {name}, which has {memory.bytes}")
        return memory

    def inward(self, key: int, kind: str, values: list[Any]) -> list[Any]:
        if kind == JOIN:
            version, about = values
            return [version, {"host": str(about["host"]), "gate": self._number}]
        if kind == "hello":
            version, about = values
            if int(about["group"]) != self.group:
                raise ValueError(f"group {about['group']} does not belong to this gate")
            self._places[key] = int(about["places"])
            return [version, {**about, "bell": self.mirror.place, "is_far": True}]
        if kind == "memory":
            request, name, size = values
            self.asked[key, request] = name, size
        elif kind == "hand over":
            number, name, length = values
            memory = self.given.pop(name)
            self.memory.pop(name, None)  # a second request for it gets new memory
            return [number, name, [*place_of(memory), length]]
        return values

    def outward(self, key: int, kind: str, values: list[Any]) -> list[Any]:
        if kind == "welcome":
            (about,) = values
            if "place" in about:  # the reply to a command that starts a pipeline
                self.group = int(about["place"][GROUP])
            elif "published" in about and self.group is not None:
                published = about.pop("published")
                self.mirror.of(self.group, self._places[key], Memory.open(*published))
        elif kind == "reply" and (key, values[0]) in self.asked:
            name, _ = self.asked.pop((key, values[0]))
            if "place" in values[1]:
                self.memory[name] = Memory.open(*values[1]["place"])
                self.note_memory(name, self._places[key])
                return [values[0], {"place": None}]
        elif kind == "roster":
            return self._roster_out(*values)
        elif kind == "handed over":
            return self._hand_over(*values)
        return values

    def _hand_over(self, name: str, place: list[Any]) -> list[Any]:
        """Send a state once, ahead of the messages about it to each process of the pipeline."""
        with self._handing:
            if name not in self._handed:
                self._handed.add(name)
                self.send_contents(name, place)
        return [name, place[-1]]

    def _roster_out(self, terms: list[Any], facts: dict[str, Any], stop: int | None) -> list[Any]:
        sent, bells = {}, []
        for number, about in facts.items():
            memory = published_memory(about)
            if self.is_near(int(number)):
                published = self.mirror.of(int(number), about["places"], Memory.open(*about["published"]))
                for place in memory.keys() - published.memory.keys():
                    published.memory[place] = Memory.open(*memory[place])
                bells += about["bells"]
            sent[number] = {"places": about["places"], "sizes": {p: size for p, (_, size) in memory.items()}}
        self.mirror.bells = bells_at(bells)
        self.mirror.learn(Roster.from_json(terms).terms, map(int, facts))
        return [terms, sent, stop]


def listen(address: tuple[str, int]) -> socket.socket:
    """Listen at a host and port. ValueError where they are not this host's, or in use."""
    host, port = address
    try:
        return socket.create_server(
            address, family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=64
        )
    except OSError as error:
        what, *_ = (error.strerror or str(error)).partition(" (while")
        raise ValueError(f"cannot listen at {host}:{port}: {what}") from None


class Gates:
    """Admits commands on other hosts that start pipelines, in threads of its own.

    Args:
        listening: the socket to which they connect; closed with this.
        token: what a command must know.
        coordinator: its address and token.
    """

    def __init__(self, listening: socket.socket, token: str, coordinator: tuple[str, bytes]) -> None:
        self._socket = listening
        self._token, self._coordinator = token.encode(), coordinator
        # Its threads keep a gate alive as long as it is open.
        self._gates: WeakValueDictionary[int, Gate] = WeakValueDictionary()
        self._numbers = count()
        self._callers = threading.BoundedSemaphore(_MOST_CALLERS)
        self._is_closed = False
        self._thread = threading.Thread(target=self._listen, name="avgpipe-gates", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        host, port, *_ = self._socket.getsockname()
        if host in ("0.0.0.0", "::"):  # all addresses
            host = socket.gethostname()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def __contains__(self, number: int) -> bool:
        return number in self._gates

    def __getitem__(self, number: int) -> Gate:
        return self._gates[number]

    def _listen(self) -> None:
        while True:
            self._callers.acquire()
            try:
                end, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                self._callers.release()
                time.sleep(_RETRY_S)  # such as when no descriptors are left for now
                continue
            threading.Thread(target=self._greet, args=(end,), daemon=True).start()

    def _greet(self, end: socket.socket) -> None:
        try:
            with suppress(
                OSError, EOFError, ValueError, AuthenticationError
            ):  # the caller has ended, or does not know the token
                trunk = Trunk.answer(end, self._token)
                number = next(self._numbers)
                self._gates[number] = gate = Gate(trunk, number, *self._coordinator)
                gate.start()
        finally:
            self._callers.release()

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self._socket.close()
        for known in self._gates.valuerefs():  # a list, as another gate may just be added
            if (gate := known()) is not None:
                gate.close()
