"""The cost of checkpoints."""

from __future__ import annotations

import statistics

from benchmarks.tables.markdown import Record, ms, table


def checkpoints(record: Record) -> str:
    """Return each case's medians over the rounds: the extra time of a stretch with a checkpoint.

    It is the difference from the stretch without one in the same round.

    In percent it is a share of the time between two checkpoints.
    """
    rows, every_s = [], record["every_s"]
    for row in record["rows"]:
        plain, sizes = row["ways"]["none"], (row["checkpoint_bytes"], row["copy_bytes"])
        for way, name, most in (
            ("meanwhile", "written during training", record["most"]),
            ("waiting", "training waits", None),
        ):
            found = row["ways"][way]
            more = [a - b for a, b in zip(found["seconds"], plain["seconds"])]
            work = statistics.median(a - b for a, b in zip(found["processor_s"], plain["processor_s"]))
            begins = [row["case"], *(f"{size / 1e6:,.0f}" for size in sizes)] if most else [""] * 3
            costs = ms(statistics.median(more)), _share([s / every_s for s in more], most)
            rows.append([*begins, name, *costs, ms(found["pause_s"]), ms(work)])
    of_size = "checkpoint, MB: | copy in memory, MB:"
    of_time = f"costs ms: | of {every_s:g} s: | training stops for ms: | processor ms:"
    return table(f"stages, pipelines | {of_size} | | {of_time}", rows)


def _share(shares: list[float], most: float | None) -> str:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(shares, n=4)
    text = f"{100 * middle:.1f} %"
    missed = most is not None and round(middle, 3) > most
    return f"{f'**{text}**' if missed else text} ({100 * low:.1f} to {100 * high:.1f})"
