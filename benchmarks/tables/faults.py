"""The cost of a lost pipeline or process, and of being prepared for it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmarks.tables.markdown import MIB, NOTHING, Record, against, table

_KILL_PAUSE_S = 0.5  # bar
_NOTICED_S = 1.0  # after the timeout
_WRONG = ("samples", "exit codes", "left over")
_KILL_S, _BACK_S, _COST_PERCENT = 2.0, 5.0, 2.0  # bars


def faults_lost_pipeline(record: Record) -> str:
    """A row for each number of stages and kind of loss."""
    rows = []
    for stages in record["stages"]:
        for kind, bar in (("kill", _KILL_S), ("hang", record["timeout_s"])):
            trials = [t for t in record["trials"] if (t["stages"], t["kind"]) == (stages, kind)]
            good = [t for t in trials if "failure" not in t]
            if not good:
                continue
            compared = [sum(t["compared"][part] for t in good) for part in ("before", "without", "again")]
            unequal = sum(len(t["unequal"]) for t in good)
            failures = len(trials) - len(good)
            rows.append(
                (
                    f"K = {stages}, {kind}",
                    len(trials),
                    f"**{failures}**" if failures else 0,
                    f"{bar:g} s",
                    *_spread((t["late_s"] for t in good), bar),
                    f"{max(t['late_after_s'] for t in good):.2f} s",
                    *_spread(t["back_after_s"] for t in good),
                    " + ".join(map(str, compared)),
                    f"**{unequal}**" if unequal else 0,
                    sum(t["samples_missing"] for t in good),
                )
            )
    return table(
        "| trials: | runs that ended: | bar: | late, median: | worst: | worst when it joins again: | "
        "back after, median: | worst: | weights compared, before + without + again: | unequal: | samples lost:",
        rows,
    )


def faults_pauses(record: Record) -> str:
    """A row for each case and kind of fault."""
    rows = []
    groups = dict.fromkeys((trial["case"], trial["kind"]) for trial in record["trials"])
    for case, kind in groups:
        trials = [t for t in record["trials"] if (t["case"], t["kind"]) == (case, kind)]
        bar = _KILL_PAUSE_S if kind == "kill" else record["timeout_s"] + _NOTICED_S
        wrong = [
            sum(any(text.startswith(column) for text in t["wrong"]) for t in trials) for column in _WRONG
        ]
        others = sum(bool(t["wrong"]) for t in trials)
        rows.append(
            (
                f"{case}, {kind}",
                len(trials),
                f"{bar:g} s",
                *_spread((t["pause_s"] for t in trials if t["pause_s"] is not None), bar),
                _spread((t["pause_later_s"] for t in trials if t["pause_later_s"] is not None), bar)[1],
                *_spread(t["back_after_s"] for t in trials if t["back_after_s"] is not None),
                *(f"**{count}**" if count else 0 for count in (*wrong, others)),
            )
        )
    return table(
        "| trials: | bar: | pause of the others, median: | worst: | worst when it joins again: | "
        "back after, median: | worst: | samples miscounted: | "
        "wrong exit code: | left over: | runs with any broken promise:",
        rows,
    )


def faults_lost_worker(record: Record) -> str:
    """A row for each rank."""
    rows = []
    for rank in range(record["stages"]):
        trials = [t for t in record["trials"] if t["rank"] == rank]
        good = [t for t in trials if "failure" not in t]
        if not good:
            continue
        failures, unequal = len(trials) - len(good), sum(len(t["unequal"]) for t in good)
        rows.append(
            (
                f"rank {rank}",
                len(trials),
                f"**{failures}**" if failures else 0,
                sum("spare process" in line for t in good for line in t["said"]),
                *_spread((t["back_after_s"] for t in good), _BACK_S),
                *_spread((t["lost_s"] for t in good), record["copies_every_s"]),
                max(t["batches_lost"] for t in good),
                sum(t["compared"] for t in good),
                f"**{unequal}**" if unequal else 0,
                sum(t["results_missing_or_twice"] for t in good),
            )
        )
    return table(
        "| trials: | runs that ended: | replaced by a spare: | back after, median: | worst: | "
        "work lost, median: | worst: | batches lost, worst: | weights compared: | unequal: | results missing or twice:",
        rows,
    )


def faults_copies(record: Record) -> str:
    """A row for each way of each case."""
    rows = []
    for case in record["cases"]:
        for row in case["rows"]:
            has_copies = row["every_s"] is not None
            rows.append(
                (
                    f"{case['name']}, N = {case['pipelines']}, {row['name']}",
                    f"{1e3 * row['median_s']:.1f}",
                    f"{1e3 * row['quartile1_s']:.1f}-{1e3 * row['quartile3_s']:.1f}",
                    f"{sum(row['copies']) / len(row['copies']):.1f}" if has_copies else "",
                    f"{case['batches'] * row['median_s']:.0f} s",
                    f"{against(100 * row['cost'], most=_COST_PERCENT)} %" if has_copies else "",
                    f"{against(100 * row['cost_of_pairs'], most=_COST_PERCENT)} %" if has_copies else "",
                )
            )
    return table(
        "| ms/batch: | quartiles: | copies in a turn: | of: | cost of medians: | median of pairs:", rows
    )


def faults_copies_memory(record: Record) -> str:
    """A row for each process."""
    if not record["memory"]:
        return NOTHING
    rows = [
        (
            f"N = {case['pipelines']}, rank {rank['rank']}",
            *(f"{rank[name] / MIB:.0f}" for name in ("copy_bytes", "computed_bytes")),
            f"{(rank['with_bytes'] - rank['without_bytes']) / MIB:.0f}",
            f"{rank['without_bytes'] / MIB:.0f}",
        )
        for case in record["memory"]
        for rank in case["ranks"]
    ]
    header = (
        "MiB | its own state: | two copies of it and its neighbour's: | measured: | a run without copies:"
    )
    return table(header, rows)


def _spread(seconds: Iterable[float], most: float | None = None) -> tuple[str, str]:
    """Return median and worst; in bold above `most`."""
    known = list(seconds)
    if not known:
        return "", ""
    return tuple(f"{against(s, most=most)} s" for s in (statistics.median(known), max(known)))  # type: ignore[return-value]
