"""Tables and figures in Markdown. Bold figures miss their bar."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from avgpipe.units import format_seconds

Record = dict[str, Any]
MIB = 2**20
NOTHING = "*No record yet.*"


def table(columns: str, rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table. columns: headings between bars; those that end with a colon are aligned right."""
    headings = [heading.strip() for heading in columns.split("|")]
    rule = ["---:" if heading.endswith(":") else "---" for heading in headings]
    lines = [
        [heading.removesuffix(":") for heading in headings],
        rule,
        *([str(c) for c in row] for row in rows),
    ]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines)


def against(value: float, least: float | None = None, most: float | None = None, digits: int = 2) -> str:
    """Return the value, in bold if it is, as printed, below `least` or above `most`."""
    text = f"{value:.{digits}f}"
    missed = (least is not None and float(text) < least) or (most is not None and float(text) > most)
    return f"**{text}**" if missed else text


def ms(seconds: float, digits: int = 0) -> str:
    return f"{1e3 * seconds:,.{digits}f}"


def duration(seconds: float) -> str:
    """Format a duration in a suitable unit."""
    if seconds < 120:
        return format_seconds(seconds)
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def percent(fraction: float, most: float | None = None) -> str:
    text = f"{100 * fraction:+.1f} %"
    return f"**{text}**" if most is not None and abs(100 * fraction) > most else text


def spread_of(errors: Iterable[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"median {100 * statistics.median(sizes):.1f} %, worst {100 * max(sizes):.1f} %"
