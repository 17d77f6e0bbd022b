"""Make one record of the runs of ``benchmarks.statistics.run``, and a picture of their validation losses.

python -m benchmarks.statistics.record RUNS.jsonl... [--variants VARIANTS.jsonl] [--out FILE]
        [--picture FILE.png]

``--variants``: of ``benchmarks.statistics.variants``, which the record keeps beside the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from avgpipe.files import read_lines
from avgpipe.timeline.plot import dress, write_figure
from benchmarks.common.record import write_record
from benchmarks.statistics.run import CASES
from benchmarks.statistics.samples import TIMES, Ways, by_way

_INK = "#333333"
_COLORS = {
    "one": "#333333",
    "N = 2, default plan": "#2a6fb0",
    "N = 4, default plan": "#7fb0dd",
    "N = 2, warm-up": "#2a6fb0",
    "N = 4, warm-up": "#7fb0dd",
    "halves, predicted, warm-up": "#3b8c5a",
    "quarters, predicted, warm-up": "#9ac7a8",
    "2bw": "#c0453c",
    "pipedream": "#c98a1b",
    "muon": "#7a5aa6",
    "muon, 2bw, error feedback, warm-up": "#b9a3d6",
}


def rows(path: Path) -> list[dict[str, Any]]:
    return read_lines(path)


def runs_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return runs in the order of workloads, ways and seeds, their losses to a ten-thousandth.

    Those of an earlier record say of which.
    """
    ways = list(dict.fromkeys(run["way"] for run in found))
    ordered = sorted(found, key=lambda r: ([*CASES].index(r["workload"]), ways.index(r["way"]), r["seed"]))
    return [
        {
            **{name: run[name] for name in ("workload", "way", "seed", "lr", "earlier") if name in run},
            "losses": [[samples, round(loss, 4)] for samples, loss, *_ in run["losses"]],
        }
        for run in ordered
    ]


def plans_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the plan of each way, where its runs have recorded one. ValueError if two runs of a way differ in it."""
    plans: dict[str, Any] = {}
    for run in found:
        way = run["way"].partition(TIMES)[0]
        if "plan" in run and plans.setdefault(way, run["plan"]) != run["plan"]:
            raise ValueError(f"{way!r} was trained by several plans: make a record of each")
    return plans


def picture(found: list[dict[str, Any]], path: Path) -> Figure:
    """A panel for each workload: losses by samples, a line for each seed."""
    workloads = [name for name in CASES if any(run["workload"] == name for run in found)]
    figure = Figure(figsize=(9.0, 3.2 * -(-len(workloads) // 2)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(-(-len(workloads) // 2), 2, squeeze=False).flat)
    for axes in panels[len(workloads) :]:
        axes.remove()
    for name, axes in zip(workloads, panels):
        ways: Ways = by_way(found, name)
        lowest = min(loss for seeds in ways.values() for losses in seeds.values() for _, loss in losses)
        for way, color in _COLORS.items():
            for n, losses in enumerate(ways.get(way, {}).values()):
                axes.plot(*zip(*losses), color=color, linewidth=1.0, label=None if n else way)
        last = max(losses[len(losses) // 4][1] for losses in ways["one"].values())
        axes.set_ylim(lowest - 0.05 * (last - lowest), last)
        dress(axes)
        axes.set_title(name, loc="left", fontsize=9.5, color=_INK)
        axes.set_xlabel("samples", fontsize=8, color=_INK)
        axes.set_ylabel("validation loss", fontsize=8, color=_INK)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    drawn = [lines[way] for way in _COLORS if way in lines]
    figure.legend(handles=drawn, fontsize=7.5, frameon=False, loc="outside lower center", ncols=4)
    write_figure(figure, path, dpi=130)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--variants", type=Path)
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    read = [run for path in asked.runs for run in rows(path)]
    found = runs_of(read)
    variants = rows(asked.variants) if asked.variants else []
    question = "samples to a target, of each way of training, beside one pipeline's"
    record = {"plans": plans_of(read), "runs": found, "variants": variants}
    write_record("statistics", question, {key: part for key, part in record.items() if part}, asked.out)
    if asked.picture:
        picture(found, asked.picture)


if __name__ == "__main__":
    main()
