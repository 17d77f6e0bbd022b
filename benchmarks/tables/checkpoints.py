"""What checkpoints cost."""

from __future__ import annotations

import statistics

from benchmarks.tables.markdown import Record, ms, table


def checkpoints(record: Record) -> str:
    """The medians of each case over the rounds: what a stretch takes longer than the one without, in the same round."""
    rows = []
    for row in record["rows"]:
        plain, sizes = row["ways"]["none"], (row["checkpoint_bytes"], row["copy_bytes"])
        for way, name, most in (
            ("meanwhile", "written meanwhile", record["most"]),
            ("waiting", "waited for", None),
        ):
            found = row["ways"][way]
            more = [a / b - 1 for a, b in zip(found["seconds"], plain["seconds"])]
            work = statistics.median(a - b for a, b in zip(found["processor_s"], plain["processor_s"]))
            begins = [row["case"], *(f"{size / 1e6:,.0f}" for size in sizes)] if most else [""] * 3
            rows.append([*begins, name, _cost(more, most), ms(found["pause_s"]), ms(work)])
    return table(
        "stages, pipelines | checkpoint, MB: | copy in memory, MB: | | costs: | training stops for ms: | processor ms:",
        rows,
    )


def _cost(more: list[float], most: float | None) -> str:
    """The median, and the quarters' ends."""
    low, middle, high = statistics.quantiles(more, n=4)
    text = f"{100 * middle:.1f} %"
    missed = most is not None and round(middle, 3) > most
    return f"{f'**{text}**' if missed else text} ({100 * low:.1f} to {100 * high:.1f})"
