"""Faults at places drawn from seeds, and their outcomes."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from avgpipe.units import format_seconds
from benchmarks.tables.markdown import Record, table

WRONG = ("hangs", "ended", "exit codes", "wrong blame", "left over", "samples", "losses")


def injected(record: Record) -> str:
    """A row for each way to start a run."""
    rows = []
    # Only runs over several hosts have commands whose exit codes are checked.
    has_codes = any("hosts" in command["ways"] for command in record["commands"])
    checked = [column for column in WRONG if has_codes or column != "exit codes"]
    for way in ("isolate", "hosts", "spares", "plain"):
        some = [command["ways"][way] for command in record["commands"] if way in command["ways"]]
        if not some:
            continue
        sums = [sum(row[name] for row in some) for name in ("runs", "went_on", "trained_again")]
        wrong = [sum(row["wrong"].get(column, 0) for row in some) for column in checked]
        faults = sum(len(each) for (of, _), each in _pauses(record).items() if of == way)
        rows.append((way, sums[0], faults, *sums[1:], *(f"**{count}**" if count else 0 for count in wrong)))
    columns = " | ".join(f"{column}:" for column in checked)
    return table(
        f"way | runs: | faults: | runs that continued: | samples trained by others: | {columns}", rows
    )


def injected_kinds(record: Record) -> str:
    """Count the faults of each kind, and list how long other processes paused."""
    rows = []
    for (way, kind), each in sorted(_pauses(record).items()):
        known = [pause for pause in each if pause is not None]
        shown = (format_seconds(statistics.median(known)), format_seconds(max(known))) if known else ("", "")
        rows.append((way, kind, len(each), *shown))
    return table("way | kind | faults: | pause of the others, median: | longest:", rows)


def _pauses(record: Record) -> dict[tuple[str, str], list[Any]]:
    found: dict[tuple[str, str], list[Any]] = {}
    for command in record["commands"]:
        for row in command["pauses_s"]:
            found.setdefault((row["way"], row["kind"]), []).extend(row["each"])
    return found


def injected_phases(record: Record) -> str:
    """Count the faults by phase, and by numbers of stages and pipelines."""
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
    """List the violations, and the commands that repeat them."""
    rows = [
        (f"`{command['command']}`", violation.replace("|", "/"))
        for command in record["commands"]
        for violation in command["violations"]
    ]
    return table("command | violation", rows) if rows else "No violations."
