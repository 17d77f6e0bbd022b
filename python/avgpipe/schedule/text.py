"""Schedules as text: CSV, a line per worker and a cell per action, and a grid over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from avgpipe.errors import ScheduleError
from avgpipe.schedule.checks import Fault
from avgpipe.schedule.row import Action


def read_csv(text: str) -> list[list[Action]]:
    """The actions of each row; those of row r are of stage r, unless the first cell has its stage in front.

    Raises ScheduleError naming row and cell, counted from 1 as in a spreadsheet.
    """
    if not isinstance(text, str):
        raise TypeError(
            f"the CSV text is of type {type(text).__name__}: pass a str, as Schedule.to_csv returns"
        )
    lines = text.removeprefix("\ufeff").rstrip(", \t\r\n").splitlines()
    if not lines:
        raise ScheduleError("the CSV text is empty: write one row of actions per stage, as F0,B0,U")
    names_stages = any(token[0].isdigit() for _, token in list(_tokens(lines[0]))[:1])
    rows = [_row(r, line, names_stages) for r, line in enumerate(lines)]
    stages = {action.stage for row in rows for action in row}
    missing = next(k for k in range(len(stages) + 1) if k not in stages)
    if missing < len(stages):
        raise ScheduleError(
            f"no cell is of stage {missing}, but some are of stage {max(stages)}: number from 0"
        )
    return rows


def _tokens(line: str) -> Iterator[tuple[int, str]]:
    """The cells of a line that are not blank, and their numbers."""
    for number, cell in enumerate(line.split(","), start=1):
        if token := cell.strip().strip('"').strip():
            yield number, token


def _row(r: int, line: str, names_stages: bool) -> list[Action]:
    name = f"row {r + 1} ({'worker' if names_stages else 'stage'} {r})"
    row = []
    for number, token in _tokens(line):
        try:
            action = Action.parse(token)
            if (action.stage >= 0) != names_stages:
                fault = (
                    "no stage in front, as others have"
                    if names_stages
                    else "a stage in front, as no other has"
                )
                raise ValueError(f"{token!r} has {fault}: write 2F3 for F3 of stage 2")
        except ValueError as error:
            raise ScheduleError(f"{name}, cell {number}: {error}") from None
        row.append(action if names_stages else action._replace(stage=r))
    if not row:
        wanted = "worker, as 0F0,0B0,0U" if names_stages else "stage, as F0,B0,U"
        raise ScheduleError(f"{name} has no actions: write one row per {wanted}")
    return row


def draw_grid(
    name: str, cells: Sequence[Sequence[str]], slots: Sequence[Sequence[int]], fault: Fault | None
) -> list[str]:
    """One line per row with a cell per time slot, aligned; the faulty cell in [brackets].

    ``name``: what rows are. ``slots``: of each cell that a dry run got to; the others follow one another.
    """
    lines: list[list[str]] = []
    for row, own in zip(cells, slots):
        line: list[str] = []
        for position, cell in enumerate(row):
            if position < len(own):  # the dry run got there: leave the slots blank in which the worker waited
                line += ["."] * (own[position] - len(line))
            line.append(cell)
        lines.append(line)
    if fault is not None:
        line = lines[fault.row]
        if fault.position == len(cells[fault.row]):
            line.append(f"[{fault.token}?]")
        else:
            place = [index for index, cell in enumerate(line) if cell != "."][fault.position]
            line[place] = f"[{line[place]}]"
    width = max((len(cell) for line in lines for cell in line), default=1)
    digits = len(str(len(lines) - 1))
    return [
        f"{name} {r:>{digits}} | {' '.join(cell.ljust(width) for cell in line)}".rstrip()
        for r, line in enumerate(lines)
    ]
