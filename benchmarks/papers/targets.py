"""Question: how long does each system take to a target on the papers' cluster?

    python -m benchmarks.papers.targets EMULATED.json STATISTICS.jsonl... [--workloads bert=gpt] [--targets gnmt=4.2]

Joins seconds per epoch (``benchmarks.papers.emulated``) with samples to a target (``benchmarks.statistics.run``, a line
a run: workload, way, seed, losses by samples). Samples to a target are those at which the line through the validation
losses first crosses it; over seeds, the median and the range.

The published data sets are far larger than the workloads that are trained, so the samples of a way count as multiples
of those that one pipeline without delay needs in the median: its "passes". Time to target is seconds per epoch x
epochs that one pipeline needs (--epochs, by default one) x passes; ratios of systems depend on neither. What was not
trained, or did not reach the target in most of the seeds, has no time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.common.record import write_record
from benchmarks.papers.forecast import FLOAT_BITS
from benchmarks.tables.markdown import duration

Losses = Sequence[tuple[int, float]]
BASELINE = "one"
SLACK = 0.005  # above what the baseline ends with, that a target is by default
# By system, or by the way that was the best of AvgPipe's: ways of training, the first that is there. Nobody has trained
# three pipelines where there are only those of four, which need more samples.
WAYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("data parallel", "GPipe", "DAPPLE", "zero bubble", "N = 1"), (BASELINE,)),
    "PipeDream": ("pipedream",),
    "PipeDream-2BW": ("2bw",),
    "EA-Pipe": ("ea-pipe",),
    "N = 2": ("N = 2",),
    "N = 3": ("N = 3", "N = 4"),
    "N = 4": ("N = 4",),
    "elastic, N = 2": ("N = 2, avgpipe",),
    "elastic, N = 3": ("N = 3, avgpipe", "N = 4, avgpipe"),
    "elastic, N = 4": ("N = 4, avgpipe",),
    "halves predicted": ("halves, predicted",),
    "quarters predicted": ("quarters, predicted",),
    "2BW, predicted": ("2bw, predicted",),
    "2BW, error-feedback": ("2bw, error feedback",),
}


class Samples(NamedTuple):
    """Samples to a target, over seeds; infinity where it was not reached."""

    median: float
    least: float
    most: float

    def over(self, samples: float) -> Samples:
        return Samples(*(value / samples for value in self))


def samples_to(losses: Losses, target: float) -> float:
    """Return the samples at which the loss first is at most ``target``, between two validations on a straight line.

    A first validation below the target counts as it stands; infinity where no validation reaches it.
    """
    if losses and losses[0][1] <= target:
        return float(losses[0][0])
    for (before, above), (after, below) in pairwise(losses):
        if below <= target:
            return before + (after - before) * (above - target) / (above - below)
    return inf


def by_way(runs: Iterable[dict[str, Any]], workload: str) -> dict[str, list[Losses]]:
    """Return the losses of each way of a workload, a list a seed."""
    found: dict[str, list[Losses]] = defaultdict(list)
    for run in runs:
        if run["workload"] == workload:
            found[run["way"]].append([(int(samples), float(loss)) for samples, loss, *_ in run["losses"]])
    return dict(found)


def target_of(ways: dict[str, list[Losses]], slack: float = SLACK) -> float:
    """Return a target that the baseline reaches: the highest of its seeds' last losses, and so much more of it."""
    return (1 + slack) * max(losses[-1][1] for losses in ways[BASELINE])


def reached(losses: Iterable[Losses], target: float) -> Samples:
    samples = [samples_to(of_seed, target) for of_seed in losses]
    return Samples(statistics.median_high(samples), min(samples), max(samples))


def way_of(row: dict[str, Any], known: Iterable[str]) -> str | None:
    """Return the way of training that is a row's of the emulated cluster; None where nobody has trained it."""
    system = row["system"]
    bits = f", {row['wire_bits']} bits" * (row["wire_bits"] < FLOAT_BITS)
    for mark in (" (G)", " (P)", bits):
        system = system.replace(mark, "")
    if system == "AvgPipe, best":
        system = row["way"]
    name = system.removeprefix("AvgPipe").lstrip(", ")
    return next((way + bits for way in WAYS.get(name, ()) if way + bits in known), None)


def joined(
    case: dict[str, Any], ways: dict[str, list[Losses]], target: float, epochs: float = 1.0
) -> list[dict[str, Any]]:
    """Return the time to target of each row of a case.

    Args:
        case: Of the record of the emulated cluster.
        ways: Of the workload that stands for its model.
        target: A loss.
        epochs: That one pipeline without delay needs.
    """
    baseline = reached(ways[BASELINE], target).median
    if baseline == inf:
        raise ValueError(
            f"target {target:g}: way {BASELINE!r} does not reach it; give one of at least {target_of(ways, 0):g}"
        )
    rows = []
    for row in case["rows"]:
        way = way_of(row, ways)
        passes = None if way is None else reached(ways[way], target).over(baseline)
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
    runs = [json.loads(line) for path in asked.statistics for line in path.read_text().splitlines() if line]
    screen, cases = Console(highlight=False, width=150), []
    for case in json.loads(asked.emulated.read_text())["cases"]:
        name = case["model"]
        workload = asked.workloads.get(name, name)
        ways = by_way(runs, workload)
        if BASELINE not in ways:
            screen.print(f"{name}: no run of workload {workload!r}, way {BASELINE!r}; left out")
            continue
        target = float(asked.targets.get(name, target_of(ways)))
        found = joined(case, ways, target, float(asked.epochs.get(name, 1)))
        head = {field: case[field] for field in ("model", "batch_size", "devices")}
        cases.append({**head, "workload": workload, "target": target, "rows": found})
        screen.print(
            table(f"{name}, {case['devices']}, batches of {case['batch_size']}: loss {target:.4g}", found)
        )
    files = [path.name for path in (asked.emulated, *asked.statistics)]
    question = "time to target of the papers' systems on their emulated cluster"
    write_record("papers-targets", question, {"files": files, "cases": cases}, asked.out)


if __name__ == "__main__":
    main()
