"""The order of work of all stages in one batch, as a frozen value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from avgpipe.errors import ScheduleError
from avgpipe.schedule.action import Action
from avgpipe.schedule.csv_text import read_csv, write_csv
from avgpipe.schedule.grid import draw_grid
from avgpipe.schedule.order import Order, Rows, merge, split
from avgpipe.schedule.stream import Stream, one_batch
from avgpipe.schedule.validation import Fault, find_fault, find_order_fault

_HOLDS = {"F": 1, "B": -1, "W": -1}


@dataclass(frozen=True)
class Schedule:
    """For each stage the ordered actions of one batch.

    - columns: ``columns[k]`` are the actions of stage k.
    - flush: True: on each stage a pipeline's next batch begins after the update of the one before. False: it begins as
      soon as 1F1B has room for it, ``stream(k)`` gives the steps; ``columns`` are what would run if none followed.
    - order: for each worker the stage of each of its actions in turn, so that it merges the columns of the worker's
      stages into one sequence. None: stage k alone on worker k.

    The name is a label: schedules with the same actions, flush and order are equal. Any actions can be held and
    printed; :meth:`validate` says whether they can be run.
    """

    name: str = field(compare=False)
    micro_batches: int
    columns: tuple[tuple[Action, ...], ...]
    flush: bool = True
    order: Order | None = None

    _warm_ups: ClassVar[tuple[int, ...] | None] = None  # an instance's own hides this one

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
        if not isinstance(self.flush, bool):
            raise TypeError(f"flush={self.flush!r}: must be True or False")
        if self.order is not None:
            object.__setattr__(self, "order", self._checked_order(self.order))

    def _checked_order(self, order: Order) -> Order:
        if not self.flush:
            raise ValueError(
                "order is given with flush=False: without a flush stage k is alone on worker k, give None"
            )
        rows = tuple(tuple(row) for row in order)
        for w, row in enumerate(rows):
            if not row:
                raise ValueError(f"order[{w}] is empty: give each worker the stages of its actions")
            for position, k in enumerate(row):
                if type(k) is not int or not 0 <= k < self.stages:
                    raise ValueError(f"order[{w}][{position}]={k!r}: must be a stage, 0..{self.stages - 1}")
        if not rows:
            raise ValueError("order is empty: give a row per worker, or None for stage k alone on worker k")
        return rows

    @classmethod
    def from_warm_ups(
        cls, name: str, micro_batches: int, warm_ups: Sequence[int], flush: bool = True
    ) -> Schedule:
        """Stage k runs ``warm_ups[k]`` forwards, then one backward, one forward in turn; on worker k, alone.

        ``columns`` are made when they are first asked for: there may be millions of actions. The counts must be ints of
        at least 1.
        """
        schedule = object.__new__(cls)
        known = {"name": name, "micro_batches": micro_batches, "flush": flush, "order": None}
        vars(schedule).update(known, _warm_ups=tuple(min(w, micro_batches) for w in warm_ups))
        return schedule

    if not TYPE_CHECKING:  # else any name would pass for an attribute

        def __getattr__(self, name: str) -> Any:
            """The columns of :meth:`from_warm_ups`, once: afterwards they are an attribute."""
            warm_ups = self._warm_ups
            if name != "columns" or warm_ups is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            columns = tuple(one_batch(w, self.micro_batches) for w in warm_ups)
            object.__setattr__(self, "columns", columns)
            return columns

    @property
    def warm_ups(self) -> tuple[int, ...] | None:
        """Per stage the forwards before the first backward, if the schedule was made of them; else None."""
        return self._warm_ups

    @property
    def stages(self) -> int:
        return len(self.columns if self._warm_ups is None else self._warm_ups)

    @property
    def workers(self) -> int:
        return self.stages if self.order is None else len(self.order)

    @property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """Per worker its stages, ascending."""
        if self.order is None:
            return tuple((k,) for k in range(self.stages))
        return tuple(tuple(sorted(set(row))) for row in self.order)

    def worker_of(self, stage: int) -> int:
        """The worker that has the stage; ValueError if none does."""
        for worker, stages in enumerate(self.placement):
            if stage in stages:
                return worker
        raise ValueError(f"stage={stage!r}: no worker has it, the stages are 0..{self.stages - 1}")

    @property
    def peak_in_flight(self) -> list[int]:
        """Per stage, the most micro-batches whose activations are held at once.

        They are held from F m to the end of B m, or of W m where the backward is split. Without a flush, of as many
        batches as it takes: K-k on stage k.
        """
        if not self.flush:
            return [self.stages - k for k in range(self.stages)]
        if self._warm_ups is not None:
            return list(self._warm_ups)
        return [_peak(action.kind for action in column) for column in self.columns]

    @property
    def worker_peak_in_flight(self) -> list[int]:
        """Per worker, the most activations of micro-batches, of all its stages together, held at once.

        One of each stage counts as one: with V stages on a worker, an activation belongs to a V times smaller stage.
        """
        if self.order is None:
            return self.peak_in_flight
        return [_peak(cell.action.kind for cell in row) for row in self.rows().cells]

    def rows(self) -> Rows:
        """Per worker its cells (stage, action), in the order in which it runs them; ScheduleError for a wrong order."""
        fault = None if self.order is None else find_order_fault(self.columns, self.order)
        if fault is not None:
            raise ScheduleError(f"schedule {self.name!r}: {fault}")
        return merge(self.columns, self.order)

    def stream(self, stage: int) -> Stream:
        """The steps of a stage over the batches of a pipeline, without a flush; ValueError if there is one."""
        if self.flush:
            raise ValueError(
                f"schedule {self.name!r} has a flush: each batch runs columns[{stage}] on its own"
            )
        return Stream(self.stages - stage)

    def validate(self) -> None:
        """Raise ScheduleError, naming the stage or worker, position, action and reason, unless the schedule can be run.

        Every stage must have, for each micro-batch, one forward and later one backward (B, or I and later W),
        and last of all one update; an order must contain just that, each stage's on one worker; without a flush,
        columns must be those of 1F1B; and a dry run, in which F m waits for F m of the stage before and B m (or
        I m) for that of the stage after, must reach the end of every worker's row.
        """
        if self._warm_ups is not None and self._warm_ups_run(self._warm_ups):
            return
        fault = self._fault(self.rows())
        if fault is not None:
            raise ScheduleError(f"schedule {self.name!r}: {fault}")

    def _warm_ups_run(self, warm_ups: tuple[int, ...]) -> bool:
        """Columns made of warm-ups are complete and in order; each stage must be sent what its own warm-up needs."""
        if not self.flush:
            return all(w == min(self.micro_batches, self.stages - k) for k, w in enumerate(warm_ups))
        return all(before >= after for before, after in pairwise(warm_ups))

    def _fault(self, rows: Rows) -> Fault | None:
        return find_fault(rows, self.micro_batches, self.flush)

    def __str__(self) -> str:
        """A grid: a row per stage, a column per time slot of a dry run with unit times, '.' for waiting.

        With an order the rows are the workers' and a cell is 2F3, F3 of stage 2. In a schedule that cannot be run, the
        wrong cell stands in [brackets], the actions that the dry run does not reach follow one another, and the last
        line gives the reason; where the order itself is wrong, the rows are the stages'.
        """
        fault = None if self.order is None else find_order_fault(self.columns, self.order)
        if fault is not None:
            return "\n".join([self._title(), *draw_grid(merge(self.columns, None), None), str(fault)])
        rows = self.rows()
        fault = self._fault(rows)
        lines = [self._title(), *draw_grid(rows, fault)]
        return "\n".join(lines if fault is None else [*lines, str(fault)])

    def grid(self, batches: int) -> str:
        """The same of several batches of a pipeline, one after another; micro-batches are numbered through.

        Raises ScheduleError if the schedule cannot be run.
        """
        if type(batches) is not int or batches < 1:
            raise ValueError(f"batches={batches!r}: must be an int of at least 1")
        self.validate()
        columns = [self._repeated(k, batches) for k in range(self.stages)]
        order = None if self.order is None else tuple(row * batches for row in self.order)
        return "\n".join([f"{self._title()}, batches {batches}", *draw_grid(merge(columns, order), None)])

    def _repeated(self, stage: int, batches: int) -> list[Action]:
        count = self.micro_batches
        if self.flush:
            steps = [(j, a.kind, a.micro_batch) for j in range(batches) for a in self.columns[stage]]
        else:
            stream = self.stream(stage)
            known = [step for j in range(batches) for step in stream.add(j, count)]
            steps = [(step.batch, step.kind, step.micro_batch) for step in (*known, *stream.drain())]
        return [Action(kind) if kind == "U" else Action(kind, j * count + (m or 0)) for j, kind, m in steps]

    def _title(self) -> str:
        workers = "" if self.order is None else f", workers {self.workers}"
        flush = "" if self.flush else ", no flush"
        return f"{self.name}: stages {self.stages}{workers}, micro-batches {self.micro_batches}{flush}"

    def to_csv(self) -> str:
        """One line per worker, one cell per action, with an order as 2F3; :meth:`from_csv` inverts it.

        No header, but a first line "no flush" where there is none. ScheduleError for a wrong order.
        """
        return write_csv(self.rows(), self.flush)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Schedule:
        """The schedule written as CSV: a row per worker, a cell per action; blank cells are skipped.

        Row k is stage k's, with cells such as F3; or cells name their stage, as 2F3, and rows are an order's. There are
        as many micro-batches as the greatest one named says. Only the syntax is checked, so that a wrong schedule
        can be printed: call :meth:`validate` before running it. Raises ScheduleError naming row and cell, counted from
        1 as in a spreadsheet.
        """
        rows, flush = read_csv(text)
        columns, order = split(rows.cells, rows.stages)
        named = [a.micro_batch for column in columns for a in column if a.micro_batch is not None]
        return cls(name, 1 + max(named, default=0), columns, flush, order if rows.ordered else None)


def _peak(kinds: Iterable[str]) -> int:
    held = peak = 0
    for kind in kinds:
        held += _HOLDS.get(kind, 0)
        peak = max(peak, held)
    return peak
