"""The hosts of several ranks in one process: rank k drives device k, and one host runs at a time.

A host is a thread. It runs until it waits, for its device or for a message, or until the seed lets another one go
first between two steps. So the order of all hosts is a function of the seed, as that of a device is. Where all hosts
wait, and no device can do anything, nothing will ever happen again: every wait then ends with an error that says which
kernels spin, and for whom.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tests.patience import limit
from tests.simulated_device import load

T = TypeVar("T")

_LIMIT_S = 120  # for a host to give way: a bug of these tests
_ASKS = 8  # times that a host may find nothing to do, as an event may say some times that it has not happened
_SWITCHES = 0.3  # of the times that a host may let another one go first
_CHANGES = 0.05  # of the turns after which another host is the slow one


class Deadlock(RuntimeError):
    """All hosts wait, and no device can run anything."""


class Hosts:
    """Threads that take turns. ``seed``: of the turns."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.native = load()
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._alive = set(range(count))
        self._turn = self._slow = 0
        self._happened = 0  # what hosts do for each other
        # What had happened when a host found nothing to do, and how often it has found nothing since.
        self._stuck: dict[int, tuple[int, int]] = {}
        self.deadlock: str | None = None
        self._is_free = False  # whether hosts run at once

    def run(self, hosts: Sequence[Callable[[], T]]) -> list[T]:
        """Results of all hosts; what the first one to fail has raised. A deadlock is raised for all."""
        results: list[Any] = [None] * len(hosts)
        failures: list[BaseException] = []

        def live(rank: int) -> None:
            try:
                self._await_turn(rank)
                results[rank] = hosts[rank]()
            except BaseException as error:
                failures.append(error)
            finally:
                self._end(rank)

        threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(len(hosts))]
        self.native.give_way_by(self.give_way)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(limit(_LIMIT_S))
                assert not thread.is_alive(), "a host does not end"
        finally:
            self.native.give_way_by(None)
        if self.deadlock is not None:
            raise Deadlock(self.deadlock) from (failures[0] if failures else None)
        if failures:
            raise failures[0]
        return results

    def happen(self) -> None:
        """Note that a host did something that another one may wait for."""
        with self._changed:
            self._happened += 1

    def give_way(self, rank: int) -> bool:
        """Let others run, as this host has nothing to do; False if nobody has, and never will."""
        with self._changed:
            if self._is_free:
                self._changed.wait(0.001)
                return self.deadlock is None
            now = self._happened + self.native.progress()
            before, asks = self._stuck.get(rank, (-1, 0))
            self._stuck[rank] = now, asks + 1 if before == now else 1
            stuck = [self._stuck.get(other, (-1, 0)) for other in self._alive]
            if all(at == now and asks >= _ASKS for at, asks in stuck) and not self.native.run_some():
                self.deadlock = self.deadlock or str(self.native.stuck())
                self._is_free = True
                self._changed.notify_all()
            if not self._is_free:
                self._pass_on(rank, {other for other in self._alive if other != rank} or {rank})
            return self.deadlock is None

    def may_switch(self, rank: int) -> None:
        """Between two steps of a host: the seed says whether another one goes on first."""
        with self._changed:
            if not self._is_free and self._random.random() < _SWITCHES:
                self._pass_on(rank, set(self._alive))

    def wait_until(self, rank: int, arrived: Callable[[], bool]) -> None:
        while not arrived():
            if not self.give_way(rank):
                raise Deadlock(self.deadlock)

    def set_free(self) -> None:
        """From now on hosts run at once, as where they end."""
        with self._changed:
            self._is_free = True
            self._changed.notify_all()

    def _pass_on(self, rank: int, to: set[int]) -> None:
        """Let one of ``to`` go on: for some time not the slow one, unless nobody else has anything to do."""
        if self._random.random() < _CHANGES:
            self._slow = self._random.choice(sorted(self._alive))
        now = self._happened + self.native.progress()
        busy = {other for other in to if self._stuck.get(other, (-1, 0))[0] != now}
        fast = (busy or to) - {self._slow}
        self._turn = self._random.choice(sorted(fast or to))
        self._changed.notify_all()
        self._await(rank)

    def _await_turn(self, rank: int) -> None:
        with self._changed:
            self._await(rank)

    def _await(self, rank: int) -> None:
        assert self._changed.wait_for(lambda: self._turn == rank or self._is_free, limit(_LIMIT_S))

    def _end(self, rank: int) -> None:
        with self._changed:
            self._alive.discard(rank)
            self._happened += 1
            if self._turn == rank and self._alive:
                self._turn = self._random.choice(sorted(self._alive))
            self._changed.notify_all()
