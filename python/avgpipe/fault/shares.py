"""The parts of batches that isolated pipelines train on, and what each part counts in the reference.

A sample moves the reference as in a run that loses no pipeline, whoever trains on it, and when::

    z' = z + (1/n) sum of u_i        over the pipelines that count in the step, each with its update u_i

    batches that all share      n is the number of pipelines that the step was shared out to, and the gradient
                                of each share is multiplied by n
    a batch for each pipeline   n is the plan's number of pipelines, however many there are

Micro-batches keep the weight that they have in the loss of their whole batch: a share that is trained on once
more, in a step of its own, makes up what was missing from the first one. With periods of several steps n is
that of the period's first step, and an update counts once the period's last step is published.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from avgpipe.device import ReadyOnEvent
from avgpipe.fault.roster import Term
from avgpipe.model.batch import LossWeights, share_out


@dataclass(frozen=True)
class FeedPart:
    """Micro-batches of the loader's batch number ``batch``.

    Attributes:
        first: the number of the first micro-batch in that batch.
        sizes: of the micro-batches, in samples.
        weights: of the micro-batches in the loss of the whole batch.
        mark: a checksum of the beginning of the batch, by which a loader that draws differently is found.
        copied: see :class:`avgpipe.runtime.compute.Work`.
        is_shared: whether all pipelines share the batch, whatever the plan's ``batch``.
    """

    batch: int
    first: int
    inputs: list[Any]
    targets: list[Any]
    sizes: list[int]
    weights: LossWeights
    mark: int
    copied: ReadyOnEvent | None
    is_shared: bool

    @property
    def samples(self) -> int:
        return sum(self.sizes)

    @property
    def place(self) -> list[int]:
        """What identifies this part to the other pipelines."""
        return [self.batch, self.first, len(self.sizes), self.mark]

    def shares(self, counts: Sequence[int]) -> list[FeedPart]:
        """Cut into parts with these numbers of micro-batches."""
        found, first = [], 0
        for size in counts:
            of = slice(first, first + size)
            lists = {n: getattr(self, n)[of] for n in ("inputs", "targets", "sizes")}
            weights = replace(self.weights, factors=self.weights.factors[of])
            found.append(replace(self, first=self.first + first, weights=weights, **lists))
            first += size
        return found

    def weigh(self, divisor: int, is_sum: bool) -> LossWeights:
        """Return the weights to train with, where the updates of all are divided by ``divisor``."""
        if not self.is_shared:
            return self.weights
        (own,) = share_out(self.weights, [len(self.sizes)], is_sum)
        return replace(own, shares=divisor)


class Unfinished:
    """The parts of the steps whose updates the reference does not have yet.

    Args:
        period: the number of steps from one published update to the next.
    """

    def __init__(self, period: int) -> None:
        self._period = period
        self._parts: dict[tuple[int, int], FeedPart] = {}  # by step and pipeline
        self._missing: set[tuple[int, int]] = set()  # of ended steps, in which the pipeline did not count

    def begin(self, turn: int, parts: Mapping[int, FeedPart]) -> None:
        self._parts |= {(turn, i): part for i, part in parts.items()}

    def of(self, turn: int) -> dict[int, FeedPart]:
        """Return the parts of a step that has not ended, by pipeline."""
        return {i: part for (number, i), part in self._parts.items() if number == turn}

    def end(self, turn: int, counting: Collection[int]) -> None:
        """Note which pipelines count in a step, which has ended."""
        for i, part in self.of(turn).items():
            if i not in counting and part.sizes:
                self._missing.add((turn, i))
        if (turn + 1) % self._period == 0:
            steps = range(turn + 1 - self._period, turn + 1)
            self._parts = {
                place: part
                for place, part in self._parts.items()
                if place[0] not in steps or place[1] not in counting
            }

    @property
    def are_missing(self) -> bool:
        """Whether the part of a pipeline that did not count in an ended step was not taken."""
        return bool(self._missing)

    def take(self, term: Term) -> list[FeedPart]:
        """Remove and return what the reference does not get from a term, which has ended."""
        first = term.published // self._period * self._period
        places = [(turn, term.pipeline) for turn in range(first, term.end)]
        self._missing.difference_update(places)
        found = [self._parts.pop(place) for place in places if place in self._parts]
        return [part for part in found if part.sizes]
