"""Runs a schedule on paper: discrete events on integer times, so equal times are equal and every run is the same.

A device runs one action at a time, or several where ``Costs.concurrency_gain`` says so. Of the actions whose inputs are
there it takes backwards and updates before forwards, then the oldest batch, as the runtime's scheduler does, then the
first in the schedule's order; with a single pipeline the oldest batch and the order alone decide. Transfers occupy
links, never devices. The work is done by csrc/simulate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from avgpipe.planning.native import RECORD, Answer, Question, address, simulate
from avgpipe.planning.program import Program

_MOST_BATCHES = 2**30


@dataclass(frozen=True)
class Outcome:
    """Times in ticks. busy: per worker, while at least one action ran. batch_end: of each batch, its last action's.

    peak_in_flight: per stage, of all pipelines. peak_held_bytes: per worker, the micro-batches in flight on its stages.
    records: the actions, by their starts (dtype ``native.RECORD``); None if they were not asked for. actions: how many
    there were.
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

    Raises as ``native.simulate`` does, and ValueError for more than 2^30 batches.
    """
    if max(batches, pipelines) > _MOST_BATCHES:
        raise ValueError(f"batches={batches}, pipelines={pipelines}: must be at most {_MOST_BATCHES}")
    numbers = program.numbers
    busy = np.empty(numbers["workers"], dtype=np.int64)
    batch_end = np.empty(batches, dtype=np.int64)
    peak_in_flight = np.empty(numbers["stages"], dtype=np.int64)
    peak_held_bytes = np.empty(numbers["workers"], dtype=np.float64)
    records = np.empty(program.steps * batches if events else 0, dtype=RECORD)
    answer = Answer(
        busy=address(busy),
        batch_end=address(batch_end),
        peak_in_flight=address(peak_in_flight),
        peak_held_bytes=address(peak_held_bytes),
        records=address(records) if events else None,
    )
    simulate(Question(pipelines=pipelines, batches=batches, **program.fields()), answer)
    if events:
        # Stable: what took no time stays before what began after it on the same device.
        records = records[np.argsort(records["start"], kind="stable")]
    return Outcome(
        int(answer.makespan),
        busy,
        batch_end,
        peak_in_flight,
        peak_held_bytes,
        int(answer.count),
        records if events else None,
    )
