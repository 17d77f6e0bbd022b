"""The speed of two versions of the library."""

from __future__ import annotations

import statistics

from benchmarks.tables.markdown import Record, against, table

_SAME_CODE = "torch ", "one process", "eager autograd", "elastic_"  # rows that measure the machine
_MOST = 1.03


def versions(record: Record) -> str:
    """Return a row for each label: the medians of both versions, and their ratio; bold above the bound."""
    rows = []
    for row in record["rows"]:
        before, after = (statistics.median(row[name]) for name in ("before", "after"))
        label = row["label"]
        is_same = any(text in label for text in _SAME_CODE)
        ratio = against(after / before, most=None if is_same else _MOST)
        rows.append((f"{label}; the same code" if is_same else label, _short(before), _short(after), ratio))
    return table("| before: | after: | ratio:", rows)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
