"""The text of a comparison: one sentence of advice, the table, and the notes below it."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from avgpipe.units import format_bytes, format_seconds
from avgpipe_lab.compare.comparison import (
    DOES_NOT_FIT,
    OK,
    Column,
    Comparison,
    Figures,
    SystemResult,
    format_figure,
)

CLOSE = 0.05  # runs of one system on one machine differ by this much
_APART = f"less than {100 * CLOSE:.0f} % apart"
_TEXTS = (0, 2)  # columns of the table that hold text
_SHORT_S = 20.0
_TEXT_COLUMNS = 140

Range = tuple[float | None, float | None]  # least and greatest of several seeds; None: a run without a value


def plain(comparison: Comparison) -> str:
    """Return the table, notes and advice as a text."""
    console = Console(width=_TEXT_COLUMNS, file=io.StringIO(), highlight=False, markup=False)
    for item in (table(comparison), *notes(comparison), advice(comparison)):
        console.print(item, soft_wrap=isinstance(item, str))
    return str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]


def listed(names: Sequence[str]) -> str:
    """Join names: "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


# ---- advice --------------------------------------------------------------------------------------------------


def advice(comparison: Comparison) -> str:
    """Return the system that reached the target first, else the fastest; within ``CLOSE`` they count as equal."""
    ranked = [name for name, _ in comparison.ranked]
    if len(ranked) < 2:
        said = f"none, as figures exist for {listed(ranked) or 'no system'}{' only' * len(ranked)}"
    elif comparison.known("seconds_to_target"):
        said = _by_target(comparison)
    elif comparison.known("samples_per_second"):
        said = _by_speed(comparison)
    else:
        said = "none, as no system trained long enough to be timed"
    return f"Advice: {said}."


def _ratio(ratio: float, more: str, times: str) -> str:
    return f"{100 * (ratio - 1):.0f} % {more}" if ratio < 2 else f"{ratio:.1f} times {times}"


def _by_target(comparison: Comparison) -> str:
    times = comparison.known("seconds_to_target")
    spreads = {o.system: o.spread("seconds_to_target") for o in comparison.outcomes}
    first, *others = sorted(times, key=times.__getitem__)
    near = {name for name in others if times[name] <= times[first] * (1 + CLOSE)}
    mixed = {name for name in others if _overlap(spreads[first], spreads[name])}
    level = [name for name in others if name in near | mixed]
    when = f"after {format_figure(times[first])} s of training"
    if not others:
        return f"only {first} reached the target, {when}: use it"
    if level:
        apart = "and the ranges of their seeds overlap" if mixed - near else _APART
        return f"{listed([first, *level])} reached the target first, {when}, {apart}: take any of them"
    longer = _ratio(times[others[0]] / times[first], "longer", "as long")
    return f"{first} reached the target first, {when}; {others[0]} needed {longer}: use {first}"


def _overlap(quick: Range | None, slow: Range | None) -> bool:
    """Return whether the fastest of a system's seeds was faster than the slowest of another's."""
    return quick is not None and slow is not None and (slow[0] or 0.0) <= (quick[1] or math.inf)


def _by_speed(comparison: Comparison) -> str:
    speeds, ranked = comparison.known("samples_per_second"), dict(comparison.ranked)
    order = sorted(speeds, key=speeds.__getitem__, reverse=True)
    fastest = [name for name in order if speeds[name] * (1 + CLOSE) >= speeds[order[0]]]
    sentence = f"{order[0]} is fastest here"
    if len(fastest) > 1:
        sentence = f"{listed(fastest)} are equally fast here ({_APART})"
    elif len(order) > 1:
        ratio = speeds[order[0]] / speeds[order[1]]
        sentence += f", {_ratio(ratio, 'faster than', 'as fast as')} {order[1]}"
    if learner := _learned_more(comparison, fastest):
        return f"{sentence}, but {learner}: compare with a --target to see which reaches it first"
    for name in fastest:
        if ranked[name].stages == 1 and ranked[name].replicas > 1:
            simplest = "" if len(fastest) == 1 else f", {name} is the simplest of them"
            return f"{sentence}{simplest}, and its model fits into each worker: use it"
    sizes = sorted((ranked[name].peak_memory_bytes, name) for name in fastest)
    if len(sizes) == 1:
        return f"{sentence}: use it"
    size, least = sizes[0]
    if sizes[1][0] <= size * (1 + CLOSE):
        return f"{sentence}: take any of them"
    return f"{sentence}: use {least}, which needs least memory ({format_bytes(size)})"


def _learned_more(comparison: Comparison, fastest: Sequence[str]) -> str:
    """Describe a system whose metric is better than that of the fastest by more than ``CLOSE``, if there is one.

    If no system beats the trivial answer, metrics do not show anything yet, and the result is "".
    """
    metrics = comparison.known("best_metric")
    if not comparison.beaten_trivial or not all(name in metrics for name in fastest):
        return ""
    choose = min if comparison.lower_is_better else max
    best, ours = choose(metrics, key=metrics.__getitem__), choose(metrics[name] for name in fastest)
    if best in fastest or abs(metrics[best] - ours) <= CLOSE * abs(ours):
        return ""
    figures = f"{comparison.metric_name} {format_figure(metrics[best])} against {format_figure(ours)}"
    return f"{best} learned more from the same samples ({figures})"


# ---- text ----------------------------------------------------------------------------------------------------


def headings(comparison: Comparison) -> list[str]:
    sizes = "stages, pipelines, micro-batches"
    return ["system", sizes, "schedule", *(column.heading for column in comparison.columns())]


def cells(comparison: Comparison, outcome: SystemResult) -> list[tuple[str, bool]]:
    """Return the text of each cell of a system's row, and whether it is the best of its column."""
    f = outcome.figures
    place = f"{f.stages}/{f.pipelines}/{f.micro_batches}" if f else "-"
    schedule = f.schedule if f else outcome.status
    if outcome.status == DOES_NOT_FIT:
        schedule = f"does not fit: {outcome.reason}"
    elif f and f.replicas > 1:
        schedule = f"{f.replicas} replicas" + (f", {schedule}" if f.stages > 1 else "")
    row = [(outcome.system, False), (place, False), (schedule, False)]
    for column in comparison.columns():
        best = outcome.system in comparison.best_systems(column)
        row.append((_cell(outcome, column), best))
    return row


def _cell(outcome: SystemResult, column: Column) -> str:
    """Return the text of a figure: 31, or of several seeds 31 (29..36)."""

    def text(value: float | None) -> str:
        return "-" if value is None else column.format(value)

    spread = outcome.spread(column.key) if column.spreads else None
    ends = "" if spread is None else f" ({text(spread[0])}..{text(spread[1])})"
    return text(outcome.value(column.key)) + ends


def table(comparison: Comparison) -> Table:
    """Make the table for rich; a star marks the best of each column."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings(comparison)):
        narrow = heading.replace(", ", ",\n").replace("-", "-\n")
        lines = narrow if "," in heading else heading.replace(" ", "\n", 1)
        made.add_column(
            lines, justify="left" if number in _TEXTS else "right", no_wrap=number == 0, overflow="fold"
        )
    for outcome in comparison.outcomes:
        row = enumerate(cells(comparison, outcome))
        texts = [Text(text) if n in _TEXTS else _starred(text, best) for n, (text, best) in row]
        made.add_row(*texts, style="" if outcome.status == OK else "dim")
    return made


def _starred(text: str, best: bool) -> Text:
    """Make a cell of the table, with a figure's spread in a line below."""
    value, _, spread = text.partition(" (")
    below = f"\n({spread}" if spread else ""
    return Text.assemble((f"{value}*", "bold") if best else f"{value} ", below)


def markdown(comparison: Comparison) -> str:
    """Return the table with the best values in bold, the notes as a list, and the advice; ends in a line break."""
    head = headings(comparison)
    rows = [head, ["---" if number in _TEXTS else "---:" for number in range(len(head))]]
    found = (cells(comparison, outcome) for outcome in comparison.outcomes)
    rows += [[f"**{text}**" if best else text for text, best in row] for row in found]
    lines = [f"# {comparison.what}: systems compared", ""]
    lines += [f"| {' | '.join(text.replace('|', chr(92) + '|') for text in row)} |" for row in rows]
    lines += ["", *(f"- {note}" for note in notes(comparison)), "", advice(comparison), ""]
    return "\n".join(lines)


def notes(comparison: Comparison) -> list[str]:
    """Return sentences: systems without figures and why, warnings of runs, and limits of the figures."""
    lines = []
    for o in comparison.outcomes:
        if o.status != OK:
            why = ": ".join(filter(None, (o.system, o.status, o.reason))).rstrip(".")
            lines.append(f"{why}; left out of the ranking." if o.status == DOES_NOT_FIT else f"{why}.")
    lines += [f"{o.system}: {warning}." for o in comparison.outcomes for warning in o.warnings]
    figures = [figures for _, figures in comparison.ranked]
    if not figures:
        return lines
    lines.append(f"Equal for all: {', '.join(_equal(comparison, figures))}.")
    if comparison.memory_limit_bytes is not None:
        limit = format_bytes(comparison.memory_limit_bytes)
        lines.append(f"Memory limit: {limit} per worker, compared with the peak of each run.")
    if comparison.target is not None:
        reached = comparison.known("seconds_to_target")
        missed = [name for name, _ in comparison.ranked if name not in reached]
        never = f"; not reached by {listed(missed)}" if missed else ""
        lines.append(f"{comparison.goal}{never}.")
    if comparison.trivial is not None:
        trivial = f"{comparison.metric_name} {format_figure(comparison.trivial)}"
        short = ", and no system beats it: the run is too short to judge what they learn"
        unbeaten = "" if comparison.beaten_trivial else short
        lines.append(f"The best answer that ignores the input has {trivial}{unbeaten}.")
    least, shortest = min(f.epochs for f in figures), min(f.train_seconds for f in figures)
    if least < 1:
        lines.append(f"s/epoch is extrapolated from {format_figure(least)} of an epoch.")
    if shortest < _SHORT_S:
        lines.append(
            f"The shortest run trained {format_seconds(shortest)}, so its start-up matters in the figures."
        )
    return [
        *lines,
        "Peak memory: of the worker with most. Busy: mean of the workers. Seconds: without validations.",
        _how_often(comparison),
    ]


def _how_often(comparison: Comparison) -> str:
    varies = "if the machine does other work, samples/s vary from run to run"
    if comparison.seeds == 1:
        return f"One run of each: {varies}, and less than {100 * CLOSE:.0f} % does not count as a difference."
    return f"Medians of {comparison.seeds} seeds, with least and greatest where they matter; {varies}."


def _equal(comparison: Comparison, figures: Sequence[Figures]) -> Iterator[str]:
    yield comparison.what
    yield f"{comparison.workers} worker{'s' if comparison.workers != 1 else ''}"
    phrases = ("seed {}", "batches of {} samples", "{} batches", "{} samples")
    for name, phrase in zip(("seed", "batch_size", "batches", "samples"), phrases):
        values = {getattr(f, name) for f in figures}
        if name == "seed" and comparison.seeds > 1:
            yield f"{comparison.seeds} seeds"
            continue
        if len(values) == 1:
            yield phrase.format(*values)
        elif comparison.target is not None and name == "batches":
            yield f"the order of batches ({min(values)} to {max(values)} batches until the target)"
