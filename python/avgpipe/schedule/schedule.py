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
    """What each worker runs, in order, for one batch after another: see :class:`Row`.

    Any actions can be held and printed; :meth:`validate` says whether they can be run.

    Attributes:
        name: A label: schedules with the same micro-batches and rows are equal.
        micro_batches: Per batch. A batch with fewer leaves out the actions of those that it lacks.
        rows: Per worker its actions in turn. An action without a stage is of the row's number.
        trusted: Only for rows that are right by construction: :meth:`validate` then need not look at all of them.
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

    # ---- who runs what -------------------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        """How many workers run one pipeline."""
        return len(self.rows)

    @cached_property
    def is_plain(self) -> bool:
        """Whether worker k runs stage k, and that one alone."""
        return all(row.stages in ((w,), ()) for w, row in enumerate(self.rows))

    @cached_property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.rows) if self.is_plain else 1 + max(k for row in self.rows for k in row.stages)

    @cached_property
    def flush(self) -> bool:
        """Whether each batch has been updated before the pipeline's next one begins."""
        return all(row.ahead == 0 for row in self.rows)

    @property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """Per worker its stages, ascending."""
        return tuple(row.stages for row in self.rows)

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Per stage the workers that have it, in order; micro-batch m goes to number m % R of them."""
        found: list[list[int]] = [[] for _ in range(self.stages)]
        for w, row in enumerate(self.rows):
            for k in row.stages:
                found[k].append(w)
        return tuple(map(tuple, found))

    def worker_of(self, stage: int, micro_batch: int = 0) -> int:
        """Return the worker that runs a micro-batch on a stage; ValueError if none does."""
        if type(stage) is not int or not 0 <= stage < self.stages or not self.replicas[stage]:
            raise ValueError(f"stage={stage!r}: no worker has it, the stages are 0..{self.stages - 1}")
        return self.replicas[stage][micro_batch % len(self.replicas[stage])]

    def placed(self, placement: Sequence[Sequence[int]]) -> Schedule:
        """Return the schedule with its rows on other workers: ``placement[k]`` are those of stage k, ascending.

        Raises ValueError unless each worker here becomes one of as many.
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
        """Per stage the actions of a batch that no other follows; those of replicas after one another."""
        found: list[list[Action]] = [[] for _ in range(self.stages)]
        for row in self.rows:
            for action in sorted(row, key=lambda a: -a.ahead):
                found[action.stage].append(Action(action.kind, action.micro_batch))
        return tuple(map(tuple, found))

    # ---- what follows from the rows --------------------------------------------------------------------------------

    @property
    def lookahead(self) -> int:
        """How many later batches must have begun before one can be updated everywhere; 0 with a flush."""
        return max(row.lookahead for row in self.rows)

    @property
    def peak_in_flight(self) -> list[int]:
        """Per stage, the most micro-batches whose activations are held at once by a worker.

        They are held from F m to the end of B m, or of W m where the backward is split. Without a flush, of as many
        batches as it takes.
        """
        return [
            max((self.rows[w].peak_in_flight(k) for w in ws), default=0) for k, ws in enumerate(self.replicas)
        ]

    @property
    def worker_peak_in_flight(self) -> list[int]:
        """Per worker, the most activations of micro-batches, of all its stages together, held at once.

        One of each stage counts as one: with V stages on a worker, an activation belongs to a V times smaller stage.
        """
        return [row.peak_in_flight() for row in self.rows]

    # ---- checking and printing -------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise ScheduleError, naming the stage or worker, position, action and reason, unless the schedule can be run.

        Every stage must have, for each micro-batch, one forward and later one backward (B, or I and later W), on the
        worker of the micro-batch, and last of all one update on each of its workers; and a dry run, in which F m waits
        for F m of the stage before and B m (or I m) for that of the stage after, must reach the end of every row.
        """
        flaw = self._flaw()
        if flaw is not None:
            raise ScheduleError(f"schedule {self.name!r}: {flaw}")
        object.__setattr__(self, "_is_right", True)

    def __str__(self) -> str:
        """A grid: a row per stage, a column per time slot of a dry run with unit times, '.' for waiting.

        Rows are the workers' and a cell is 2F3, F3 of stage 2, unless stage k is alone on worker k. It shows one batch
        that no other follows. In a schedule that cannot be run, the wrong cell stands in [brackets], the actions that
        the dry run does not reach follow one another, and the last line gives the reason.
        """
        from avgpipe.schedule.checks import dry_run, steps_of, token

        workers = "" if self.is_plain else f", workers {self.workers}"
        flush = "" if self.flush else ", no flush"
        title = f"{self.name}: stages {self.stages}{workers}, micro-batches {self.micro_batches}{flush}"
        flaw = self._flaw()
        if flaw is None:
            steps = [steps_of(row, 1, self.micro_batches) for row in self.rows]
        else:  # the rows as they stand, where the flaw's position is
            steps = [[(action, 0) for action in row] for row in self.rows]
        # Turns of an endless loop do not run alone.
        slots = dry_run(steps, self.stages) if flaw is None or self.flush else [[] for _ in steps]
        cells = [[token(a if flaw else a._replace(ahead=0), self.is_plain) for a, _ in own] for own in steps]
        grid = draw_grid("stage" if self.is_plain else "worker", cells, slots, flaw)
        return "\n".join([title, *grid, *([str(flaw)] if flaw else [])])

    def to_csv(self) -> str:
        """Write one line per worker, one cell per action, with ``ahead`` as F3+1; :meth:`from_csv` inverts it."""
        from avgpipe.schedule.checks import token

        return "".join(f"{','.join(token(a, self.is_plain) for a in row)}\n" for row in self.rows)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Schedule:
        """Return the schedule written as CSV: a row per worker, a cell per action; blank cells are skipped.

        Row k is stage k's, with cells such as F3; or all cells name their stage, as 2F3. There are as many
        micro-batches as the greatest one named says. Only the syntax is checked, so that a wrong schedule can be
        printed: call :meth:`validate` before running it. Raises ScheduleError naming row and cell, counted from 1 as in
        a spreadsheet.
        """
        from avgpipe.schedule.text import read_rows

        return cls._of_rows(name, read_rows(text))

    def to_torch_csv(self) -> str:
        """Write the "compute_only" CSV of torch.distributed.pipelining: one line per rank, one cell per action, as 2F3.

        Updates are left out, since there the script steps the optimizer. :meth:`from_torch_csv` inverts it. Raises
        ValueError for what the format has no words for: batches without a flush, and stages with several workers.
        """
        if not self.flush:
            raise ValueError(
                f"schedule {self.name!r} goes on over batches without a flush, which torch's format cannot say: "
                "write it with to_csv"
            )
        for k, workers in enumerate(self.replicas):
            if len(workers) > 1:
                raise ValueError(
                    f"schedule {self.name!r} has stage {k} on workers {', '.join(map(str, workers))}, but torch's "
                    "format has a stage on one rank: build it without replication, or write it with to_csv"
                )
        from avgpipe.schedule.text import torch_text

        return torch_text(self.rows)

    @classmethod
    def from_torch_csv(cls, text: str, name: str = "torch-csv") -> Schedule:
        """Return the schedule that a schedule of torch.distributed.pipelining dumps as CSV: a row per rank.

        The updates of a row's stages are added at its end. Blank cells are skipped, and so is what torch's runtime is
        told in the "compute_comms" format (SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD): workers
        here send and receive by themselves. Actions that overlap, as in (0F4;3B2)OVERLAP_F_B, follow one another as
        they are written. As by :meth:`from_csv`, only the syntax is checked; raises ScheduleError naming row and cell.
        """
        from avgpipe.schedule.text import read_torch_rows

        return cls._of_rows(name, read_torch_rows(text))

    @classmethod
    def _of_rows(cls, name: str, rows: Sequence[Sequence[Action]]) -> Schedule:
        """Make the schedule of as many micro-batches as the greatest one named says."""
        named = [action.micro_batch for row in rows for action in row if action.micro_batch is not None]
        return cls(name, 1 + max(named, default=0), tuple(map(Row, rows)))

    def _flaw(self) -> Flaw | None:
        if self._is_right:
            return None
        from avgpipe.schedule.checks import find_flaw

        return find_flaw(self.rows, self.replicas, self.micro_batches, self.is_plain)


def _checked_row(worker: int, actions: Iterable[Action]) -> Row:
    """Where actions leave their stage open, it is the row's number."""
    row = actions if isinstance(actions, Row) else Row(actions)
    for position, action in enumerate(row.kinds):
        if not isinstance(action, Action):
            raise TypeError(f"rows[{worker}][{position}]={action!r}: must be an Action")
    if all(action.stage >= 0 for action in row.kinds):
        return row

    def of_stage(action: Action) -> Action:
        return action if action.stage >= 0 else action._replace(stage=worker)

    return Row(loops=[loop._replace(actions=tuple(map(of_stage, loop.actions))) for loop in row.loops])


def draw_grid(
    name: str, cells: Sequence[Sequence[str]], slots: Sequence[Sequence[int]], flaw: Flaw | None
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
    if flaw is not None:
        line = lines[flaw.row]
        if flaw.position == len(cells[flaw.row]):
            line.append(f"[{flaw.token}?]")
        else:
            place = [index for index, cell in enumerate(line) if cell != "."][flaw.position]
            line[place] = f"[{line[place]}]"
    width = max((len(cell) for line in lines for cell in line), default=1)
    digits = len(str(len(lines) - 1))
    return [
        f"{name} {r:>{digits}} | {' '.join(cell.ljust(width) for cell in line)}".rstrip()
        for r, line in enumerate(lines)
    ]
