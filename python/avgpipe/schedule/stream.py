"""One backward, one forward: what a stage does with one batch, and with batches that follow without a flush."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Step(NamedTuple):
    """The forward (F) or backward (B) of a micro-batch, or a batch's update (U, micro_batch -1)."""

    kind: str
    batch: int
    micro_batch: int


class Stream:
    """The steps of one stage, in the order in which it runs them, from batches as they become known.

    The micro-batches of the batches make one sequence: ``warm_up`` forwards, then one backward, one forward, in turn
    (PipeDream: Narayanan et al. 2019, section 3.2; with several micro-batches in a batch PipeDream-2BW: Narayanan et
    al. 2021). So at most ``warm_up`` micro-batches are in flight. After the last backward of a batch comes its update.
    """

    def __init__(self, warm_up: int) -> None:
        if type(warm_up) is not int or warm_up < 1:
            raise ValueError(f"warm_up={warm_up!r}: must be an int of at least 1, K-k on stage k of K")
        self._warm_up = warm_up
        self._in_flight: deque[tuple[int, int, bool]] = (
            deque()
        )  # batch, micro-batch, whether it is the last of both

    def add(self, batch: int, micro_batches: int) -> list[Step]:
        """The steps that are certain now that ``batch`` is the next one: up to a forward of a batch still unknown."""
        if type(micro_batches) is not int or micro_batches < 1:
            raise ValueError(
                f"micro_batches={micro_batches!r} of batch {batch}: must be an int of at least 1"
            )
        steps = []
        for m in range(micro_batches):
            steps.append(Step("F", batch, m))
            self._in_flight.append((batch, m, m == micro_batches - 1))
            if len(self._in_flight) == self._warm_up:
                steps += self._backward()
        return steps

    def drain(self) -> list[Step]:
        """The backwards and updates that are left when no batch follows; a later batch begins with a new warm-up."""
        steps = []
        while self._in_flight:
            steps += self._backward()
        return steps

    def _backward(self) -> list[Step]:
        batch, m, last = self._in_flight.popleft()
        return [Step("B", batch, m), Step("U", batch, -1)] if last else [Step("B", batch, m)]
