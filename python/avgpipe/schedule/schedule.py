"""The order of work of all workers, as a frozen value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from avgpipe.errors import ScheduleError, check_count
from avgpipe.schedule.row import Action, Row

if TYPE_CHECKING:
    from avgpipe.schedule.checks import Flaw


@dataclass(frozen=True)
class Schedule:
    """The actions of each worker, in order, for one batch after another: see :class:`Row`.

    Any actions can be held and printed; :meth:`validate` says whether they can be run.

    Attributes:
        name: A label, which equality ignores: schedules with the same micro-batches and rows are equal.
        micro_batches: Micro-batches per batch. A smaller batch leaves out the actions of those that it lacks.
        rows: The actions of each worker in order. An action without a stage belongs to the stage with the
            row's number.
        trusted: Only for rows that are right by construction: :meth:`validate` then need not check all of
            them.
    """

    name: str = field(compare=False)
    micro_batches: int
    rows: tuple[Row, ...]
    trusted: InitVar[bool] = False
    _is_right: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self, trusted: bool) -> None:
        check_count("micro_batches", self.micro_batches)
        if not self.rows:
            raise ValueError("rows is empty: give one row of actions per worker, at least one")
        if not trusted:
            rows = tuple(_checked_row(w, row) for w, row in enumerate(self.rows))
            object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "_is_right", trusted)

    # ---- placement -----------------------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        """Return how many workers run one pipeline."""
        return len(self.rows)

    @cached_property
    def is_plain(self) -> bool:
        """Return whether each worker k runs stage k only."""
        return all(row.stages in ((w,), ()) for w, row in enumerate(self.rows))

    @cached_property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.rows) if self.is_plain else 1 + max(k for row in self.rows for k in row.stages)

    @cached_property
    def flush(self) -> bool:
        """Return whether each batch is updated before the pipeline's next one begins."""
        return all(row.ahead == 0 for row in self.rows)

    @property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """Return the stages of each worker, ascending."""
        return tuple(row.stages for row in self.rows)

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Return the workers of each stage, in order; micro-batch m is for number m % R of them."""
        found: list[list[int]] = [[] for _ in range(self.stages)]
        for w, row in enumerate(self.rows):
            for k in row.stages:
                found[k].append(w)
        return tuple(map(tuple, found))

    def worker_of(self, stage: int, micro_batch: int = 0) -> int:
        """Return the worker that runs a micro-batch on a stage; ValueError if none does."""
        if type(stage) is not int or not 0 <= stage < self.stages or not self.replicas[stage]:
            raise ValueError(
                f"stage={stage!r}: no worker has this stage, the stages are 0..{self.stages - 1}"
            )
        return self.replicas[stage][micro_batch % len(self.replicas[stage])]

    def placed(self, placement: Sequence[Sequence[int]]) -> Schedule:
        """Return the schedule with its rows on other workers: ``placement[k]`` are those of stage k, ascending.

        Raises ValueError unless ``placement`` maps the workers one to one.
        """
        wanted = tuple(map(tuple, placement))
        moved = {w: new for own, news in zip(self.replicas, wanted) for w, new in zip(own, news)}
        if sorted(moved.values()) == list(range(self.workers)):
            rows = tuple(self.rows[w] for w in sorted(moved, key=moved.__getitem__))
            found = Schedule(self.name, self.micro_batches, rows, trusted=self._is_right)
            if found.replicas == wanted:
                return found
        raise ValueError(
            f"placement {wanted} must name the workers 0..{self.workers - 1} of each of {self.stages} stages, "
            f"ascending and as many as in {self.replicas}"
        )

    @cached_property
    def columns(self) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of a single batch for each stage, with those of replicas one after the other."""
        found: list[list[Action]] = [[] for _ in range(self.stages)]
        for row in self.rows:
            for action in sorted(row, key=lambda a: -a.ahead):
                found[action.stage].append(Action(action.kind, action.micro_batch))
        return tuple(map(tuple, found))

    # ---- what follows from the rows --------------------------------------------------------------------------------

    @property
    def lookahead(self) -> int:
        """Return how many later batches must have begun before one can be updated everywhere; 0 with a flush."""
        return max(row.lookahead for row in self.rows)

    @property
    def peak_in_flight(self) -> list[int]:
        """Return, per stage, the most micro-batches whose activations a worker holds at once.

        They are held from F m to the end of B m, or of W m if the backward is split. Without a flush, batches
        follow each other.
        """
        return [
            max((self.rows[w].peak_in_flight(k) for w in ws), default=0) for k, ws in enumerate(self.replicas)
        ]

    @property
    def worker_peak_in_flight(self) -> list[int]:
        """Return, per worker, the most activations of micro-batches that it holds at once, of all its stages together.

        An activation of any stage counts as one: with V stages on a worker, it belongs to a V times smaller
        stage.
        """
        return [row.peak_in_flight() for row in self.rows]

    # ---- checking and printing -------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise ScheduleError, naming stage or worker, position, action and reason, unless the schedule can be run.

        Every stage must have, for each micro-batch, one forward and later one backward (B, or I and later W),
        on the worker of the micro-batch, and last one update on each of its workers; and a dry run, in which
        F m waits for F m of the stage before and B m (or I m) for that of the stage after, must reach the end
        of every row.
        """
        flaw = self.flaw()
        if flaw is not None:
            raise ScheduleError(f"schedule {self.name!r}: {flaw}")
        object.__setattr__(self, "_is_right", True)

    def __str__(self) -> str:
        """Draw a grid: a row per stage, a column per time slot of a dry run with unit times, '.' for waiting.

        Rows are the workers' and a cell is 2F3 (F3 of stage 2), unless each worker k has stage k only. It
        shows a single batch. In a schedule that cannot be run, the wrong cell is in [brackets], the actions
        that the dry run does not reach follow without slots, and the last line gives the reason.
        """
        from avgpipe.schedule.checks import drawn

        return drawn(self)

    def to_csv(self) -> str:
        """Write one line per worker, one cell per action, with ``ahead`` as F3+1; :meth:`from_csv` inverts it."""
        from avgpipe.schedule.checks import token

        return "".join(f"{','.join(token(a, self.is_plain) for a in row)}\n" for row in self.rows)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Schedule:
        """Return the schedule written as CSV: a row per worker, a cell per action; blank cells are skipped.

        Row k is stage k's, with cells such as F3; or all cells name their stage, as 2F3. The number of
        micro-batches follows from the largest one. Only the syntax is checked, so that a wrong schedule can
        be printed: call :meth:`validate` before running it. Raises ScheduleError with row and cell, counted
        from 1 as in a spreadsheet.
        """
        from avgpipe.schedule.text import read_rows

        return cls._of_rows(name, read_rows(text))

    def to_torch_csv(self) -> str:
        """Write the "compute_only" CSV of torch.distributed.pipelining: one line per rank, one cell per action, as 2F3.

        Updates are left out, since there the script steps the optimizer. :meth:`from_torch_csv` inverts it.
        Raises ValueError for what the format cannot express: schedules without a flush, and stages with
        several workers.
        """
        from avgpipe.schedule.text import torch_text

        return torch_text(self)

    @classmethod
    def from_torch_csv(cls, text: str, name: str = "torch-csv") -> Schedule:
        """Return the schedule that a schedule of torch.distributed.pipelining dumps as CSV: a row per rank.

        The updates of a row's stages are added at its end. Blank cells are skipped, and so are the
        communication actions of the "compute_comms" format (SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD,
        REDUCE_GRAD), as workers here send and receive on their own. Actions that overlap, as in
        (0F4;3B2)OVERLAP_F_B, follow one another as written. As in :meth:`from_csv`, only the syntax is
        checked; raises ScheduleError with row and cell.
        """
        from avgpipe.schedule.text import read_torch_rows

        return cls._of_rows(name, read_torch_rows(text))

    @classmethod
    def _of_rows(cls, name: str, rows: Sequence[Sequence[Action]]) -> Schedule:
        """Make a schedule; the number of micro-batches follows from the largest one."""
        named = [action.micro_batch for row in rows for action in row if action.micro_batch is not None]
        return cls(name, 1 + max(named, default=0), tuple(map(Row, rows)))

    def flaw(self) -> Flaw | None:
        """Return the first wrong cell; None for a schedule that can be run."""
        if self._is_right:
            return None
        from avgpipe.schedule.checks import find_flaw

        return find_flaw(self.rows, self.replicas, self.micro_batches, self.is_plain)


def _checked_row(worker: int, actions: Iterable[Action]) -> Row:
    """Return the row, with the row's number as the stage of actions without one."""
    row = actions if isinstance(actions, Row) else Row(actions)
    for position, action in enumerate(row.kinds):
        if not isinstance(action, Action):
            raise TypeError(f"rows[{worker}][{position}]={action!r}: must be an Action")
    if all(action.stage >= 0 for action in row.kinds):
        return row

    def of_stage(action: Action) -> Action:
        return action if action.stage >= 0 else action._replace(stage=worker)

    return Row(loops=[loop._replace(actions=tuple(map(of_stage, loop.actions))) for loop in row.loops])
