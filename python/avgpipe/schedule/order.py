"""Which worker runs which stages, and in which sequence: a schedule's columns as one row of cells per worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from avgpipe.schedule.action import Action

Columns = Sequence[Sequence[Action]]
Order = tuple[tuple[int, ...], ...]


class Cell(NamedTuple):
    """An action of a stage, in a worker's row."""

    stage: int
    action: Action


class Rows(NamedTuple):
    """Per worker the cells that it runs in turn. ``ordered``: workers have stages by an order, not stage k alone."""

    stages: int
    cells: list[list[Cell]]
    ordered: bool

    def name(self, row: int) -> str:
        return f"{'worker' if self.ordered else 'stage'} {row}"

    def token(self, cell: Cell) -> str:
        """What stands in a grid and in CSV: the action, in ordered rows with its stage in front, as 2F3."""
        return f"{cell.stage}{cell.action}" if self.ordered else str(cell.action)


def merge(columns: Columns, order: Order | None) -> Rows:
    """The rows of columns; ``order`` must name each stage as often as it has actions."""
    if order is None:
        return Rows(
            len(columns), [[Cell(k, action) for action in column] for k, column in enumerate(columns)], False
        )
    rest: list[Iterator[Action]] = [iter(column) for column in columns]
    return Rows(len(columns), [[Cell(k, next(rest[k])) for k in row] for row in order], True)


def split(rows: Iterable[Iterable[Cell]], stages: int) -> tuple[tuple[tuple[Action, ...], ...], Order]:
    """The columns and the order that :func:`merge` makes these rows of."""
    columns: list[list[Action]] = [[] for _ in range(stages)]
    order = []
    for row in rows:
        cells = list(row)
        for cell in cells:
            columns[cell.stage].append(cell.action)
        order.append(tuple(cell.stage for cell in cells))
    return tuple(map(tuple, columns)), tuple(order)
