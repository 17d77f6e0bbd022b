"""The true coordinator with many processes: which share of a core does it take, with its sockets?

One other process keeps a TCP connection for each host, as a process of a pipeline does: it reports each second and
answers freezes. Within the time that is measured one host is lost and one joins.
"""

from __future__ import annotations

import multiprocessing
import selectors
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from avgpipe.fault.coordinator import Coordinator
from avgpipe.fault.door import VERSION, connect, encoded, listen

_TOKEN, _TIMEOUT_S, _SLOTS = "token", 300.0, 16
FACTS = {"memory": ["/proc/1000000/fd/20", 104857600, [0], True], "bell": ["/proc/1000000/fd/21", 4096, 64]}


def served(hosts: int, seconds: float) -> dict[str, float]:
    """Return the coordinator's share of a core over ``seconds``, and the messages per second that it received."""
    lost: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        far = listen(("127.0.0.1", 0))
        coordinator = Coordinator(
            str(Path(folder) / "socket"),
            _TOKEN.encode(),
            hosts,
            lambda number, rank, why: lost.append(number),
            lambda line: None,
            listening=(far, _TOKEN),
        )
        for number in range(hosts + 1):
            coordinator.started(number)
        context = multiprocessing.get_context("spawn")
        there, here = context.Pipe()
        arguments = (f"127.0.0.1:{far.getsockname()[1]}", hosts, seconds, here)
        process = context.Process(target=_hosts, args=arguments, daemon=True)
        process.start()

        def serve() -> None:
            coordinator.serve(0.05)
            assert len(coordinator.members.training) <= hosts  # which the supervisor looks at each time
            while lost:
                coordinator.gone(lost.pop())

        try:
            while not there.poll(0):  # until all have reported for some seconds
                serve()
            there.recv()
            begin_s, begin_cpu_s = time.monotonic(), time.process_time()
            while time.monotonic() < begin_s + seconds:
                serve()
            passed_s, cpu_s = time.monotonic() - begin_s, time.process_time() - begin_cpu_s
            while not there.poll(0):
                serve()
            said = there.recv()
            assert len(coordinator.members.members) == hosts
        finally:
            process.kill()
            process.join()
            coordinator.close()
    return {"share": cpu_s / passed_s, "received_per_s": said / passed_s}


def _hosts(address: str, hosts: int, seconds: float, launcher: Any) -> None:
    """The other ends, in a process of their own."""
    crowd = _Ends(address)
    for number in range(hosts):
        crowd.connect(number, number)
        crowd.look()
    crowd.go_on(3.0)
    launcher.send("begun")
    crowd.said = 0
    crowd.go_on(seconds / 3)
    crowd.close(hosts // 2)
    crowd.go_on(seconds / 3)
    crowd.connect(hosts, hosts // 2)
    crowd.go_on(seconds / 3)
    launcher.send(crowd.said)
    crowd.go_on(600.0)


class _Ends:
    def __init__(self, address: str) -> None:
        self._address = address
        self._ends: dict[int, Connection] = {}
        self._numbers: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._slot, self._next = 0, time.monotonic()
        self.said = 0

    def connect(self, number: int, pipeline: int) -> None:
        end = self._ends[number] = connect(self._address, _TOKEN.encode())
        about = {"name": f"rank 0 of pipeline {pipeline}", "pipeline": pipeline, "group": number, "rank": 0}
        about |= {"size": 1, "period": 1, "host": f"host {pipeline}", "timeout_s": _TIMEOUT_S}
        self._say(number, "hello", VERSION, about)
        self._say(number, "enter", 1, {"plan": "a"}, FACTS)
        self._selector.register(end, selectors.EVENT_READ, number)

    def close(self, number: int) -> None:
        end = self._ends.pop(number)
        self._selector.unregister(end)
        end.close()

    def _say(self, number: int, *message: Any) -> None:
        self._ends[number].send_bytes(encoded(message))
        self.said += 1

    def go_on(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.look()

    def look(self) -> None:
        """Report where it is time, and answer what has arrived."""
        for key, _ in self._selector.select(max(0.0, self._next - time.monotonic())):
            text = self._ends[key.data].recv_bytes()
            if text.startswith(b'["freeze"'):
                number = int(text.split(b",")[1])
                self._say(key.data, "begun", number, 10, 10, 9, {})
        while time.monotonic() >= self._next:
            for number in list(self._ends)[self._slot :: _SLOTS]:
                self._say(number, "alive", "a forward of batch 12, micro-batch 3", 10, 10, 9, 10)
            self._slot = (self._slot + 1) % _SLOTS
            self._next += 1 / _SLOTS
