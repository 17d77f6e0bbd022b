"""Faults at places drawn from seeds, and what became of them."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from avgpipe.units import format_seconds
from benchmarks.tables.markdown import Record, table

WRONG = ("hangs", "ended", "wrong blame", "left over", "samples", "losses")


def injected(record: Record) -> str:
    """A row for each way to start a run."""
    rows = []
    for way in ("isolate", "spares", "plain"):
        some = [command["ways"][way] for command in record["commands"] if way in command["ways"]]
        sums = [sum(row[name] for row in some) for name in ("runs", "went_on", "trained_again")]
        wrong = [sum(row["wrong"].get(column, 0) for row in some) for column in WRONG]
        faults = sum(len(each) for (of, _), each in _pauses(record).items() if of == way)
        rows.append((way, sums[0], faults, *sums[1:], *(f"**{count}**" if count else 0 for count in wrong)))
    columns = " | ".join(f"{column}:" for column in WRONG)
    return table(
        f"way | runs: | faults: | runs that went on: | samples that others took over: | {columns}", rows
    )


def injected_kinds(record: Record) -> str:
    """How many faults there were of each kind, and how long others then paused."""
    rows = []
    for (way, kind), each in sorted(_pauses(record).items()):
        known = [pause for pause in each if pause is not None]
        shown = (format_seconds(statistics.median(known)), format_seconds(max(known))) if known else ("", "")
        rows.append((way, kind, len(each), *shown))
    return table("way | kind | faults: | the others paused, median: | longest:", rows)


def _pauses(record: Record) -> dict[tuple[str, str], list[Any]]:
    found: dict[tuple[str, str], list[Any]] = {}
    for command in record["commands"]:
        for row in command["pauses_s"]:
            found.setdefault((row["way"], row["kind"]), []).extend(row["each"])
    return found


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
