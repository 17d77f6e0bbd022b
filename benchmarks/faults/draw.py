"""Pictures of records of ``benchmarks.faults``: updates around the loss of a pipeline, or of a process.

python -m benchmarks.faults.draw benchmarks/results/faults-lost-pipeline-DATE.json docs/images/lost-pipeline.png
python -m benchmarks.faults.draw benchmarks/results/faults-lost-worker-DATE.json docs/images/lost-worker.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from avgpipe.files import read_json
from avgpipe.timeline.plot import HUES, INK, dress, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(record: dict[str, Any], path: str | Path) -> None:
    shown = record["shown"]
    panel = _pipelines if "updates_s" in shown[0] else _worker
    with picture(path, 9.0, 1.9 * len(shown) + 0.6) as figure:
        panels = figure.subplots(len(shown), 1, squeeze=False)
        for one, axes in zip(shown, panels.flat):
            axes.axvline(0, color=INK, linewidth=1.0, linestyle="--")
            panel(axes, one)
            dress(axes, grid="x")
        panels.flat[-1].set_xlabel("seconds after the loss", fontsize=8, color=INK)


def _pipelines(axes: Axes, one: dict[str, Any]) -> None:
    """A row for each pipeline, a mark for each update of its first stage."""
    for pipeline, times in one["updates_s"].items():
        hue = HUES[int(pipeline)][1]
        axes.plot(times, [int(pipeline)] * len(times), "|", color=hue, markersize=12, markeredgewidth=0.8)
    axes.set_yticks(range(len(one["updates_s"])), [f"pipeline {i}" for i in one["updates_s"]])
    axes.set_ylim(len(one["updates_s"]) - 0.4, -0.6)
    how = "is killed" if one["kind"] == "kill" else "stands still"
    stages = f"{one['stages']} stage{'s' if one['stages'] > 1 else ''}"
    title = f"{stages}: rank {one['rank']} of pipeline {one['pipeline']} {how}"
    axes.set_title(title, loc="left", fontsize=9, color=INK)


def _worker(axes: Axes, one: dict[str, Any]) -> None:
    """Updates of the first stage by their number: what is made once more begins lower."""
    seconds, numbers = zip(*one["updates"])
    axes.plot(seconds, numbers, ".", color=HUES[0][1], markersize=4)
    axes.axvline(one["back_after_s"], color=HUES[2][1], linewidth=1.0, linestyle="--")
    axes.set_ylabel("updates", fontsize=8, color=INK)
    title = f"rank {one['rank']} is killed; back after {one['back_after_s']:.2f} s"
    axes.set_title(title, loc="left", fontsize=9, color=INK)


def main() -> None:
    record, path = sys.argv[1:]
    draw(read_json(record), path)


if __name__ == "__main__":
    main()
