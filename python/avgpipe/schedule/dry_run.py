"""Runs a schedule on paper: every action takes one slot of time, every transfer none."""

from __future__ import annotations

from typing import NamedTuple

from avgpipe.schedule.action import Action
from avgpipe.schedule.order import Rows


class DryRun(NamedTuple):
    """The slots in which actions start, per row; a row that got stuck has fewer slots than cells."""

    slots: list[list[int]]

    def stuck(self, rows: Rows) -> list[int]:
        """The rows that did not reach their end."""
        return [r for r, cells in enumerate(rows.cells) if len(self.slots[r]) < len(cells)]


def input_of(action: Action, stage: int, stages: int) -> tuple[int, str] | None:
    """The stage and kind, F or B, of the action of the same micro-batch that this one waits for.

    None if everything that the action needs is the stage's own. B stands for I too: both send the gradient.
    """
    if action.kind == "F" and stage > 0:
        return stage - 1, "F"
    if action.kind in ("B", "I") and stage < stages - 1:
        return stage + 1, "B"
    return None


def dry_run(rows: Rows) -> DryRun:
    """Run each row in order, each action in the first slot that has its input, until all end or wait."""
    slots: list[list[int]] = [[] for _ in rows.cells]
    ends: dict[tuple[int, str, int | None], int] = {}  # (stage, F or B, micro-batch) -> first slot after it

    def advance(r: int) -> bool:
        """Start what row r can start now; False if that is nothing."""
        before = len(slots[r])
        for k, action in rows.cells[r][before:]:
            source = input_of(action, k, rows.stages)
            ready = 0 if source is None else ends.get((*source, action.micro_batch))
            if ready is None:
                break
            slot = max(ready, slots[r][-1] + 1 if slots[r] else 0)
            slots[r].append(slot)
            ends[k, "B" if action.kind == "I" else action.kind, action.micro_batch] = slot + 1
        return len(slots[r]) > before

    moved = True
    while moved:
        moved = sum([advance(r) for r in range(len(slots))]) > 0
    return DryRun(slots)
