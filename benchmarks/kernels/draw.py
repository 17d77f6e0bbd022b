"""Question: how near to the limit of memory do the operators come, and to what one writes in torch instead?

    OMP_NUM_THREADS=2 avgpipe bench kernels --elements 25e6,100e6 --threads 2 --rounds 15 --json > kernels.json
    python -m benchmarks.kernels.draw kernels.json docs/images/kernels.png

The second line draws the sections of the first size that docs/results/update-speed.md shows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from avgpipe_lab.bench import plot

SHOWN = (
    "adamw, one tensor",
    "sgd, one tensor",
    "pull, one tensor",
    "apply, N = 8",
    "round, N = 2",
    "round, N = 8",
)


def main(record: Path, picture: str) -> None:
    found = json.loads(record.read_text())
    first = found["sections"][0]["elements"]
    shown = [
        s for s in found["sections"] if s["elements"] == first and f"{s['question']}, {s['case']}" in SHOWN
    ]
    machine = found["machine"]
    plot(shown, f"{machine['cpu']}, {machine['threads']} threads, {found['command']}", picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
