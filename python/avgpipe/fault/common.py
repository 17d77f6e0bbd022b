"""What one pipeline computes for all of them, such as an evaluation or a file that is written."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_KNOWN = 1000  # results that are kept


class CommonResults:
    """Has one group of processes compute each result that all request, and passes it on.

    A result has a name, a number, and the step that follows it; for pipelines that join later it is found by
    the number of batches before it.
    """

    def __init__(self) -> None:
        self._once: dict[tuple[str, int, int], _Once] = {}
        self._found: dict[tuple[str, int, int], Any] = {}
        self._found_at = float("-inf")  # on the monotonic clock

    @property
    def computed_at(self) -> float:
        """When the newest result was there, on the monotonic clock; infinity while one is being computed."""
        is_computing = any(once.is_under_way for once in self._once.values())
        return float("inf") if is_computing else self._found_at

    def ask(
        self, group: int, what: str, number: int, turn: int, batches: int, reply: Callable[[Any], None]
    ) -> None:
        once = self._once.setdefault((what, number, turn), _Once(turn, batches))
        once.ask(group, reply)
        while len(self._once) > _KNOWN:  # drop the oldest, whose results all have received long ago
            del self._once[next(iter(self._once))]

    def choose(self, is_near: Callable[[int], bool], may_ask_near: Callable[[int], bool]) -> None:
        """Choose a group to compute each requested result; a near one, if one of them will request it.

        ``may_ask_near``: whether one of these may still request a result that is needed before a step.
        """
        for once in self._once.values():
            if once.is_awaited:
                once.choose(is_near if may_ask_near(once.turn) else lambda group: True)

    def done(self, what: str, number: int, turn: int, value: Any) -> None:
        once = self._once[what, number, turn]
        once.done(value)
        # A pipeline that joins later does not know the batches before the first step of a resumed run.
        self._note_found((what, number, once.batches if turn else 0), value)
        self._found_at = time.monotonic()

    def found(self, what: str, number: int, batches: int) -> list[Any]:
        """Return the result from after ``batches`` batches in a list; empty if it is not known."""
        name = what, number, batches
        return [self._found[name]] if name in self._found else []

    def _note_found(self, name: tuple[str, int, int], value: Any) -> None:
        """Keep a result for pipelines that join later; one from before the first batch is kept for ever."""
        self._found[name] = value
        if len(self._found) > _KNOWN:
            oldest = next((known for known in self._found if known[-1] > 0), name)
            del self._found[oldest]

    def gone(self, group: int) -> None:
        for once in self._once.values():
            once.gone(group)


class _Once:
    """A result that one pipeline computes for all.

    Args:
        turn: the step that follows.
        batches: the number of the loader's batches before it.
    """

    def __init__(self, turn: int, batches: int) -> None:
        self.turn, self.batches = turn, batches
        self._doer: int | None = None  # the number of a group
        self._value: list[Any] = []
        self._waiting: list[tuple[int, Callable[[Any], None]]] = []

    @property
    def is_under_way(self) -> bool:
        """Whether a group is computing it."""
        return self._doer is not None and not self._value

    @property
    def is_awaited(self) -> bool:
        """Whether a process waits for it, and no group is computing it."""
        return bool(self._waiting) and self._doer is None

    def ask(self, group: int, reply: Callable[[Any], None]) -> None:
        """Answer a process of a group: with the value, with the order to compute it, or later."""
        if self._value:
            reply({"value": self._value[0]})
        elif self._doer == group:
            reply({})
        else:
            self._waiting.append((group, reply))

    def choose(self, may: Callable[[int], bool]) -> None:
        """Have one of the waiting groups compute it, one that may; the others go on waiting."""
        self._doer = next((group for group, _ in self._waiting if may(group)), None)
        waiting, self._waiting = self._waiting, []
        for asked in waiting:
            self.ask(*asked)

    def done(self, value: Any) -> None:
        self._value = [value]
        for _, reply in self._waiting:
            reply({"value": value})
        self._waiting = []

    def gone(self, group: int) -> None:
        """Forget a group; another one has to compute the result if this one was at it."""
        self._waiting = [waiting for waiting in self._waiting if waiting[0] != group]
        if self._doer == group and not self._value:
            self._doer = None
