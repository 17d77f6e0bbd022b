"""What tuning found, for a reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from avgpipe.measure.tuning import TRAVERSAL, TunedPlan, TuningResult, advice

if TYPE_CHECKING:
    from rich.table import Table

_FILE_COLUMNS = 140  # of a table that is no terminal's
_MIB = 2**20
_HEADINGS = (
    *("plan", "K", "N", "M", "cut", "advance", "recompute"),
    *("predicted\nms/batch", "measured\nms/batch", "error", "samples/s", "predicted\nMiB", "measured\nMiB"),
)
_MOST_NAMED = 6  # numbers of a list that are all written


def show(found: TuningResult, out: str) -> None:
    from rich.console import Console

    screen = Console(highlight=False, markup=False)
    if not screen.is_terminal:
        screen.width = _FILE_COLUMNS
    screen.print(table(found))
    for line in lines(found):
        screen.print(line)
    screen.print(f"plan: {out}")


def table(found: TuningResult) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in _HEADINGS:
        text = heading in ("plan", "cut")
        made.add_column(heading, no_wrap=heading != "cut", justify="left" if text else "right")
    for row in (*found.rows, *found.baselines):
        made.add_row(*_cells(found, row))
    return made


def _cells(found: TuningResult, row: TunedPlan) -> list[str]:
    plan, trial = row.plan, row.trial
    width = (plan.replication or [1])[0]
    memory = f"{max(trial.memory_bytes) / _MIB:.0f}" if trial is not None and trial.memory_bytes else "-"
    return [
        row.what,
        f"{plan.stages} x {width}" if width > 1 else str(plan.stages),
        str(plan.pipelines),
        str(plan.micro_batches),
        _some(plan.partition or []),
        _advance(plan.advance),
        plan.recompute,
        f"{1e3 * row.forecast.batch_s:.1f}",
        "-" if trial is None else f"{1e3 * trial.batch_s:.1f}",
        "-" if row.error is None else f"{100 * row.error:+.1f} %",
        f"{found.samples_per_s(row):.4g}",
        f"{max(row.forecast.memory_bytes) / _MIB:.0f}",
        memory,
    ]


def _advance(advance: object) -> str:
    if advance is None:
        return "K-1-k"
    return _some(advance) if isinstance(advance, (list, tuple)) else str(advance)


def _some(numbers: Sequence[int] | Sequence[str]) -> str:
    """All of a short list, the first of a long one."""
    shown = ",".join(map(str, numbers[:_MOST_NAMED]))
    return shown + (f",... ({len(numbers)})" if len(numbers) > _MOST_NAMED else "") or "-"


def lines(found: TuningResult) -> list[str]:
    """What else there is to say."""
    said = [
        f"{found.considered} sizes of plans were considered"
        + (f", {found.excluded} of those simulated do not fit into the memory" if found.excluded else "")
        + "; "
        + ", ".join(f"{name.removesuffix('_s')} {seconds:.1f} s" for name, seconds in found.seconds.items())
    ]
    for name, row in (("best", found.best), ("runner-up", found.runner_up)):
        if row is not None:
            said.append(f"{name}: {row.what}, {_memory(row)}")
    said += [f"{row.what} was not timed: {row.failure}" for row in found.rows if row.failure]
    every = [row.batch_s for row in found.baselines if row.what == TRAVERSAL and row.trial is not None]
    if every:
        ratio = found.best.batch_s / min(every)
        said.append(
            f"traversal: the best of {len(every)} settings takes {1e3 * min(every):.1f} ms, the plan {ratio:.3f} of "
            f"it; measuring them took {found.seconds['traversal_s']:.0f} s"
        )
    return [*said, advice(found)]


def _memory(row: TunedPlan) -> str:
    """Peak of each worker."""
    predicted = _sizes(row.forecast.memory_bytes)
    if row.trial is None or not row.trial.memory_bytes:
        return f"peak memory per worker {predicted} MiB predicted"
    return f"peak memory per worker {predicted} MiB predicted, {_sizes(row.trial.memory_bytes)} MiB measured"


def _sizes(sizes: tuple[float, ...]) -> str:
    return _some([f" {size / _MIB:.0f}" for size in sizes]).strip()
