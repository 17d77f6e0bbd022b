"""Question: what do the papers' workloads reach on their real data, and in what time?

    AVGPIPE_DATA=DIR python -m benchmarks.workloads.run --preset tiny [--only gnmt,gpt] [--pipelines 1,2]
        [--lr-scaling none,sqrt,linear] [--stages 2]

Runs `avgpipe train` for each workload, number of pipelines and scaling in turn, one at a time, every worker with one
thread, and writes a record after each: validation metrics by samples seen, and the summary. --resume leaves out what
the record has already. Times are of a shared machine: compare what was learnt.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from avgpipe.files import read_json

RESULTS = Path(__file__).parents[1] / "results"
LIMIT_S = 3600
# workload -> folder of AVGPIPE_DATA. The second bert is the masked language model.
DATA = {
    "awd-lstm": "wikitext-2",
    "gnmt": "multi30k-en-de",
    "bert": "mrpc",
    "bert-masked": "wikitext-2",
    "gpt": "wikitext-2",
    "resnet": "cifar10-jpeg",
    "vgg": "cifar10-jpeg",
    "alexnet": "cifar10-jpeg",
    "resnet-mnist": "mnist",
}
WORKLOAD = {"bert-masked": "bert", "resnet-mnist": "resnet"}
KEPT = (
    *("preset", "title", "parameters", "batch_size", "micro_batches", "epochs", "batches", "samples"),
    *("train_seconds", "samples_per_second", "metric_name", "metric", "best_metric", "trivial_metric"),
    *("worker_busy_fraction", "bubble_fraction", "peak_memory_bytes", "seed"),
)


def command(row: str, preset: str, stages: int, pipelines: int, scaling: str | None, out: str) -> list[str]:
    parts = ["avgpipe", "train", WORKLOAD.get(row, row), "--preset", preset]
    parts += ["--data", f"$AVGPIPE_DATA/{DATA[row]}"]
    parts += ["--stages", str(stages), "--pipelines", str(pipelines)]
    parts += ["--lr-scaling", scaling] if scaling else []
    return [*parts, "--out", out, "--json"]


def run(parts: list[str]) -> dict[str, Any]:
    """Train, and what came of it."""
    data = os.environ.get("AVGPIPE_DATA", "")
    actual = [
        sys.executable,
        "-m",
        "avgpipe",
        *(p.replace("$AVGPIPE_DATA", data) for p in parts[1:]),
    ]
    load, begin = os.getloadavg()[0], time.perf_counter()
    ended = subprocess.run(
        actual,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seconds = time.perf_counter() - begin
    if ended.returncode:
        return {"failed": ended.stderr.strip().split("\n")[-1], "seconds": seconds}
    summary = json.loads(ended.stdout)
    out = Path(parts[parts.index("--out") + 1])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        **{name: summary[name] for name in KEPT},
        "seconds": seconds,
        "load_before": load,
        "validations": [
            {name: row[name] for name in ("batch", "loss", "metrics", "seconds")}
            for row in rows
            if row["kind"] == "valid"
        ],
        "train_loss": _ends([row["loss"] for row in rows if row["kind"] == "train"]),
    }


def _ends(losses: list[float]) -> list[float]:
    """Means of the first and the last twentieth."""
    part = max(1, len(losses) // 20)
    return [sum(some) / len(some) for some in (losses[:part], losses[-part:])]


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| run | parameters | batches x samples | training | whole | metric | trivial | before | then |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"| {name} | failed: {row['failed']} |")
            continue
        metric = row["metric_name"]
        found = [f"{v['metrics'][metric]:.1f}" for v in row["validations"]]
        trivial = "-" if row["trivial_metric"] is None else f"{row['trivial_metric']:.1f}"
        lines.append(
            f"| {name} | {row['parameters'] / 1e6:.2f} M | {row['batches']} x {row['batch_size']} | "
            f"{row['train_seconds']:.0f} s | {row['seconds']:.0f} s | {metric} | {trivial} | {found[0]} | "
            f"{', '.join(found[1:])} |"
        )
    return "\n".join(lines)


def _command(asked: argparse.Namespace) -> str:
    """How to run all that the record has, in one go."""
    parts = ["--preset", asked.preset, "--stages", str(asked.stages), "--pipelines", asked.pipelines]
    parts += ["--lr-scaling", asked.lr_scaling] if asked.lr_scaling else []
    return "AVGPIPE_DATA=DIR " + shlex.join(["python", "-m", "benchmarks.workloads.run", *parts])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--only", default=",".join(DATA), help="rows, separated by commas")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--pipelines", default="1,2")
    parser.add_argument("--lr-scaling", default="", help="default: the preset's")
    parser.add_argument("--out", help="of the record; default: benchmarks/results")
    parser.add_argument("--resume", action="store_true", help="keep what --out has, and run the rest")
    asked = parser.parse_args()
    chosen = asked.only.split(",")
    if unknown := set(chosen) - set(DATA):
        parser.error(f"unknown rows {', '.join(sorted(unknown))}: choose from {', '.join(DATA)}")
    if "AVGPIPE_DATA" not in os.environ:
        parser.error("AVGPIPE_DATA must name the folder of the data sets")

    from benchmarks.common.record import facts

    date = time.strftime("%Y-%m-%d")
    path = Path(asked.out) if asked.out else RESULTS / f"workloads-{asked.preset}-{date}.json"
    record: dict[str, Any] = {
        "question": "the workloads on their data: metric on the validation data at equal numbers of samples",
        "date": date,
        "command": _command(asked),
        **facts(),
        "rows": read_json(path)["rows"] if asked.resume and path.exists() else {},
    }
    for row in chosen:
        for pipelines in map(int, asked.pipelines.split(",")):
            for scaling in asked.lr_scaling.split(",") if asked.lr_scaling and pipelines > 1 else [""]:
                name = f"{row}, N = {pipelines}" + (f", {scaling}" if scaling else "")
                if name in record["rows"]:
                    continue
                print(name, file=sys.stderr, flush=True)
                with tempfile.TemporaryDirectory() as folder:
                    parts = command(row, asked.preset, asked.stages, pipelines, scaling, f"{folder}/run")
                    record["rows"][name] = run(parts)
                path.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record["rows"]))
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
