"""Question: how near is the tuned plan to the best of all settings measured, and how much sooner is it found?

    OMP_NUM_THREADS=1 python -m benchmarks.tuning.traversal --workload awd-lstm

``avgpipe tune`` with two workers; then every setting of a stage on each worker is measured as the tuner measures
(settings.py): numbers of pipelines and micro-batches, cuts nearest to balance, no advance, the default and the
most. Of so many noisy measurements the least is lower than it should be. So in the end the tuned plan, the runner-up,
the five best settings, max-num and max-size train in turn, a slice of a second each, over and over. Rows with the same
schedule train once. "In turns": of each slice the ratio to the median of its turn, and of these ratios the median; the
machine's pace, which changes between turns, is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from avgpipe.files import read_json
from avgpipe.plan import Plan

WORKERS, FINALISTS = 2, 5
_LIMIT_S = 900.0


def main() -> None:
    from benchmarks.common.record import write_record

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="awd-lstm")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--micro-batches", default="1,2,4,8,16", help="numbers that both look at")
    parser.add_argument("--slices", type=int, default=15, help="of each plan in the end")
    parser.add_argument("--finals", metavar="RECORD", help="the end alone, of tuning that was recorded")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    recorded = Path(arguments.finals) if arguments.finals else None
    found = read_json(recorded)["tuning"] if recorded else tuned(arguments)
    rows = finalists(found)
    samples = contest(arguments.workload, arguments.preset, [row for _, row in rows], arguments.slices)
    report(found, rows, samples)
    record = {
        "tuning": recorded.name if recorded else found,
        "finals": [{"row": name, "plan": row["plan"], "batch_s": s} for (name, row), s in zip(rows, samples)],
    }
    what = f"tuning-{'finals' if recorded else 'traversal'}-{arguments.workload}"
    question = "the tuned plan against the best of all settings measured"
    write_record(what, question, record, arguments.out)


def tuned(arguments: argparse.Namespace) -> dict[str, Any]:
    """What ``avgpipe tune`` finds, with the baselines and every setting, measured alike."""
    from avgpipe.cli.config import TuneConfig
    from avgpipe.cli.measuring import cluster_of, profile_of, trial_of
    from avgpipe.measure.search import Space, profiled_sizes
    from avgpipe.measure.tune import TunedPlan, study, timed_row
    from avgpipe.ranks.environment import cores
    from avgpipe.tasks import check_workload
    from benchmarks.tuning.settings import extremes, settings

    counts = tuple(map(int, arguments.micro_batches.split(",")))
    config = TuneConfig(
        workload=arguments.workload, preset=arguments.preset, workers=WORKERS, micro_batches=counts
    )
    batch_size = check_workload(config.workload, config.build_options()).batch_size
    begin = time.perf_counter()
    profile = profile_of(config, profiled_sizes(batch_size), min(WORKERS, cores()))
    profile_s = time.perf_counter() - begin
    space = Space(profile, cluster_of(config, profile), batch_size, config.pipelines, counts)
    measure = partial(trial_of, config)
    found = study(space, measure, trials=config.trials, say=print, profile_s=profile_s).to_json()
    begin = time.perf_counter()
    baselines = [timed_row(TunedPlan(what, f), measure, print) for what, f in extremes(space).items()]
    found["seconds"]["baselines_s"] = time.perf_counter() - begin
    begin = time.perf_counter()
    every = [timed_row(TunedPlan("traversal", f), measure, print) for f in settings(space)]
    found["seconds"]["traversal_s"] = time.perf_counter() - begin
    found["baselines"] = [row.to_json() for row in (*baselines, *sorted(every, key=lambda row: row.batch_s))]
    return found


def finalists(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Names and rows of those that run in the end."""
    settings = [row for row in found["baselines"] if row["what"] == "traversal" and row["measured_batch_s"]]
    best = sorted(settings, key=lambda row: row["measured_batch_s"])[:FINALISTS]
    chosen = [("tuned", found["rows"][0]), ("runner-up", found["rows"][1])]
    chosen += [(f"setting {n + 1}", row) for n, row in enumerate(best)]
    chosen += [(row["what"], row) for row in found["baselines"] if row["what"] != "traversal"]
    names: dict[Any, list[str]] = {}
    rows: dict[Any, dict[str, Any]] = {}
    for name, row in chosen:
        if row["measured_batch_s"]:
            plan = Plan(**row["plan"])
            same = (plan.pipelines, str(plan.partition), plan.replication, plan.build_schedule().columns)
            names.setdefault(repr(same), []).append(name)
            rows.setdefault(repr(same), row)
    return [(", ".join(names[key]), rows[key]) for key in rows]


def contest(workload: str, preset: str, rows: list[dict[str, Any]], slices: int) -> list[list[float]]:
    """Of each row, seconds per batch, a sample a slice."""
    from avgpipe.cli.config import ProfilingOptions
    from benchmarks.tuning.turns import in_turn

    asked = {"config": ProfilingOptions(workload=workload, preset=preset).to_json(), "repeats": slices}
    groups = []
    for row in rows:
        plan = Plan(**row["plan"])
        own = {**asked, "plan": plan.to_json(), "expected_s": row["measured_batch_s"]}
        groups.append(("benchmarks.tuning.measured:trial", plan.workers, own))
    return [ranks[0]["batch_s"] for ranks in in_turn(groups, _LIMIT_S)]


def in_turns(samples: list[list[float]]) -> list[float]:
    """Of each row, the median of its ratios to what the row in the middle took in the same turn."""
    turns = [statistics.median(turn) for turn in zip(*samples)]
    return [statistics.median(own / turn for own, turn in zip(row, turns)) for row in samples]


def report(found: dict[str, Any], rows: list[tuple[str, dict[str, Any]]], samples: list[list[float]]) -> None:
    medians, ratios = [statistics.median(own) for own in samples], in_turns(samples)
    settings = [n for n, (name, _) in enumerate(rows) if "setting" in name]
    print("| row | K | N | M | cut | advance | ms | over the best setting | in turns |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (name, row), median, ratio in zip(rows, medians, ratios):
        plan = row["plan"]
        cells = [
            name,
            *(plan[key] for key in ("stages", "pipelines", "micro_batches", "partition", "advance")),
            f"{1e3 * median:.1f}",
            *(
                f"{own / min(every[n] for n in settings):.3f}"
                for own, every in ((median, medians), (ratio, ratios))
            ),
        ]
        print(f"| {' | '.join(map(str, cells))} |")
    seconds = found["seconds"]
    ours = seconds["profile_s"] + seconds["search_s"] + seconds["trials_s"]
    count = sum(row["what"] == "traversal" for row in found["baselines"])
    print(
        f"tuned in {ours:.0f} s, traversal of {count} settings in {seconds['traversal_s']:.0f} s: "
        f"1/{seconds['traversal_s'] / ours:.1f}"
    )


if __name__ == "__main__":
    main()
