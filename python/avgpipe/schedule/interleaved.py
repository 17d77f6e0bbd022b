"""1F1B with several stages per worker."""

from __future__ import annotations

from avgpipe.schedule.action import Action
from avgpipe.schedule.order import Cell, split
from avgpipe.schedule.schedule import Schedule


def interleaved_1f1b(name: str, stages: int, micro_batches: int, stages_per_worker: int) -> Schedule:
    """Of W workers, w has the stages w, w+W, w+2W, ... (Narayanan et al. 2021, Megatron-LM, section 2.2).

    Groups of W micro-batches go through the worker's first stage, then through its second, and so on; backwards from
    the last stage to the first. Worker w begins with 2 (W-1-w) + (V-1) W + 1 forwards, V stages per worker, then
    alternates one backward, one forward. The published order is of whole groups: where the last one is smaller, the
    cells of the micro-batches that it lacks are left out, which nothing waits for.
    """
    workers = stages // stages_per_worker
    forwards = [
        (turn, m)
        for first in range(0, micro_batches, workers)
        for turn in range(stages_per_worker)
        for m in range(first, first + workers)
    ]
    rows = []
    for w in range(workers):
        own = list(range(w, stages, workers))
        forward = [Cell(own[turn], Action("F", m)) for turn, m in forwards]
        backward = [Cell(own[-1 - turn], Action("B", m)) for turn, m in forwards]
        warm_up = min(len(forward), 2 * (workers - 1 - w) + (stages_per_worker - 1) * workers + 1)
        row = forward[:warm_up]
        for index, cell in enumerate(backward):
            row += [cell, *forward[warm_up + index : warm_up + index + 1]]
        row += [Cell(k, Action("U")) for k in own]
        rows.append([cell for cell in row if (cell.action.micro_batch or 0) < micro_batches])
    columns, order = split(rows, stages)
    return Schedule(name, micro_batches, columns, order=order)
