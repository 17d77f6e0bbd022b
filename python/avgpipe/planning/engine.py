"""Runs a schedule on paper: discrete events on integer times, so equal times are equal and every run is the same.

A device runs one action at a time, or several where ``Costs.concurrency_gain`` says so. Of the actions whose inputs are
there it takes backwards and updates before forwards, then the oldest batch, as the runtime's scheduler does, then the
first in the schedule's order; with a single pipeline the oldest batch and the order alone decide. Transfers occupy
links, never devices. The work is done by csrc/simulate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from avgpipe.planning.native import engine, too_long
from avgpipe.planning.program import Program

_MOST_BATCHES = 2**30


@dataclass(frozen=True)
class Outcome:
    """Times in ticks. busy: per worker, while at least one action ran. batch_end: of each batch, its last action's.

    peak_in_flight: per stage, of all pipelines. peak_held_bytes: per worker, the micro-batches in flight on its stages.
    actions: how many there were. records: the actions, by their starts (the fields of Record in
    csrc/simulate/question.h); None if they were not asked for.
    """

    makespan: int
    busy: NDArray[np.int64]
    batch_end: NDArray[np.int64]
    peak_in_flight: NDArray[np.int64]
    peak_held_bytes: NDArray[np.float64]
    actions: int
    records: NDArray[Any] | None = None


def run(program: Program, pipelines: int, batches: int, *, events: bool = False) -> Outcome:
    """Run ``batches`` batches, batch j on pipeline j % pipelines; ``events``: keep a record of each action.

    Gives up the GIL meanwhile. Raises ImportError where the library is not built, ValueError for a schedule that gets
    stuck, for times that are too long to count and for more than 2^30 batches, MemoryError.
    """
    if max(batches, pipelines) > _MOST_BATCHES:
        raise ValueError(f"batches={batches}, pipelines={pipelines}: must be at most {_MOST_BATCHES}")
    try:
        answer = engine().simulate(
            **program.numbers, **program.arrays, pipelines=pipelines, batches=batches, events=events
        )
    except OverflowError:
        raise too_long() from None
    outcome = Outcome(*answer)
    if outcome.records is None:
        return outcome
    # Stable: what took no time stays before what began after it on the same device.
    return replace(outcome, records=outcome.records[np.argsort(outcome.records["start"], kind="stable")])
