"""Question: how near is the tuned plan to the best of all settings measured, and how much sooner is it found?

    OMP_NUM_THREADS=1 python benchmarks/tuning/traversal.py --workload awd-lstm

``avgpipe tune`` with two workers; then every setting of a stage on each worker is measured as the tuner measures
(``--traversal``): numbers of pipelines and micro-batches, cuts nearest to balance, no advance, the default and the
most. Of so many noisy measurements the least is lower than it should be. So in the end the tuned plan, the runner-up,
the five best settings, max-num and max-size run in turn, round after round, each divided by the machine's pace at the
time.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
WORKERS, FINALISTS = 2, 5
_LIMIT_S = 300.0


def main() -> None:
    from avgpipe.bench.machine import machine, versions

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="awd-lstm")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    words = ["tune", arguments.workload, "--preset", arguments.preset, "--workers", str(WORKERS)]
    with tempfile.TemporaryDirectory() as folder:
        words += ["--baselines", "--traversal", "--json", "--out", f"{folder}/plan.json"]
        command = [sys.executable, "-m", "avgpipe.cli.main", *words]
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(ran.stdout)
    rows = finalists(found)
    samples = contest(arguments.workload, arguments.preset, rows, arguments.rounds)
    report(found, rows, samples)
    date = time.strftime("%Y-%m-%d")
    record = {
        "question": "the tuned plan against the best of all settings measured",
        "date": date,
        "command": "OMP_NUM_THREADS=1 "
        + shlex.join(["python", "benchmarks/tuning/traversal.py", *sys.argv[1:]]),
        "machine": machine(1, "cpu"),
        "versions": versions(),
        "tuning": found,
        "finals": [{"row": name, "plan": plan, "by_pace": s} for (name, plan), s in zip(rows, samples)],
    }
    path = Path(arguments.out or RESULTS / f"tuning-traversal-{arguments.workload}-{date}.json")
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)


def finalists(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Name and plan of those that run in the end."""
    settings = [row for row in found["baselines"] if row["what"] == "traversal" and row["measured_batch_s"]]
    best = sorted(settings, key=lambda row: row["measured_batch_s"])[:FINALISTS]
    chosen = [("tuned", found["rows"][0]), ("runner-up", found["rows"][1])]
    chosen += [(f"setting {n + 1}", row) for n, row in enumerate(best)]
    chosen += [(row["what"], row) for row in found["baselines"] if row["what"] != "traversal"]
    return [(name, row["plan"]) for name, row in chosen]


def contest(
    workload: str, preset: str, rows: list[tuple[str, dict[str, Any]]], rounds: int
) -> list[list[float]]:
    """Of each row, batches in units of the machine's pace, a sample a round."""
    from avgpipe.bench.schedules.cluster import run_workers
    from avgpipe.plan import Plan
    from avgpipe.tuning.trial import Subject

    samples: list[list[float]] = [[] for _ in rows]
    for number in range(rounds):
        for (name, plan), own in zip(rows, samples):
            made = Plan(**plan)
            asked = {
                "subject": asdict(Subject(workload, preset)),
                "plan": made.to_json(),
                "expected_s": 0.06,
            }
            first = run_workers("paced:trial", made.workers, asked, timeout_s=_LIMIT_S)[0]
            own.append(statistics.median(s / p for s, p in zip(first["rounds_s"], first["paces_s"])))
            print(f"round {number}: {name} {own[-1]:.3f}", file=sys.stderr, flush=True)
    return samples


def report(found: dict[str, Any], rows: list[tuple[str, dict[str, Any]]], samples: list[list[float]]) -> None:
    medians = {name: statistics.median(own) for (name, _), own in zip(rows, samples)}
    best = min(value for name, value in medians.items() if name.startswith("setting"))
    print("| row | K | N | M | cut | advance | over the best setting |\n|---|---|---|---|---|---|---|")
    for name, plan in rows:
        print(
            f"| {name} | {plan['stages']} | {plan['pipelines']} | {plan['micro_batches']} | {plan['partition']} | "
            f"{plan['advance']} | {medians[name] / best:.3f} |"
        )
    seconds = found["seconds"]
    ours = seconds["profile_s"] + seconds["search_s"] + seconds["trials_s"]
    count = sum(row["what"] == "traversal" for row in found["baselines"])
    print(
        f"tuned in {ours:.0f} s, traversal of {count} settings in {seconds['traversal_s']:.0f} s: "
        f"1/{seconds['traversal_s'] / ours:.1f}"
    )


if __name__ == "__main__":
    main()
