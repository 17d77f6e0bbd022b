"""One worker of K: the order of its actions, and when its neighbours' messages arrive.

The neighbours are workers like this one, each with a device of its own. So the batch of a stage k begins again when the
flush has gone up to the first stage and its first activation down again, k forwards and k backwards later, and a
gradient arrives (K - 1 - k) forwards and backwards after its activation has left. Neighbours work on several
micro-batches at once, and do one after another: messages follow each other at the pace of the slowest of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Act(NamedTuple):
    """kind: "F" or "B"."""

    kind: str
    micro_batch: int


class Arrivals(NamedTuple):
    """When messages arrive: ``latency_s`` after their cause, and ``pace_s`` after the one before at the earliest."""

    latency_s: float
    pace_s: float

    def times(self, causes: list[float]) -> list[float]:
        """Return the arrival of each message, given the time of its cause, in order."""
        found: list[float] = []
        for cause in causes:
            found.append(max(cause + self.latency_s, found[-1] + self.pace_s if found else 0.0))
        return found


@dataclass(frozen=True)
class Worker:
    """A worker of a pipeline of equal stages.

    Attributes:
        stages: K.
        stage: k, from 0.
        micro_batches: M.
        advance: Forwards that may run ahead of 1F1B's.
        forward_s: Of a stage and micro-batch.
        backward_s: Likewise.
        message_s: Of an activation, or its gradient, on its way to a neighbour.
    """

    stages: int
    stage: int
    micro_batches: int
    advance: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    message_s: float = 0.0

    @property
    def row(self) -> list[Act]:
        """The actions of a batch: a warm-up of forwards, then a backward and a forward in turn."""
        warm = min(self.micro_batches, self.stages - self.stage + self.advance)
        made = [Act("F", m) for m in range(warm)]
        for m in range(self.micro_batches):
            made.append(Act("B", m))
            if warm + m < self.micro_batches:
                made.append(Act("F", warm + m))
        return made

    @property
    def inputs(self) -> Arrivals | None:
        """Of activations, after the batch before has ended here; None on the first stage."""
        if self.stage == 0:
            return None
        return Arrivals(self.stage * self._hop_s, max(self.forward_s, self.message_s))

    @property
    def gradients(self) -> Arrivals | None:
        """Of gradients, after their micro-batch's forward has ended here; None on the last stage."""
        after = self.stages - 1 - self.stage
        pace = max(self.forward_s + self.backward_s, self.message_s)
        return Arrivals(after * self._hop_s, pace) if after else None

    @property
    def _hop_s(self) -> float:
        return self.forward_s + self.backward_s + 2 * self.message_s

    def batch_s(self) -> float:
        """Return the seconds of a batch of one lane, without its step: what the rules above come to."""
        now = 0.0
        inputs = self.inputs.times([0.0] * self.micro_batches) if self.inputs else None
        left: list[float] = []
        for kind, m in self.row:
            if kind == "F":
                now = max(now, inputs[m] if inputs else 0.0) + self.forward_s
                left.append(now)
            else:
                arrived = self.gradients.times(left)[m] if self.gradients else 0.0
                now = max(now, arrived) + self.backward_s
        return now
