"""Faults at places drawn from seeds, and what became of them."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from avgpipe.units import format_seconds
from benchmarks.tables.markdown import Record, table

WRONG = ("hangs", "ended", "wrong blame", "left over", "samples", "losses")


def injected(record: Record) -> str:
    """A row for each way to start a run and kind of fault."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for command in record["commands"]:
        for row in command["rows"]:
            rows.setdefault((row["way"], row["kind"]), []).append(row)
    return table(
        "way | kind | runs: | faults: | runs that went on: | pause, median: | longest: | "
        + " | ".join(f"{column}:" for column in WRONG),
        [(*names, *_cells(some)) for names, some in sorted(rows.items())]
        + [("**all**", "", *_cells([row for some in rows.values() for row in some]))],
    )


def _cells(some: list[dict[str, Any]]) -> list[object]:
    pauses = [pause for row in some for pause in row["pauses_s"]]
    shown = [format_seconds(statistics.median(pauses)), format_seconds(max(pauses))] if pauses else ["", ""]
    wrong = [sum(row["wrong"].get(column, 0) for row in some) for column in WRONG]
    sums = [sum(row[name] for row in some) for name in ("runs", "faults", "went_on")]
    return [*sums, *shown, *(f"**{count}**" if count else "0" for count in wrong)]


def injected_phases(record: Record) -> str:
    """How many faults there were by phase, and by numbers of stages and pipelines."""
    phases, sizes = Counter[str](), Counter[str]()
    for command in record["commands"]:
        phases.update(command["phases"])
        sizes[f"K = {command['stages']}, N = {command['pipelines']}"] += command["faults"]
    columns = ["faults by phase", *phases], ["faults by size", *sizes]
    counts = phases, sizes
    return "\n\n".join(
        table(" | ".join([names[0], *(f"{name}:" for name in names[1:])]), [("", *count.values())])
        for names, count in zip(columns, counts)
    )


def injected_violations(record: Record) -> str:
    """What happened that must not, and the command that repeats it."""
    rows = [
        (f"`{command['command']}`", violation.replace("|", "/"))
        for command in record["commands"]
        for violation in command["violations"]
    ]
    return table("command | what happened", rows) if rows else "Nothing happened that must not."
