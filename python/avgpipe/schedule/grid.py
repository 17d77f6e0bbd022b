"""Draws a schedule as text."""

from __future__ import annotations

from collections.abc import Sequence

from avgpipe.schedule.action import Action
from avgpipe.schedule.dry_run import Columns, dry_run
from avgpipe.schedule.validation import Fault


def draw_grid(columns: Columns, fault: Fault | None) -> list[str]:
    """One line per stage with a cell per time slot of the dry run, aligned; the faulty cell in [brackets]."""
    rows = [_row(column, slots) for column, slots in zip(columns, dry_run(columns).slots)]
    if fault is not None:
        _mark(rows[fault.stage], fault, len(columns[fault.stage]))
    width = max(len(cell) for row in rows for cell in row) if any(rows) else 1
    label = len(str(len(columns) - 1))
    return [
        f"stage {k:>{label}} | {' '.join(f'{cell:<{width}}' for cell in row)}".rstrip()
        for k, row in enumerate(rows)
    ]


def _row(column: Sequence[Action], slots: list[int]) -> list[str]:
    row: list[str] = []
    for position, action in enumerate(column):
        if position < len(slots):  # the dry run got there: leave the slots blank in which the stage waited
            row += ["."] * (slots[position] - len(row))
        row.append(str(action))
    return row


def _mark(row: list[str], fault: Fault, length: int) -> None:
    if fault.position == length:
        row.append(f"[{fault.action}?]")
        return
    cells = [index for index, cell in enumerate(row) if cell != "."]
    row[cells[fault.position]] = f"[{row[cells[fault.position]]}]"
