"""Runs a schedule on paper: every action takes one slot of time, every transfer none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from avgpipe.schedule.action import Action

Columns = Sequence[Sequence[Action]]


class DryRun(NamedTuple):
    """The slots in which actions start, per stage; a stage that got stuck has fewer slots than actions."""

    slots: list[list[int]]

    def stuck(self, columns: Columns) -> list[int]:
        """The stages that did not reach the end of their column."""
        return [k for k, column in enumerate(columns) if len(self.slots[k]) < len(column)]


def input_of(action: Action, stage: int, stages: int) -> tuple[int, str] | None:
    """The stage and kind, F or B, of the action of the same micro-batch that this one waits for.

    None if everything that the action needs is the stage's own. B stands for I too: both send the gradient.
    """
    if action.kind == "F" and stage > 0:
        return stage - 1, "F"
    if action.kind in ("B", "I") and stage < stages - 1:
        return stage + 1, "B"
    return None


def dry_run(columns: Columns) -> DryRun:
    """Run each column in order, each action in the first slot that has its input, until all end or wait."""
    stages = len(columns)
    slots: list[list[int]] = [[] for _ in columns]
    ends: dict[tuple[int, str, int | None], int] = {}  # (stage, F or B, micro-batch) -> first slot after it

    def advance(k: int) -> bool:
        """Start what stage k can start now; False if that is nothing."""
        before = len(slots[k])
        while len(slots[k]) < len(columns[k]):
            action = columns[k][len(slots[k])]
            source = input_of(action, k, stages)
            ready = 0 if source is None else ends.get((*source, action.micro_batch))
            if ready is None:
                break
            slot = max(ready, slots[k][-1] + 1 if slots[k] else 0)
            slots[k].append(slot)
            ends[k, "B" if action.kind == "I" else action.kind, action.micro_batch] = slot + 1
        return len(slots[k]) > before

    moved = True
    while moved:
        moved = sum([advance(k) for k in range(stages)]) > 0
    return DryRun(slots)
