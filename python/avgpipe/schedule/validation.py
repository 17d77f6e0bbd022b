"""Finds the first thing that makes a schedule impossible to run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from avgpipe.schedule.action import Action
from avgpipe.schedule.dry_run import Columns, dry_run, input_of

_UPDATE = Action("U")


class Fault(NamedTuple):
    """A wrong cell of a schedule: stage, index in its column, action, and what is wrong with it."""

    stage: int
    position: int  # the length of the column if the action is missing
    action: Action
    reason: str

    def __str__(self) -> str:
        return f"stage {self.stage}, position {self.position}, {self.action}: {self.reason}"


def find_fault(columns: Columns, micro_batches: int) -> Fault | None:
    """The first wrong cell of the first column that is wrong by itself, else one of a deadlock."""
    for stage, column in enumerate(columns):
        fault = _fault_in_column(stage, column, micro_batches)
        if fault is not None:
            return fault
    return _deadlock(columns)


def _fault_in_column(stage: int, column: Sequence[Action], micro_batches: int) -> Fault | None:
    done: set[Action] = set()
    for position, action in enumerate(column):
        reason = _wrong(action, done, micro_batches)
        if reason is not None:
            return Fault(stage, position, action, reason)
        done.add(action)
    missing = _missing(done, micro_batches)
    return None if missing is None else Fault(stage, len(column), missing, "missing")


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


def _deadlock(columns: Columns) -> Fault | None:
    """The deadlock of columns that are right each on its own."""
    run = dry_run(columns)
    stuck = run.stuck(columns)
    if not stuck:
        return None
    heads = {k: columns[k][len(run.slots[k])] for k in stuck}
    sources = {k: _source(columns, k, heads[k]) for k in stuck}
    waits = [f"stage {k} at {heads[k]} waits for {sources[k][1]} of stage {sources[k][0]}" for k in stuck]
    # Stages wait only for neighbours, so among the stuck ones there are two that wait for each other.
    culprit = next(k for k in stuck if sources[sources[k][0]][0] == k)
    return Fault(culprit, len(run.slots[culprit]), heads[culprit], f"deadlock, {'; '.join(waits)}")


def _source(columns: Columns, stage: int, action: Action) -> tuple[int, Action]:
    """Where a waiting action's input comes from: the stage, and the action as its column spells it."""
    source = input_of(action, stage, len(columns))
    assert source is not None, "an action without input never waits"
    kinds = ("B", "I") if source[1] == "B" else ("F",)
    sender = next(a for a in columns[source[0]] if a.kind in kinds and a.micro_batch == action.micro_batch)
    return source[0], sender
