"""Question: is this checkout slower or faster than another one?

    OMP_NUM_THREADS=1 python -m benchmarks.versions.run BEFORE [--rows host,ranks,...] [--rounds 4]

BEFORE is the folder of the other checkout, with its extension built. Each row is measured in fresh processes of one
checkout and of the other in turns (A B B A ...), and its median compared: 0.97 means that this checkout takes 0.97
times as long. Nothing else may run on the machine. The row "emulated" needs root, as it makes network namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.record import say, write_record
from benchmarks.versions.rows import ROWS

HERE = Path(__file__).resolve()


def measure(checkout: Path, row: str) -> dict[str, float]:
    """Measure a row in a checkout; its labels and values."""
    paths = os.pathsep.join([str(checkout / "python"), str(checkout)])
    result = subprocess.run(
        [sys.executable, str(HERE.with_name("rows.py")), row],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if result.returncode:
        raise SystemExit(f"{row} failed in {checkout}:\n{result.stderr[-2000:]}")
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def compare(before: Path, rows: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Measure every row in turns; one entry for each label, in the order of the rows."""
    checkouts = {"before": before, "after": HERE.parents[2]}
    samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: {name: [] for name in checkouts})
    for row in rows:
        for number in range(rounds):
            names = list(checkouts) if number % 2 == 0 else list(reversed(checkouts))
            for name in names:
                for label, value in measure(checkouts[name], row).items():
                    samples[label][name].append(value)
        say(f"{row} is measured")
    return [{"label": label, **values} for label, values in samples.items() if all(values.values())]


def commit_of(checkout: Path) -> str:
    command = "git", "-C", str(checkout), "rev-parse", "--short", "HEAD"
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=lambda text: Path(text).resolve(), help="folder of the other checkout")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=list(ROWS), help="some of them")
    parser.add_argument("--rounds", type=int, default=4, help="of each row in each checkout")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    found = compare(arguments.before, arguments.rows, arguments.rounds)
    print("| | before | after | ratio |\n|---|---:|---:|---:|")
    for entry in found:
        before, after = (statistics.median(entry[name]) for name in ("before", "after"))
        print(f"| {entry['label']} | {before:.4g} | {after:.4g} | {after / before:.2f} |")
    commits = {"before": commit_of(arguments.before), "after": commit_of(HERE.parents[2])}
    question = "speed of two versions, in turns"
    write_record("versions", question, {**commits, "rounds": arguments.rounds, "rows": found}, arguments.out)


if __name__ == "__main__":
    main()
