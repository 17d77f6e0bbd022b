"""The order of work of all stages in one batch, as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field

from avgpipe.errors import ScheduleError
from avgpipe.schedule.action import Action
from avgpipe.schedule.grid import draw_grid
from avgpipe.schedule.validation import find_fault


@dataclass(frozen=True)
class Schedule:
    """For each stage the ordered actions of one batch.

    ``columns[k]`` are the actions of stage k. The name is a label: schedules with the same actions are equal.
    Any actions can be held and printed; :meth:`validate` says whether they can be run.
    """

    name: str = field(compare=False)
    micro_batches: int
    columns: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if type(self.micro_batches) is not int or self.micro_batches < 1:
            raise ValueError(f"micro_batches={self.micro_batches!r}: must be an int of at least 1")
        columns = tuple(tuple(column) for column in self.columns)
        if not columns:
            raise ValueError("columns is empty: give one column of actions per stage, at least one")
        for stage, column in enumerate(columns):
            for position, action in enumerate(column):
                if not isinstance(action, Action):
                    raise TypeError(f"columns[{stage}][{position}]={action!r}: must be an Action")
        object.__setattr__(self, "columns", columns)

    @property
    def stages(self) -> int:
        return len(self.columns)

    @property
    def peak_in_flight(self) -> list[int]:
        """Per stage, the most micro-batches whose activations are held at once.

        They are held from F m to the end of B m, or of W m where the backward is split.
        """
        peaks = []
        for column in self.columns:
            held = peak = 0
            for action in column:
                held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
                peak = max(peak, held)
            peaks.append(peak)
        return peaks

    def validate(self) -> None:
        """Raise ScheduleError, naming stage, position, action and reason, unless the schedule can be run.

        Every stage must have, for each micro-batch, one forward and later one backward (B, or I and later W),
        and last of all one update; and a dry run, in which F m waits for F m of the stage before and B m (or
        I m) for that of the stage after, must reach the end of every column.
        """
        fault = find_fault(self.columns, self.micro_batches)
        if fault is not None:
            raise ScheduleError(f"schedule {self.name!r}: {fault}")

    def __str__(self) -> str:
        """A grid: a row per stage, a column per time slot of a dry run with unit times, '.' for waiting.

        In a schedule that cannot be run, the wrong cell stands in [brackets], the actions that the dry run
        does not reach follow one another, and the last line gives the reason.
        """
        fault = find_fault(self.columns, self.micro_batches)
        title = f"{self.name}: stages {self.stages}, micro-batches {self.micro_batches}"
        lines = [title, *draw_grid(self.columns, fault)]
        return "\n".join(lines if fault is None else [*lines, str(fault)])

    def to_csv(self) -> str:
        """One line per stage, one cell per action, no header; :meth:`from_csv` inverts it."""
        return "".join(",".join(map(str, column)) + "\n" for column in self.columns)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Schedule:
        """The schedule written as CSV: a row per stage, a cell per action; blank cells are skipped.

        There are as many micro-batches as the greatest one named says. Only the syntax is checked, so that a
        wrong schedule can be printed: call :meth:`validate` before running it. Raises ScheduleError naming
        row and cell, counted from 1 as in a spreadsheet.
        """
        lines = text.removeprefix("\ufeff").rstrip(", \t\r\n").splitlines()
        columns = [_parse_row(row, line) for row, line in enumerate(lines, start=1)]
        if not columns:
            raise ScheduleError("the CSV text is empty: write one row of actions per stage, as F0,B0,U")
        named = [
            action.micro_batch for column in columns for action in column if action.micro_batch is not None
        ]
        return cls(name, 1 + max(named, default=0), tuple(columns))


def _parse_row(row: int, line: str) -> tuple[Action, ...]:
    actions = []
    for number, cell in enumerate(line.split(","), start=1):
        token = cell.strip().strip('"').strip()
        if not token:
            continue
        try:
            actions.append(Action.parse(token))
        except ValueError as error:
            raise ScheduleError(f"row {row} (stage {row - 1}), cell {number}: {error}") from None
    if not actions:
        raise ScheduleError(
            f"row {row} (stage {row - 1}) has no actions: write one row per stage, as F0,B0,U"
        )
    return tuple(actions)
