"""Schedules as CSV text: a line per worker, a cell per action."""

from __future__ import annotations

import re
from collections.abc import Iterator

from avgpipe.errors import ScheduleError
from avgpipe.schedule.action import Action
from avgpipe.schedule.order import Cell, Rows

NO_FLUSH = "no flush"  # the first line, where there is none

_STAGE = re.compile(r"(0|[1-9][0-9]{0,8})(.*)", re.DOTALL)


def write_csv(rows: Rows, flush: bool) -> str:
    """One line per row, one token per cell; above them "no flush" if so. :func:`read_csv` inverts it."""
    lines = [] if flush else [NO_FLUSH]
    lines += [",".join(rows.token(cell) for cell in cells) for cells in rows.cells]
    return "".join(f"{line}\n" for line in lines)


def read_csv(text: str) -> tuple[Rows, bool]:
    """The rows, and whether there is a flush; rows are ordered if the first cell has its stage in front.

    Raises ScheduleError naming row and cell, counted from 1 as in a spreadsheet.
    """
    if not isinstance(text, str):
        raise TypeError(
            f"the CSV text is of type {type(text).__name__}: pass a str, as Schedule.to_csv returns"
        )
    lines = text.removeprefix("\ufeff").rstrip(", \t\r\n").splitlines()
    flush = not lines or _token(lines[0].rstrip(", \t")) != NO_FLUSH
    numbered = list(enumerate(lines, start=1))[0 if flush else 1 :]
    if not numbered:
        raise ScheduleError("the CSV text is empty: write one row of actions per stage, as F0,B0,U")
    first = next((token for _, token in _tokens(numbered[0][1])), "")
    ordered = _STAGE.fullmatch(first) is not None
    cells = [
        _row(f"row {row} ({'worker' if ordered else 'stage'} {r})", line, None if ordered else r)
        for r, (row, line) in enumerate(numbered)
    ]
    stages = {cell.stage for row in cells for cell in row}
    missing = next(k for k in range(len(stages) + 1) if k not in stages)
    if missing < len(stages):
        raise ScheduleError(
            f"no cell is of stage {missing}, but some are of stage {max(stages)}: number from 0"
        )
    return Rows(len(stages), cells, ordered), flush


def _token(cell: str) -> str:
    return cell.strip().strip('"').strip()


def _tokens(line: str) -> Iterator[tuple[int, str]]:
    """The cells of a line that are not blank, and their numbers."""
    for number, cell in enumerate(line.split(","), start=1):
        if token := _token(cell):
            yield number, token


def _row(name: str, line: str, stage: int | None) -> list[Cell]:
    """``stage``: of all cells; None if each cell names its own."""
    cells = []
    for number, token in _tokens(line):
        try:
            cells.append(Cell(stage, Action.parse(token)) if stage is not None else _cell(token))
        except ValueError as error:
            raise ScheduleError(f"{name}, cell {number}: {error}") from None
    if not cells:
        wanted = "stage, as F0,B0,U" if stage is not None else "worker, as 0F0,0B0,0U"
        raise ScheduleError(f"{name} has no actions: write one row per {wanted}")
    return cells


def _cell(token: str) -> Cell:
    match = _STAGE.fullmatch(token)
    if match is None:
        raise ValueError(f"{token!r} has no stage in front, as other cells have: write 2F3 for F3 of stage 2")
    return Cell(int(match.group(1)), Action.parse(match.group(2)))
