"""A comparison for a person: the table, printed or as Markdown, what was equal for all, and one sentence of advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from avgpipe.report.compare import DOES_NOT_FIT, OK, Comparison, Figures, Outcome, spell
from avgpipe.report.compare_advice import CLOSE, advice, listed
from avgpipe.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

_TEXTS = (0, 2)  # columns that are no numbers
_SHORT_S = 20.0

# ---- the table -----------------------------------------------------------------------------------------------------


def headings(comparison: Comparison) -> list[str]:
    return ["system", "K/N/M", "schedule", *(column.heading for column in comparison.columns())]


def cells(comparison: Comparison, outcome: Outcome) -> list[tuple[str, bool]]:
    """The text of each cell of a system's row, and whether it is the best of its column."""
    columns, figures = comparison.columns(), outcome.figures
    if figures is None:
        return [
            (outcome.system, False),
            ("-", False),
            (outcome.status, False),
            *[("-", False)] * len(columns),
        ]
    place = f"{figures.stages}/{figures.pipelines}/{figures.micro_batches}"
    row = [(outcome.system, False), (place, False), (_schedule(outcome, figures), False)]
    for column in columns:
        value = column.value(figures)
        best = outcome.system in comparison.best_systems(column)
        row.append(("-" if value is None else column.spell(value), best))
    return row


def _schedule(outcome: Outcome, figures: Figures) -> str:
    if outcome.status == DOES_NOT_FIT:
        return f"does not fit: {outcome.reason}"
    if figures.replicas == 1:
        return figures.schedule
    return f"{figures.replicas} replicas" + (f", {figures.schedule}" if figures.stages > 1 else "")


def table(comparison: Comparison) -> Table:
    """For rich; a star marks the best of each column."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings(comparison)):
        made.add_column(
            heading.replace(" ", "\n", 1),
            justify="left" if number in _TEXTS else "right",
            no_wrap=number == 0,
            overflow="fold",
        )
    for outcome in comparison.outcomes:
        row = cells(comparison, outcome)
        texts = [f"[bold]{text}*[/bold]" if best else f"{text} " for text, best in row]
        made.add_row(*texts, style="" if outcome.status == OK else "dim")
    return made


def markdown(comparison: Comparison) -> str:
    """The table, the best of each column in bold, the notes as a list and the advice; ends in a line break."""
    head = headings(comparison)
    lines = [f"# {comparison.what}: systems compared", "", _line(head)]
    lines.append(_line(["---" if number in _TEXTS else "---:" for number in range(len(head))]))
    for outcome in comparison.outcomes:
        row = cells(comparison, outcome)
        lines.append(_line([f"**{text}**" if best else text for text, best in row]))
    lines += ["", *(f"- {note}" for note in notes(comparison)), "", advice(comparison)]
    return "\n".join(lines) + "\n"


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


# ---- below the table -----------------------------------------------------------------------------------------------


def notes(comparison: Comparison) -> list[str]:
    """Sentences: what gave no figures and why, what runs warned of, what was equal for all, and what the figures do not
    say.
    """
    lines = [f"{o.system}: {_without_figures(o)}" for o in comparison.outcomes if o.status != OK]
    lines += [f"{o.system}: {warning}." for o in comparison.outcomes for warning in o.warnings]
    figures = [figures for _, figures in comparison.ranked]
    if not figures:
        return lines
    lines.append(f"Equal for all: {', '.join(_equal(comparison, figures))}.")
    if comparison.memory_limit_bytes is not None:
        limit = format_bytes(comparison.memory_limit_bytes)
        lines.append(f"Memory limit: {limit} a worker, against the peak that each run had.")
    lines += _of_learning(comparison)
    least, shortest = min(f.epochs for f in figures), min(f.train_s for f in figures)
    if least < 1:
        lines.append(f"s/epoch is reckoned from {spell(least)} of an epoch.")
    if shortest < _SHORT_S:
        lines.append(f"The shortest run trained {format_seconds(shortest)}: its start weighs much in that.")
    lines.append(
        "Peak memory: of the worker that had most. Busy: mean of the workers. Seconds: without validations."
    )
    lines.append(
        "One run of each: on a machine that does other work, too, samples/s vary from run to run, and less than "
        f"{100 * CLOSE:.0f} % is no difference."
    )
    return lines


def _without_figures(outcome: Outcome) -> str:
    if outcome.status == DOES_NOT_FIT:
        return f"does not fit: {outcome.reason}; left out of the ranking."
    return f"{outcome.status}{': ' if outcome.reason else ''}{outcome.reason}".rstrip(".") + "."


def _equal(comparison: Comparison, figures: Sequence[Figures]) -> Iterator[str]:
    yield comparison.what
    yield f"{comparison.workers} worker{'s' if comparison.workers != 1 else ''}"
    for what, values in (
        ("seed {}", [f.seed for f in figures]),
        ("batches of {} samples", [f.batch_size for f in figures]),
        ("{} batches", [f.batches for f in figures]),
        ("{} samples", [f.samples for f in figures]),
    ):
        if len(set(values)) == 1:
            yield what.format(values[0])
        elif comparison.target is not None and what == "{} batches":
            yield f"the order of batches, {min(values)} to {max(values)} of them, until the target"


def _of_learning(comparison: Comparison) -> Iterator[str]:
    if comparison.target is not None:
        missed = [name for name, f in comparison.ranked if f.seconds_to_target is None]
        never = f"; not reached by {listed(missed)}" if missed else ""
        yield f"Target: {comparison.metric_name} {spell(comparison.target)}{never}."
    if comparison.trivial is not None:
        trivial = f"{comparison.metric_name} {spell(comparison.trivial)}"
        short = ", and no system beats it: too short a run to judge what they learn"
        yield f"The best answer that looks at no input has {trivial}{'' if comparison.beaten_trivial else short}."
