"""Question: how long does each system take to a target on the papers' cluster?

    python -m benchmarks.papers.targets EMULATED.json STATISTICS.jsonl... [--workloads bert=gpt] [--targets gnmt=4.2]

Joins seconds per epoch (``benchmarks.papers.emulated``) with samples to a target (``benchmarks.statistics.run``, a line
a run: workload, way, seed, losses by samples). Samples to a target are those at which the line through the validation
losses first crosses it.

The published data sets are far larger than the workloads that are trained, so the samples of a way count as multiples
of those that one pipeline without delay needs with the same seed, its "passes": over seeds, the median and the range.
Time to target is seconds per epoch x epochs that one pipeline needs (--epochs, by default one) x passes; ratios of
systems depend on neither. What was not trained, or did not reach the target in most of the seeds, has no time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from avgpipe.files import read_json, read_lines
from benchmarks.common.record import write_record
from benchmarks.papers.forecast import FLOAT_BITS
from benchmarks.statistics.samples import BASELINE, Ways, by_way, passes_to, target_of
from benchmarks.tables.markdown import duration
from benchmarks.tables.papers import nearest

# By system, or by the way that was the best of AvgPipe's: ways of training, the first that is there. Nobody has trained
# three pipelines where there are only those of four, which need more samples.
WAYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("data parallel", "GPipe", "DAPPLE", "zero bubble", "N = 1"), (BASELINE,)),
    "PipeDream": ("pipedream",),
    "PipeDream-2BW": ("2bw",),
    "EA-Pipe": ("ea-pipe",),
    "N = 2": ("N = 2, warm-up", "N = 2"),
    "N = 3": ("N = 4, warm-up", "N = 4"),
    "N = 4": ("N = 4, warm-up", "N = 4"),
    "elastic, N = 2": ("N = 2, avgpipe",),
    "elastic, N = 3": ("N = 4, avgpipe",),
    "elastic, N = 4": ("N = 4, avgpipe",),
    "halves predicted": ("halves, predicted, warm-up", "halves, predicted"),
    "quarters predicted": ("quarters, predicted, warm-up", "quarters, predicted"),
    "2BW, predicted": ("2bw, predicted",),
    "2BW, error-feedback": ("2bw, error feedback",),
}


def way_of(row: dict[str, Any], known: Iterable[str]) -> str | None:
    """Return the way of training that is a row's of the emulated cluster; None where nobody has trained it."""
    system = row["system"]
    bits = f", {row['wire_bits']} bits" * (row["wire_bits"] < FLOAT_BITS)
    for mark in (" (G)", " (P)", bits):
        system = system.replace(mark, "")
    if system == "AvgPipe, best":
        system = row["way"]
    name = system.removeprefix("AvgPipe").lstrip(", ")
    ways = WAYS.get(name, ())
    # What travels as bfloat16 changes losses by less than a thousandth of what seeds do: docs/results/sixteen-bits.md.
    return next((way for way in [*(w + bits for w in ways), *ways] if way in known), None)


def joined(case: dict[str, Any], ways: Ways, target: float, epochs: float = 1.0) -> list[dict[str, Any]]:
    """Return the time to target of each row of a case.

    Args:
        case: Of the record of the emulated cluster.
        ways: Of the workload that stands for its model.
        target: A loss.
        epochs: That one pipeline without delay needs.
    """
    rows = []
    for row in nearest(case):
        way = way_of(row, ways)
        passes = None if way is None else passes_to(ways, way, target)
        times = {
            data: [_known(epoch_s * epochs * value) for value in passes] if passes else None
            for data, epoch_s in row["epoch_s"].items()
        }
        rows.append(
            {
                **{name: row[name] for name in ("system", "described", "epoch_s")},
                "way": way,
                "passes": None if passes is None else [_known(value) for value in passes],
                "seconds_to_target": times,
            }
        )
    return rows


def _known(value: float) -> float | None:
    """JSON has no infinity."""
    return None if value == inf else value


def table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    made = Table("system", "plan", "trained as", "passes", "to target", "over the best", title=title)
    times = [_first(row) for row in rows]
    best = min((time for time in times if time is not None), default=None)
    for row, time in zip(rows, times):
        passes = "" if row["passes"] is None else " ".join(_number(value) for value in row["passes"])
        cells = ["", ""]
        if time is not None and best is not None:
            cells = [duration(time), f"{time / best:.2f}"]
        made.add_row(row["system"], row["described"], row["way"] or "", passes, *cells)
    return made


def _first(row: dict[str, Any]) -> float | None:
    """Return the median of the first data set."""
    times = next(iter(row["seconds_to_target"].values()))
    return None if times is None else times[0]


def _number(value: float | None) -> str:
    return "never" if value is None else f"{value:.3f}"


def _pairs(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("emulated", type=Path)
    parser.add_argument("statistics", type=Path, nargs="+")
    parser.add_argument(
        "--workloads", type=_pairs, default={}, help="that stand for models; default: their names"
    )
    parser.add_argument(
        "--targets", type=_pairs, default={}, help="losses by model; default: near the baseline's last"
    )
    parser.add_argument("--epochs", type=_pairs, default={}, help="of one pipeline, by model; default: 1")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    asked = parser.parse_args()
    runs = [row for path in asked.statistics for row in read_lines(path)]
    screen, cases = Console(highlight=False, width=150), []
    for case in read_json(asked.emulated)["cases"]:
        name = case["model"]
        workload = asked.workloads.get(name, name)
        ways = by_way(runs, workload)
        if BASELINE not in ways:
            screen.print(f"{name}: no run of workload {workload!r}, way {BASELINE!r}; left out")
            continue
        target = float(asked.targets.get(name, target_of(ways)))
        epochs = float(asked.epochs.get(name, 1))
        found = joined(case, ways, target, epochs)
        head = {field: case[field] for field in ("model", "batch_size", "devices")}
        cases.append({**head, "workload": workload, "target": target, "epochs": epochs, "rows": found})
        screen.print(
            table(f"{name}, {case['devices']}, batches of {case['batch_size']}: loss {target:.4g}", found)
        )
    files = [path.name for path in (asked.emulated, *asked.statistics)]
    question = "time to target of the papers' systems on their emulated cluster"
    write_record("papers-targets", question, {"files": files, "cases": cases}, asked.out)


if __name__ == "__main__":
    main()
