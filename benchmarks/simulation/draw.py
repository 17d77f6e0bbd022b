"""The picture of a record of run.py: seconds by actions, both axes logarithmic.

python benchmarks/simulation/draw.py benchmarks/results/simulation-DATE.json docs/images/simulation.png
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from avgpipe.files import read_json

TARGET_PER_S = 20e6


def draw(record: dict[str, Any], path: str | Path) -> None:
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = record["growth"]
    for pipelines, color in ((1, "#2a6fb0"), (2, "#d08a2e")):
        own = [row for row in rows if row["pipelines"] == pipelines]
        actions = [row["actions"] for row in own]
        middle = [statistics.median(row["seconds"]) for row in own]
        label = f"{pipelines} pipeline{'s' if pipelines > 1 else ''}"
        axes.plot(actions, middle, "o-", color=color, label=label, markersize=4)
    ends = [min(row["actions"] for row in rows), max(row["actions"] for row in rows)]
    axes.plot(
        ends,
        [count / TARGET_PER_S for count in ends],
        "--",
        color="#999999",
        label="20 million actions per second",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("actions")
    axes.set_ylabel("seconds")
    axes.legend(frameon=False)
    axes.grid(which="major", color="#e5e5e5")
    axes.set_title(f"A simulation's time, one core ({record['machine']['cpu']})", fontsize=9)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(read_json(sys.argv[1]), sys.argv[2])
