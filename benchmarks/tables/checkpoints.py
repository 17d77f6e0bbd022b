"""What checkpoints cost."""

from __future__ import annotations

import statistics

from benchmarks.tables.markdown import Record, ms, table


def checkpoints(record: Record) -> str:
    """The medians of each case over the rounds: what a stretch takes longer than the one without, in the same round."""
    rows = []
    for row in record["rows"]:
        plain = row["ways"]["none"]["seconds"]
        spread = statistics.median(plain) / row["batches"]
        cells = [
            row["case"],
            f"{row['checkpoint_bytes'] / 1e6:,.0f}",
            f"{row['copy_bytes'] / 1e6:,.0f}",
            ms(spread),
        ]
        for way, most in (("meanwhile", record["most"]), ("waiting", None)):
            more = [a / b - 1 for a, b in zip(row["ways"][way]["seconds"], plain)]
            cells += [_cost(more, most), ms(row["ways"][way]["pause_s"])]
        rows.append(cells)
    columns = (
        "stages, pipelines | checkpoint, MB: | copy in memory, MB: | ms per batch: | written meanwhile costs: "
        "| training stops for ms: | waited for costs: | for ms:"
    )
    return table(columns, rows)


def _cost(more: list[float], most: float | None) -> str:
    """The median, and the quarters' ends."""
    low, middle, high = statistics.quantiles(more, n=4)
    text = f"{100 * middle:.1f} %"
    missed = most is not None and round(middle, 3) > most
    return f"{f'**{text}**' if missed else text} ({100 * low:.1f} to {100 * high:.1f})"
