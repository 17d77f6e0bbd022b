"""Schedules that split the backward into I, which the stage before waits for, and W, which fills the bubbles."""

from __future__ import annotations

from collections import Counter

from avgpipe.schedule.action import Action
from avgpipe.schedule.order import Cell, split
from avgpipe.schedule.schedule import Schedule


def zero_bubble_h1(name: str, stages: int, micro_batches: int) -> Schedule:
    """1F1B in the memory of its first stage: K micro-batches in flight on every stage (Qi et al. 2024, section 2.2.1).

    Stage k needs only K-k of them for 1F1B; the other k are micro-batches whose W is put off until k more I have run.
    """
    columns = tuple(_h1_column(stages - k, k, micro_batches) for k in range(stages))
    return Schedule(name, micro_batches, columns)


def _h1_column(warm_up: int, delay: int, micro_batches: int) -> tuple[Action, ...]:
    actions = [Action("F", m) for m in range(min(warm_up, micro_batches))]
    for m in range(micro_batches):
        actions.append(Action("I", m))
        if m >= delay:
            actions.append(Action("W", m - delay))
        if warm_up + m < micro_batches:
            actions.append(Action("F", warm_up + m))
    actions += [Action("W", m) for m in range(max(0, micro_batches - delay), micro_batches)]
    return (*actions, Action("U"))


def zero_bubble_v(name: str, stages: int, micro_batches: int) -> Schedule:
    """W workers in a V: worker w has the stages w and 2W-1-w (ZB-V of Qi et al., NeurIPS 2024, "Pipeline
    Parallelism with Controllable Memory").

    At most 2W activations are held by a worker, of stages half as large as with one per worker: as much as by the first
    stage of 1F1B.
    """
    workers = stages // 2
    columns, order = split([_v_row(w, workers, micro_batches) for w in range(workers)], stages)
    return Schedule(name, micro_batches, columns, order=order)


def _v_row(worker: int, workers: int, micro_batches: int) -> list[Cell]:
    """The phases, each some cells repeated; the n-th time of a cell is of micro-batch n.

    The first phases fill the pipeline. With less than 2W-1 micro-batches they have too many cells: those of
    micro-batches that there are not are left out, which nothing waits for.
    """
    down, up = worker, 2 * workers - 1 - worker
    steady = max(0, micro_batches - workers)
    phases = [
        (2 * (workers - worker) - 1, [(down, "F")]),
        (worker, [(up, "F"), (down, "F")]),
        (workers - worker, [(up, "F"), (up, "I"), (up, "W")]),
        (steady, [(down, "F"), (down, "I"), (down, "W"), (up, "F"), (up, "I"), (up, "W")]),
        (worker, [(down, "I"), (up, "I")]),
        (workers - worker, [(down, "I"), (down, "W")]),
        (worker, [(up, "W")]),
        (worker, [(down, "W")]),
    ]
    times: Counter[tuple[int, str]] = Counter()
    row = []
    for repeats, cells in phases:
        for stage, kind in cells * repeats:
            m = times[stage, kind]
            times[stage, kind] += 1
            if m < micro_batches:
                row.append(Cell(stage, Action(kind, m)))
    return [*row, Cell(down, Action("U")), Cell(up, Action("U"))]
