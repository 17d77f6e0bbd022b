"""Check schedules with a dry run, which finds the first cell that makes a schedule impossible to run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from avgpipe.errors import ScheduleError
from avgpipe.schedule.row import Action, Kind, Row, RowCursor

if TYPE_CHECKING:
    from avgpipe.schedule.schedule import Schedule

Replicas = Sequence[Sequence[int]]  # the workers of each stage
Step = tuple[Action, int]  # an action and its batch
_MOST_STEPS = 2**22  # of a dry run: some seconds


class Flaw(NamedTuple):
    """A wrong cell of a schedule: its row and index, its text, and the reason."""

    name: str  # of the row: "stage 2" or "worker 1"
    row: int
    position: int  # the length of the row if the cell is missing
    token: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}, position {self.position}, {self.token}: {self.reason}"


def row_name(row: int, is_plain: bool) -> str:
    return f"{'stage' if is_plain else 'worker'} {row}"


def token(action: Action, is_plain: bool) -> str:
    """Format an action for a grid or CSV: with its stage in front, as 2F3, unless that is the row's number."""
    return str(Action(action.kind, action.micro_batch, -1, action.ahead) if is_plain else action)


# ---- dry run -------------------------------------------------------------------------------------------------------


def steps_of(row: Row, batches: int, micro_batches: int) -> list[Step]:
    """Return the actions of a row for ``batches`` batches, from warm-up to end."""
    cursor = RowCursor(row)
    steps = [step for j in range(batches) for step in cursor.begin(j, micro_batches)]
    return [*steps, *cursor.end()]


def dry_run(rows: Sequence[Sequence[Step]], stages: int) -> list[list[int]]:
    """Run each row in order, each action in the first time slot that has its input, until all end or wait.

    Every action takes one slot, a transfer none. Returns the slots in which actions start, per row; a row
    that got stuck has fewer slots than actions.
    """
    slots: list[list[int]] = [[] for _ in rows]
    # (stage, F or B, batch, micro-batch): first slot after it
    ends: dict[tuple[int, str, int, int | None], int] = {}

    moved = True
    while moved:
        moved = False
        for own, row in zip(slots, rows):
            while len(own) < len(row):
                action, batch = row[len(own)]
                source = _input_of(action, stages)
                ready = 0 if source is None else ends.get((*source, batch, action.micro_batch))
                if ready is None:
                    break
                own.append(max(ready, own[-1] + 1 if own else 0))
                kind = "B" if action.kind is Kind.BACKWARD_INPUT else action.kind.value
                ends[action.stage, kind, batch, action.micro_batch] = own[-1] + 1
                moved = True
    return slots


def _input_of(action: Action, stages: int) -> tuple[int, str] | None:
    """Return stage and kind, F or B, of the action of the same micro-batch that this one waits for.

    None if the action needs results of its own stage only. B includes I: both send the gradient.
    """
    if action.kind is Kind.FORWARD and action.stage > 0:
        return action.stage - 1, "F"
    if action.kind in ("B", "I") and action.stage < stages - 1:
        return action.stage + 1, "B"
    return None


# ---- faults --------------------------------------------------------------------------------------------------------


def find_flaw(rows: Sequence[Row], replicas: Replicas, micro_batches: int, is_plain: bool) -> Flaw | None:
    """Return the first wrong cell of the first wrong row, else a cell of a deadlock."""
    steps = sum(map(len, rows)) * (1 + 2 * max(row.ahead for row in rows))
    if steps > _MOST_STEPS:
        raise ScheduleError(
            f"checking it would run {steps} actions, and at most {_MOST_STEPS} are run: use fewer actions, or run less "
            "far ahead"
        )
    for r, row in enumerate(rows):
        wrong = _wrong_in_row(r, list(row), replicas, micro_batches)
        if wrong is not None:
            position, action, reason = wrong
            return Flaw(row_name(r, is_plain), r, position, token(action, is_plain), reason)
    for k, workers in enumerate(replicas):
        if not workers:
            return Flaw("worker 0", 0, len(rows[0]), f"{k}F0", f"missing, no worker has stage {k}")
    return _deadlock(rows, replicas, micro_batches, is_plain)


def _wrong_in_row(
    r: int, row: Sequence[Action], replicas: Replicas, micro_batches: int
) -> tuple[int, Action, str] | None:
    """Return position, action and reason of a row's first wrong cell."""
    if not row:
        return 0, Action(Kind.FORWARD, 0), "missing"
    # Per stage, without stage and ahead.
    done: dict[int, set[Action]] = {action.stage: set() for action in row}
    for position in sorted(range(len(row)), key=lambda n: -row[n].ahead):  # in the order of a batch
        action = row[position]
        plain, m = Action(action.kind, action.micro_batch), action.micro_batch
        workers = replicas[action.stage]
        if reason := _wrong(plain, done[action.stage], micro_batches):
            return position, action, reason
        if m is not None and workers[m % len(workers)] != r:
            reason = (
                f"on worker {r}, though workers {', '.join(map(str, workers))} have stage {action.stage} in turn: "
                f"micro-batch {m} is for worker {workers[m % len(workers)]}"
            )
            return position, action, reason
        if m is None and action.ahead:
            return position, action, "an update cannot be ahead of its batch"
        done[action.stage].add(plain)
    for k, of_stage in done.items():
        for missing in _wanted(of_stage, range(replicas[k].index(r), micro_batches, len(replicas[k]))):
            if missing not in of_stage:
                return len(row), missing._replace(stage=k), "missing"
    return None


def _wrong(action: Action, done: set[Action], micro_batches: int) -> str | None:
    """Return why the action cannot follow those that its stage has done for the batch, or None."""
    m = action.micro_batch
    if action in done:
        return "repeated"
    if m is None:
        return None
    if m >= micro_batches:
        return f"unknown micro-batch, the schedule has {micro_batches}, counted from 0"
    if Action(Kind.UPDATE) in done:
        return "out of order, comes after the update U, which must be last"
    if action.kind in ("B", "I") and Action(Kind.FORWARD, m) not in done:
        return f"out of order, comes before its own forward F{m}"
    if action.kind is Kind.BACKWARD_WEIGHT and Action(Kind.BACKWARD_INPUT, m) not in done:
        return f"out of order, comes before its own input gradient I{m}"
    other = {Kind.BACKWARD: Kind.BACKWARD_INPUT, Kind.BACKWARD_INPUT: Kind.BACKWARD}.get(action.kind)
    if other is not None and Action(other, m) in done:
        return f"repeated, the micro-batch already has the backward {other}{m}"
    return None


def _wanted(done: set[Action], micro_batches: Iterable[int]) -> Iterator[Action]:
    """Yield the actions that a stage must have for a batch; a backward is in two parts if one of them is done."""
    for m in micro_batches:
        yield Action(Kind.FORWARD, m)
        yield Action(Kind.BACKWARD_WEIGHT if Action(Kind.BACKWARD_INPUT, m) in done else Kind.BACKWARD, m)
    yield Action(Kind.UPDATE)


def _deadlock(rows: Sequence[Row], replicas: Replicas, micro_batches: int, is_plain: bool) -> Flaw | None:
    """Return the deadlock of rows that are each correct."""
    ahead = max(row.ahead for row in rows)
    steps = [steps_of(row, 1 + 2 * ahead, micro_batches) for row in rows]
    slots = dry_run(steps, len(replicas))
    heads = {r: steps[r][len(own)][0] for r, own in enumerate(slots) if len(own) < len(steps[r])}
    if not heads:
        return None
    waits, awaited = [], {}
    for r, head in heads.items():
        source = _input_of(head, len(replicas))
        assert source is not None, "an action without input never waits"
        stage, kinds = source[0], ("B", "I") if source[1] == "B" else ("F",)
        awaited[r] = worker = replicas[stage][(head.micro_batch or 0) % len(replicas[stage])]
        wanted = (a for a in rows[worker] if a.stage == stage and a.kind in kinds)
        action = next(a for a in wanted if a.micro_batch == head.micro_batch)
        waits.append(
            f"{row_name(r, is_plain)} at {token(head, is_plain)} waits for {token(action, is_plain)} of "
            f"{row_name(worker, is_plain)}"
        )
    # A stuck row waits for another stuck row, so following the waits ends in a cycle.
    culprit = min(heads)
    for _ in heads:
        culprit = awaited[culprit]
    position, cell = list(rows[culprit]).index(heads[culprit]), token(heads[culprit], is_plain)
    return Flaw(row_name(culprit, is_plain), culprit, position, cell, f"deadlock, {'; '.join(waits)}")


# ---- drawing -------------------------------------------------------------------------------------------------------


def drawn(schedule: Schedule) -> str:
    """Draw a grid, see ``Schedule.__str__``."""
    workers = "" if schedule.is_plain else f", workers {schedule.workers}"
    flush = "" if schedule.flush else ", no flush"
    title = (
        f"{schedule.name}: stages {schedule.stages}{workers}, micro-batches {schedule.micro_batches}{flush}"
    )
    flaw = schedule.flaw()
    if flaw is None:
        steps = [steps_of(row, 1, schedule.micro_batches) for row in schedule.rows]
    else:  # the rows unchanged, to which the flaw's position refers
        steps = [[(action, 0) for action in row] for row in schedule.rows]
    # Actions ahead of their turn cannot be drawn for a single turn.
    slots = dry_run(steps, schedule.stages) if flaw is None or schedule.flush else [[] for _ in steps]
    cells = [[token(a if flaw else a._replace(ahead=0), schedule.is_plain) for a, _ in own] for own in steps]
    grid = draw_grid("stage" if schedule.is_plain else "worker", cells, slots, flaw)
    return "\n".join([title, *grid, *([str(flaw)] if flaw else [])])


def draw_grid(
    name: str, cells: Sequence[Sequence[str]], slots: Sequence[Sequence[int]], flaw: Flaw | None
) -> list[str]:
    """Draw one line per row with a cell per time slot, aligned; the faulty cell in [brackets].

    ``name``: what rows are. ``slots``: of each cell that a dry run reached; later cells follow without slots.
    """
    lines: list[list[str]] = []
    for row, own in zip(cells, slots):
        line: list[str] = []
        for position, cell in enumerate(row):
            if position < len(own):  # reached by the dry run: slots in which the worker waited stay blank
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
