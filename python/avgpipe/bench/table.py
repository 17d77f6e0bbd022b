"""Results for a person: a table for each section."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from avgpipe.bench.result import Row, SectionResult

_STYLES = {"ours": "bold", "baseline": "", "limit": "dim"}


def table(result: SectionResult) -> Group:
    """The section's title, a row for each variant, and what else is to be known.

    "ours is" stands at a baseline: how many times longer it took than our first row that does the same.
    """
    made = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    made.add_column("", no_wrap=True)
    for heading in ("ms", "quartiles", "bytes/el.", "GB/s", "of limit", "ours is"):
        made.add_column(heading, justify="right", no_wrap=True)
    for row in result.rows:
        made.add_row(
            row.name,
            f"{row.median_s * 1e3:.3f}",
            f"{row.quartile1_s * 1e3:.3f}-{row.quartile3_s * 1e3:.3f}",
            f"{row.bytes_per_element:g}",
            f"{row.gb_per_s:.1f}",
            "-" if row.fraction_of_limit is None else f"{row.fraction_of_limit:.2f}",
            _faster(result, row),
            style=_STYLES[row.role],
        )
    return Group(Text(result.title, style="bold"), made, _notes(result))


def _faster(result: SectionResult, row: Row) -> str:
    ratio = next((ours.ratios[row.name] for ours in result.rows if row.name in ours.ratios), None)
    return "" if ratio is None else f"{ratio:.2f}x"


def _notes(result: SectionResult) -> Text:
    lines = [result.asks]
    if result.limit is not None:
        lines.append(f"limit: {result.limit}; memory: {result.memory_bytes / 2**30:.2f} GiB")
    lines += [
        f"{row.name}: compiled in {row.compile_s:.1f} s" for row in result.rows if row.compile_s is not None
    ]
    lines += [f"left out: {item.name}: {item.reason}" for item in result.skipped]
    return Text("\n".join([*lines, ""]))
