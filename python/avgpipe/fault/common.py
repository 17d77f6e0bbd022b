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
        self._found_at = float("-inf")  # on the monotonic clock

    @property
    def computed_at(self) -> float:
        """When the newest result was there, on the monotonic clock; infinity while one is being computed."""
        is_computing = any(once.is_under_way for once in self._once.values())
        return float("inf") if is_computing else self._found_at

    def ask(
        self, group: int, what: str, number: int, turn: int, batches: int, reply: Callable[[Any], None]
    ) -> None:
        # A pipeline that joins later does not know the batches before the first step of a resumed run.
        once = self._once.setdefault((what, number, turn), _Once(turn, batches if turn else 0))
        once.ask(group, reply)
        # Drop the oldest, which all have received; the last, one from before the first batch.
        if len(self._once) > _KNOWN:
            known = (name for name, old in self._once.items() if old.batches and old.reply)
            del self._once[next(known, next(iter(self._once)))]

    def choose(self, is_near: Callable[[int], bool], may_ask_near: Callable[[int], bool]) -> None:
        """Choose a group to compute each requested result; a near one, if one of them will request it.

        ``may_ask_near``: whether one of these may still request a result that is needed before a step.
        """
        for once in self._once.values():
            if once.is_awaited:
                once.choose(is_near if may_ask_near(once.turn) else lambda group: True)

    def done(self, what: str, number: int, turn: int, value: Any) -> None:
        self._once[what, number, turn].done(value)
        self._found_at = time.monotonic()

    def found(self, what: str, number: int, batches: int, is_newest: bool) -> dict[str, Any]:
        """Return the reply with the result from after ``batches`` batches; empty if it is not known.

        ``is_newest``: or else with the newest one from before.
        """
        of_name = [one for name, one in self._once.items() if name[:2] == (what, number) and one.reply]
        before = [one for one in of_name if one.batches == batches or (is_newest and one.batches < batches)]
        return max(before, key=lambda one: (one.batches, one.turn)).reply if before else {}

    def gone(self, group: int) -> None:
        for once in self._once.values():
            once.gone(group)


class _Once:
    """A result that one pipeline computes for all.

    Args:
        turn: the step that follows.
        batches: the number of the loader's batches before it, as pipelines that join later count them.

    Attributes:
        reply: with the value; empty before it is known.
    """

    def __init__(self, turn: int, batches: int) -> None:
        self.turn, self.batches = turn, batches
        self._doer: int | None = None  # the number of a group
        self.reply: dict[str, Any] = {}
        self._waiting: list[tuple[int, Callable[[Any], None]]] = []

    @property
    def is_under_way(self) -> bool:
        """Whether a group is computing it."""
        return self._doer is not None and not self.reply

    @property
    def is_awaited(self) -> bool:
        """Whether a process waits for it, and no group is computing it."""
        return bool(self._waiting) and self._doer is None

    def ask(self, group: int, reply: Callable[[Any], None]) -> None:
        """Answer a process of a group: with the value, with the order to compute it, or later."""
        if self.reply:
            reply(self.reply)
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
        self.reply = {"value": value}
        for _, reply in self._waiting:
            reply(self.reply)
        self._waiting = []

    def gone(self, group: int) -> None:
        """Forget a group; another one has to compute the result if this one was at it."""
        self._waiting = [waiting for waiting in self._waiting if waiting[0] != group]
        if self._doer == group and not self.reply:
            self._doer = None
