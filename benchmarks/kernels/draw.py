"""Question: how near to the limit of memory do the operators come, and to what one writes in torch instead?

    OMP_NUM_THREADS=2 avgpipe bench kernels --elements 25e6,100e6 --threads 2 --rounds 15 --json > kernels.json
    python -m benchmarks.kernels.draw kernels.json docs/images/kernels.png

The second line draws the sections of the first size that docs/results/update-speed.md shows, or all of another record,
as of `avgpipe bench transfers --json`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from avgpipe.files import read_json
from avgpipe.timeline.plot import dress, picture
from avgpipe.units import format_seconds
from avgpipe_lab.bench import title

COLORS = {"ours": "#2a6fb0", "baseline": "#b9b9b9", "limit": "#e8e3d9"}

SHOWN = (
    "adamw, one tensor",
    "sgd, one tensor",
    "pull, one tensor",
    "apply, N = 8",
    "round, N = 2",
    "round, N = 8",
)


def plot(sections: Sequence[Mapping[str, Any]], heading: str, path: str) -> None:
    """Draw a panel for each section, with a bar for each row."""
    heights = [0.95 + 0.27 * len(section["rows"]) for section in sections]
    with picture(path, 7.6, sum(heights) + 0.4) as figure:
        panels = figure.subplots(len(sections), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
        for section, axes in zip(sections, panels.flat):
            rows = section["rows"]
            rates = [row["gb_per_s"] for row in rows]
            colors = [COLORS[row["role"]] for row in rows]
            bars = axes.barh([row["name"] for row in rows], rates, color=colors)
            times = [format_seconds(row["median_ms"] / 1e3) for row in rows]
            axes.bar_label(bars, [f" {t}, {rate:.3g} GB/s" for t, rate in zip(times, rates)], fontsize=7.5)
            dress(axes, grid="x")
            axes.set_xlim(0, 1.36 * max(rates))  # room for the labels behind the bars
            axes.invert_yaxis()
            axes.settitle(title(section), loc="left", fontsize=9.5)
        figure.suptitle(f"{heading}; GB/s of the bytes that the work must move", fontsize=10)


def main(record: Path, out: str) -> None:
    found = read_json(record)
    first = found["sections"][0]["elements"]
    shown = [
        s for s in found["sections"] if s["elements"] == first and f"{s['question']}, {s['case']}" in SHOWN
    ]
    machine = found["machine"]
    plot(
        shown or found["sections"], f"{machine['cpu']}, {machine['threads']} threads, {found['command']}", out
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
