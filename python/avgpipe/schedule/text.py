"""Schedules as comma-separated values: avgpipe's own form, and that of torch.distributed.pipelining."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from avgpipe.errors import ScheduleError
from avgpipe.schedule.builders import MOST_WORKERS
from avgpipe.schedule.row import COUNT, Action, Kind

if TYPE_CHECKING:
    from avgpipe.schedule.schedule import Schedule

# Tokens of torch's "compute and communication" form besides the actions. Here, the runtime sends and receives
# itself.
_TORCH_OWN = re.compile(rf"(?:{COUNT})(?:UNSHARD|RESHARD|REDUCE_GRAD|(?:SEND|RECV)_[FB](?:{COUNT}))")
_TORCH_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


# ---- avgpipe's own ---------------------------------------------------------------------------------------------------


def read_rows(text: str) -> list[list[Action]]:
    """Read the actions of each row; those of row r are of stage r, unless the first cell begins with its stage."""
    lines = _cells(text, "Schedule.to_csv", "stage, as F0,B0,U")
    names_stages = next(filter(None, lines[0]), "")[:1].isdigit()
    whose, wanted = ("worker", "worker, as 0F0,0B0,0U") if names_stages else ("stage", "stage, as F0,B0,U")

    def read(cell: str) -> list[Action]:
        action = Action.parse(cell)
        if (action.stage >= 0) != names_stages:
            fault = ("a stage in front, as no other has", "no stage in front, as others have")[names_stages]
            raise ValueError(f"{cell!r} has {fault}: write 2F3 for F3 of stage 2")
        return [action]

    rows = [_read_row(f"row {r + 1} ({whose} {r})", line, read, wanted) for r, line in enumerate(lines)]
    if not names_stages:
        return [[action._replace(stage=r) for action in row] for r, row in enumerate(rows)]
    return _checked_stages(rows)


# ---- torch's ---------------------------------------------------------------------------------------------------------


def read_torch_rows(text: str) -> list[list[Action]]:
    """Read the actions of each rank, and append the updates of its stages, which torch's form does not have."""
    wanted = "rank, as 0F0,0B0"
    rows = [
        _read_row(f"row {r + 1} (rank {r})", line, _torch_actions, wanted)
        for r, line in enumerate(_cells(text, "Schedule.to_torch_csv", wanted))
    ]
    updates = (
        (Action(Kind.UPDATE, None, k) for k in sorted({action.stage for action in row})) for row in rows
    )
    return [[*row, *last] for row, last in zip(_checked_stages(rows), updates)]


def _torch_actions(cell: str) -> list[Action]:
    """Return the actions of a cell: none for communication of torch's runtime, several where they overlap."""
    if _TORCH_OWN.fullmatch(cell):
        return []
    overlap = _TORCH_OVERLAP.fullmatch(cell)
    return [_torch_action(part.strip()) for part in (overlap[1].split(";") if overlap else [cell])]


def _torch_action(token: str) -> Action:
    try:
        action = Action.parse(token)
    except ValueError:
        raise ValueError(
            f"{token!r} is not an action of torch's form: write F, B, I or W between a stage and a micro-batch, as 2F3"
        ) from None
    if action.kind is Kind.UPDATE or action.stage < 0 or action.ahead:
        raise ValueError(f"{token!r} is not of torch's form but of avgpipe's: read it with Schedule.from_csv")
    return action


def torch_text(schedule: Schedule) -> str:
    """Format one line per rank, without the updates; ValueError for what the format cannot express."""
    if not schedule.flush:
        raise ValueError(
            f"schedule {schedule.name!r} has no flush between batches, which torch's format cannot express: "
            "write it with to_csv"
        )
    for k, workers in enumerate(schedule.replicas):
        if len(workers) > 1:
            raise ValueError(
                f"schedule {schedule.name!r} has stage {k} on workers {', '.join(map(str, workers))}, but torch's "
                "format has a stage on one rank: build it without replication, or write it with to_csv"
            )
    actions = ([str(action) for action in row if action.kind is not Kind.UPDATE] for row in schedule.rows)
    return "".join(f"{','.join(line)}\n" for line in actions)


# ---- for both --------------------------------------------------------------------------------------------------------


def _cells(text: str, writer: str, wanted: str) -> list[list[str]]:
    """Split into the cells of each line, also in the form that spreadsheets write."""
    if not isinstance(text, str):
        raise TypeError(f"the CSV text is of type {type(text).__name__}: pass a str, as {writer} returns")
    lines = text.removeprefix("\ufeff").rstrip(", \t\r\n").splitlines()
    if not lines:
        raise ScheduleError(f"the CSV text is empty: write one row of actions per {wanted}")
    if len(lines) > MOST_WORKERS:
        raise ScheduleError(
            f"the CSV text has {len(lines)} rows, and a pipeline at most {MOST_WORKERS} workers"
        )
    return [[cell.strip().strip('"').strip() for cell in line.split(",")] for line in lines]


def _read_row(
    name: str, cells: Sequence[str], read: Callable[[str], list[Action]], wanted: str
) -> list[Action]:
    row = []
    for number, cell in enumerate(cells, start=1):
        if cell:
            try:
                row += read(cell)
            except ValueError as error:
                raise ScheduleError(f"{name}, cell {number}: {error}") from None
    if not row:
        raise ScheduleError(f"{name} has no actions: write one row per {wanted}")
    return row


def _checked_stages(rows: list[list[Action]]) -> list[list[Action]]:
    """Return the rows if their stages are numbered from 0 without a gap, else raise."""
    stages = {action.stage for row in rows for action in row}
    missing = next(k for k in range(len(stages) + 1) if k not in stages)
    if missing < len(stages):
        raise ScheduleError(
            f"no cell is of stage {missing}, but some are of stage {max(stages)}: number from 0"
        )
    return rows
