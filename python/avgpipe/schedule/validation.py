"""Finds the first thing that makes a schedule impossible to run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from avgpipe.schedule.action import Action
from avgpipe.schedule.dry_run import dry_run, input_of
from avgpipe.schedule.order import Cell, Columns, Order, Rows
from avgpipe.schedule.stream import one_batch

_UPDATE = Action("U")


class Fault(NamedTuple):
    """A wrong cell of a schedule: its row and index there, how it is written, and what is wrong with it."""

    name: str  # of the row: "stage 2" or "worker 1"
    row: int
    position: int  # the length of the row if the cell is missing
    token: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}, position {self.position}, {self.token}: {self.reason}"


def find_order_fault(columns: Columns, order: Order) -> Fault | None:
    """The first entry of an order that is not one of its stages' actions, else the first action left out."""
    worker_of: dict[int, int] = {}
    counts = [0] * len(columns)
    for w, row in enumerate(order):
        for position, k in enumerate(row):
            if worker_of.setdefault(k, w) != w:
                reason = f"stage {k} is on worker {worker_of[k]} already, all its actions must be there"
                return Fault(f"worker {w}", w, position, str(k), reason)
            counts[k] += 1
            if counts[k] > len(columns[k]):
                reason = f"stage {k} has only {len(columns[k])} actions"
                return Fault(f"worker {w}", w, position, str(k), reason)
    for k, column in enumerate(columns):
        w = worker_of.get(k, 0)
        if k not in worker_of or counts[k] < len(column):
            token = f"{k}{column[counts[k]] if column else ''}"
            reason = "missing in the order" if k in worker_of else f"missing, no worker has stage {k}"
            return Fault(f"worker {w}", w, len(order[w]), token, reason)
    return None


def find_fault(rows: Rows, micro_batches: int, flush: bool) -> Fault | None:
    """The first wrong cell of the first row that is wrong by itself, else one of a deadlock."""
    for r in range(len(rows.cells)):
        fault = _fault_in_row(rows, r, micro_batches)
        if fault is None and not flush:
            fault = _fault_in_stream(rows, r, micro_batches)
        if fault is not None:
            return fault
    return _deadlock(rows)


def _fault_in_row(rows: Rows, r: int, micro_batches: int) -> Fault | None:
    cells = rows.cells[r]
    done: dict[int, set[Action]] = {} if rows.ordered else {r: set()}
    for position, cell in enumerate(cells):
        of_stage = done.setdefault(cell.stage, set())
        reason = _wrong(cell.action, of_stage, micro_batches)
        if reason is not None:
            return Fault(rows.name(r), r, position, rows.token(cell), reason)
        of_stage.add(cell.action)
    for k, of_stage in done.items():
        missing = _missing(of_stage, micro_batches)
        if missing is not None:
            return Fault(rows.name(r), r, len(cells), rows.token(Cell(k, missing)), "missing")
    return None


def _wrong(action: Action, done: set[Action], micro_batches: int) -> str | None:
    """Why the action cannot follow what its stage has done, or None."""
    m = action.micro_batch
    if action in done:
        return "repeated"
    if m is None:
        return None
    if m >= micro_batches:
        return f"unknown micro-batch, the schedule has {micro_batches}, counted from 0"
    if _UPDATE in done:
        return "out of order, comes after the update U, which must be last"
    if action.kind in ("B", "I") and Action("F", m) not in done:
        return f"out of order, comes before its own forward F{m}"
    if action.kind == "W" and Action("I", m) not in done:
        return f"out of order, comes before its own input gradient I{m}"
    other = {"B": "I", "I": "B"}.get(action.kind)
    if other is not None and Action(other, m) in done:
        return f"repeated, the micro-batch already has the backward {other}{m}"
    return None


def _missing(done: set[Action], micro_batches: int) -> Action | None:
    for m in range(micro_batches):
        if Action("F", m) not in done:
            return Action("F", m)
        if Action("B", m) not in done and Action("W", m) not in done:
            return Action("W" if Action("I", m) in done else "B", m)
    return None if _UPDATE in done else _UPDATE


def _fault_in_stream(rows: Rows, k: int, micro_batches: int) -> Fault | None:
    """Where a complete column is not what 1F1B without a flush does with a single batch."""
    wanted = one_batch(rows.stages - k, micro_batches)
    for position, (cell, action) in enumerate(zip(rows.cells[k], wanted)):
        if cell.action != action:
            reason = (
                f"must be {action}: without a flush stage k runs K-k forwards, then one backward, one forward"
            )
            return Fault(rows.name(k), k, position, rows.token(cell), reason)
    return None


def _deadlock(rows: Rows) -> Fault | None:
    """The deadlock of rows that are right each on its own."""
    run = dry_run(rows)
    stuck = run.stuck(rows)
    if not stuck:
        return None
    heads = {r: rows.cells[r][len(run.slots[r])] for r in stuck}
    sources = {r: _source(rows, heads[r]) for r in stuck}
    waits = [
        f"{rows.name(r)} at {rows.token(heads[r])} waits for {rows.token(cell)} of {rows.name(source)}"
        for r, (source, cell) in sources.items()
    ]
    culprit = _in_circle({r: source for r, (source, _) in sources.items()})
    reason = f"deadlock, {'; '.join(waits)}"
    return Fault(rows.name(culprit), culprit, len(run.slots[culprit]), rows.token(heads[culprit]), reason)


def _source(rows: Rows, waiting: Cell) -> tuple[int, Cell]:
    """Where a waiting cell's input comes from: the row, and the cell there."""
    source = input_of(waiting.action, waiting.stage, rows.stages)
    assert source is not None, "an action without input never waits"
    stage, kinds = source[0], ("B", "I") if source[1] == "B" else ("F",)
    return next(
        (r, cell)
        for r, cells in enumerate(rows.cells)
        for cell in cells
        if cell.stage == stage
        and cell.action.kind in kinds
        and cell.action.micro_batch == waiting.action.micro_batch
    )


def _in_circle(waits_for: dict[int, int]) -> int:
    """The first that waits, over others or not, for itself. What is stuck waits for what is stuck, so one does."""
    return next(r for r in waits_for if r in _chain(waits_for, r))


def _chain(waits_for: dict[int, int], first: int) -> Sequence[int]:
    """Whatever ``first`` waits for, directly and over others."""
    chain = [waits_for[first]]
    while waits_for[chain[-1]] not in chain:
        chain.append(waits_for[chain[-1]])
    return chain
