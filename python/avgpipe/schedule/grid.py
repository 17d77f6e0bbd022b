"""Draws a schedule as text."""

from __future__ import annotations

from avgpipe.schedule.dry_run import dry_run
from avgpipe.schedule.order import Rows
from avgpipe.schedule.validation import Fault


def draw_grid(rows: Rows, fault: Fault | None) -> list[str]:
    """One line per row with a cell per time slot of the dry run, aligned; the faulty cell in [brackets]."""
    lines = [
        _line([rows.token(cell) for cell in cells], slots)
        for cells, slots in zip(rows.cells, dry_run(rows).slots)
    ]
    if fault is not None:
        _mark(lines[fault.row], fault, len(rows.cells[fault.row]))
    width = max(len(cell) for line in lines for cell in line) if any(lines) else 1
    names = [rows.name(r) for r in range(len(lines))]
    label = len(names[-1])
    return [
        f"{_padded(name, label)} | {' '.join(f'{cell:<{width}}' for cell in line)}".rstrip()
        for name, line in zip(names, lines)
    ]


def _padded(name: str, width: int) -> str:
    """ "stage 3" with its number flush right."""
    word, number = name.split(" ")
    return f"{word} {number:>{width - len(word) - 1}}"


def _line(tokens: list[str], slots: list[int]) -> list[str]:
    line: list[str] = []
    for position, token in enumerate(tokens):
        if position < len(slots):  # the dry run got there: leave the slots blank in which the worker waited
            line += ["."] * (slots[position] - len(line))
        line.append(token)
    return line


def _mark(line: list[str], fault: Fault, length: int) -> None:
    if fault.position == length:
        line.append(f"[{fault.token}?]")
        return
    cells = [index for index, cell in enumerate(line) if cell != "."]
    line[cells[fault.position]] = f"[{line[cells[fault.position]]}]"
