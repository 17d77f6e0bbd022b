"""DAPPLE's latency of one synchronous batch (Fan et al. 2021, section 4.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from avgpipe.planning.chain import Chain
from avgpipe.planning.lean import Held
from avgpipe.planning.network import Levels, ring_s
from avgpipe.planning.placement import Taken


class Span(NamedTuple):
    """A stage, or a transfer between two, which counts as a stage of its own. Seconds of a micro-batch, and of the
    all-reduce of a batch's gradients.
    """

    forward_s: float
    backward_s: float
    reduce_s: float = 0.0


class Seat(NamedTuple):
    """Layers ``first`` to ``last`` - 1, and the devices of each machine that they are on."""

    first: int
    last: int
    taken: Taken

    @property
    def workers(self) -> int:
        return sum(self.taken)


class Machines(NamedTuple):
    """``machines`` of ``devices`` each. inside, between: the network's levels; one machine has the first alone."""

    machines: int
    devices: int
    levels: Levels

    @classmethod
    def of(cls, levels: Levels) -> Machines:
        if len(levels) > 2:
            raise ValueError(
                f"levels has {len(levels)}: dapple knows devices in a machine and machines, give one or two"
            )
        return cls(levels[1].units if len(levels) == 2 else 1, levels[0].units, levels)

    def bytes_per_s(self, taken: Taken) -> float:
        """Of the slowest link among these devices."""
        return self.levels[_machines(taken) > 1].bytes_per_s


def _machines(taken: Taken) -> int:
    return len(taken) - taken.count(0)


class Model:
    """What placed stages take, for batches of ``micro_batches``."""

    def __init__(self, chain: Chain, machines: Machines, micro_batches: int, limit: float | None) -> None:
        self.chain, self.machines, self.micro_batches, self.limit = chain, machines, micro_batches, limit
        self.held = Held(chain, micro_batches)
        self._stages: dict[Seat, Span] = {}
        self._transfers: dict[tuple[Seat, Seat], Span] = {}

    def stage(self, seat: Seat) -> Span:
        """Of m replicas each takes every m-th micro-batch; a ring over the slowest link makes the all-reduce."""
        workers = seat.workers
        weights = self.chain.parameter_bytes(seat.first, seat.last)
        return Span(
            self.chain.forward_s(seat.first, seat.last) / workers,
            self.chain.backward_s(seat.first, seat.last) / workers,
            ring_s(weights, workers, self.machines.bytes_per_s(seat.taken)),
        )

    def transfer(self, before: Seat, after: Seat) -> Span:
        """Each pair of machines, or of devices inside one, carries its share at the same time as the others."""
        union = tuple(a + b for a, b in zip(before.taken, after.taken))
        crosses = _machines(union) > 1
        lanes = min(_machines(before.taken), _machines(after.taken)) if crosses else 0
        lanes = lanes or min(before.workers, after.workers)
        size = self.chain.boundary_bytes[before.last - 1]
        seconds = self.machines.levels[crosses].link.seconds(size / lanes)
        return Span(seconds, seconds)

    def spans(self, seats: Sequence[Seat]) -> list[Span]:
        """The stages, and between them their transfers."""
        for seat in seats:
            if seat not in self._stages:
                self._stages[seat] = self.stage(seat)
        found = [self._stages[seats[0]]]
        for pair in pairwise(seats):
            if pair not in self._transfers:
                self._transfers[pair] = self.transfer(*pair)
            found += [self._transfers[pair], self._stages[pair[1]]]
        return found

    def order(self, seats: Sequence[Seat]) -> tuple[float, float]:
        """What plans are ordered by: among those that do not fit, or take the same time, what needs less is better."""
        most = max(self.bytes(seats))
        if self.limit is not None and most > self.limit:
            return math.inf, most
        return latency_s(self.spans(seats), self.micro_batches), most

    def bytes(self, seats: Sequence[Seat]) -> list[float]:
        """Of a worker of each stage."""
        found = []
        behind = 0
        for seat in reversed(seats):
            found.append(self.held.bytes(seat.first, seat.last, seat.workers, behind))
            behind += seat.workers
        return found[::-1]


def latency_s(spans: Sequence[Span], micro_batches: int) -> float:
    """T_w + T_s + T_e: until the pivot begins, while it works without a pause, and until all others are done.

    With pivot Q, T_w = sum_{s<=Q} F_s, T_s = (M - 1)(F_Q + B_Q), and T_e = max_s (AR_s + sum_{a=s..Q} B_a for
    s <= Q, AR_s - sum_{a=Q..s} B_a for s > Q).
    """
    q = pivot(spans, micro_batches)
    warm_s = sum(span.forward_s for span in spans[: q + 1])
    steady_s = (micro_batches - 1) * (spans[q].forward_s + spans[q].backward_s)
    end_s, back_s = 0.0, 0.0
    for span in reversed(spans[: q + 1]):
        back_s += span.backward_s
        end_s = max(end_s, span.reduce_s + back_s)
    gone_s = spans[q].backward_s
    for span in spans[q + 1 :]:
        gone_s += span.backward_s
        end_s = max(end_s, span.reduce_s - gone_s)
    return warm_s + steady_s + end_s


def pivot(spans: Sequence[Span], micro_batches: int) -> int:
    """The stage with the fewest bubbles: from the last on, a stage before takes over if its own steady phase is longer
    than that of the pivot and the forwards and backwards of the stages between together.
    """
    q, between_s = len(spans) - 1, 0.0
    for s in reversed(range(len(spans) - 1)):
        own_s = (micro_batches - 1) * (spans[s].forward_s + spans[s].backward_s)
        pivot_s = (micro_batches - 1) * (spans[q].forward_s + spans[q].backward_s)
        if own_s > pivot_s + between_s:
            q, between_s = s, 0.0
        else:
            between_s += spans[s].forward_s + spans[s].backward_s
    return q
