"""Question: how many actions does the simulation run per second, and does its time grow with their number alone?

    OMP_NUM_THREADS=1 python benchmarks/simulation/run.py --plot docs/images/simulation.png

One thread. Three tables: actions per second by case, beside the same times in plain Python; schedules of 1,024 stages
and 4,096 micro-batches, each in a process of its own, from `build_schedule` to the figures; and the time of 10^4 to
10^8 actions, which the picture shows.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from avgpipe import Costs, build_schedule
from avgpipe.planning import predict, simulate
from avgpipe.planning.engine import compile_schedule, run
from avgpipe.schedule import Schedule

HERE = Path(__file__).parent
PLAIN = Costs(0.010, 0.020, 0.004, update_s=0.001)
PIPELINES = (1, 2)  # of the growth
STAGES = 16


def cases(actions: int) -> dict[str, tuple[Schedule, Costs, int, int]]:
    """Schedule, costs, pipelines and batches; about so many actions each."""

    def of(name: str, stages: int, pipelines: int = 1, batches: int = 1, costs: Costs = PLAIN) -> Any:
        micro_batches = max(1, actions // (2 * stages * batches))
        return build_schedule(name, stages, micro_batches), costs, pipelines, batches

    shared = Costs(0.010, 0.020, 0.004, shared_links=[[(1, 2), (5, 6)], [(2, 1), (6, 5)]])
    slots = Costs(0.010, 0.020, 0.004, concurrency_gain=(1, 1.3))
    drawn = Costs(0.010, 0.020, 0.004, jitter=0.1, stragglers=(0.01, 5))
    return {
        "1F1B, 8 stages": of("1f1b", 8),
        "1F1B, 256 stages": of("1f1b", 256),
        "advance forward, 8 stages": of("advance-forward", 8),
        "without a flush, 8 stages": of("pipedream-2bw", 8, batches=8),
        "with jitter and stragglers": of("1f1b", 8, costs=drawn),
        "two pipelines, 8 stages": of("1f1b", 8, 2, 8),
        "three pipelines, 64 stages": of("advance-forward", 64, 3, 9),
        "links that are shared": of("1f1b", 8, costs=shared),
        "two actions at once": of("1f1b", 8, 2, 8, slots),
        "zero-bubble V, two stages a worker": of("zero-bubble-v", 8, 1, 64),
    }


def plain_python(stages: int, micro_batches: int) -> tuple[int, float]:
    """Actions, and the makespan of 1F1B with PLAIN: the same recurrence, written plainly."""
    forward, backward, transfer, update = 0.010, 0.020, 0.004, 0.001
    arrived: list[dict[tuple[str, int], float]] = [{} for _ in range(stages)]
    link = [[0.0, 0.0] for _ in range(stages)]
    free, done = [0.0] * stages, [0] * stages
    steps = [
        [
            *(("F", m) for m in range(w)),
            *(s for m in range(w, micro_batches) for s in (("B", m - w), ("F", m))),
        ]
        + [("B", m) for m in range(micro_batches - w, micro_batches)]
        for w in (min(micro_batches, stages - k) for k in range(stages))
    ]
    waiting = list(range(stages - 1, -1, -1))
    while waiting:
        k = waiting.pop()
        while done[k] < len(steps[k]):
            step = steps[k][done[k]]
            kind = step[0]
            needs = k > 0 if kind == "F" else k < stages - 1
            if needs and step not in arrived[k]:
                break
            start = max(free[k], arrived[k].pop(step)) if needs else free[k]
            free[k] = start + (forward if kind == "F" else backward)
            done[k] += 1
            to = k + 1 if kind == "F" else k - 1
            if 0 <= to < stages:
                way = int(kind == "B")
                link[k][way] = max(link[k][way], free[k]) + transfer
                arrived[to][step] = link[k][way]
                waiting.append(to)
    return sum(map(len, steps)), max(free) + update


def timed(call: Callable[[], int], rounds: int) -> tuple[int, list[float]]:
    """Actions, and seconds of each round; the first, not counted, warms up."""
    actions = call()
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return actions, seconds


def rates(actions: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    print("| case | actions | million per second | spread |\n|---|---|---|---|")

    def row(name: str, call: Callable[[], int]) -> None:
        count, seconds = timed(call, rounds)
        each = sorted(count / s / 1e6 for s in seconds)
        rows.append({"case": name, "actions": count, "seconds": seconds})
        print(
            f"| {name} | {count} | {statistics.median(each):.2f} | {each[0]:.2f}-{each[-1]:.2f} |", flush=True
        )

    row("plain Python, 1F1B, 8 stages", lambda: plain_python(8, min(actions, 200_000) // 16)[0])
    for name, (schedule, costs, pipelines, batches) in cases(actions).items():
        question = compile_schedule(schedule, costs)
        row(name, lambda q=question, i=pipelines, j=batches: run(q, i, j).actions)  # type: ignore[misc]
    small = cases(min(actions, 200_000))["1F1B, 8 stages"][0]
    row("1F1B, 8 stages, with a Timeline", lambda: len(simulate(small, PLAIN).events))
    return rows


def peak_bytes() -> int:
    """Of this process since it began; getrusage would count its parent's too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _large(name: str, stages: int, micro_batches: int, pipelines: int) -> dict[str, Any]:
    before = peak_bytes()
    begin = time.perf_counter()
    schedule = build_schedule(name, stages, micro_batches)
    found = predict(schedule, PLAIN, pipelines=pipelines, batches=pipelines)
    seconds = time.perf_counter() - begin
    return {
        "case": f"{name}, N = {pipelines}",
        "stages": stages,
        "micro_batches": micro_batches,
        "actions": found.actions,
        "seconds": seconds,
        "peak_bytes": peak_bytes(),
        "peak_bytes_before": before,
    }


def large(stages: int, micro_batches: int) -> list[dict[str, Any]]:
    """Each in a process of its own, so that its peak memory is known."""
    rows = []
    print(
        f"\n| {stages} stages, {micro_batches} micro-batches | actions | seconds | peak MiB |\n|---|---|---|---|"
    )
    for name, pipelines in (("1f1b", 1), ("advance-forward", 1), ("gpipe", 1), ("1f1b", 2)):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(_large, (name, stages, micro_batches, pipelines))
        rows.append(row)
        peak = row["peak_bytes"] / 2**20
        print(f"| {row['case']} | {row['actions']} | {row['seconds']:.3f} | {peak:.0f} |", flush=True)
    return rows


def growth(most: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    print(f"\n| actions, {STAGES} stages, 1F1B | N | seconds |\n|---|---|---|")
    for exponent in range(4, 1 + round(math.log10(most))):
        for pipelines in PIPELINES:
            micro_batches = 10**exponent // (2 * STAGES * pipelines)
            schedule = build_schedule("1f1b", STAGES, micro_batches)
            actions, seconds = timed(
                lambda s=schedule, i=pipelines: predict(s, PLAIN, pipelines=i, batches=i).actions,  # type: ignore[misc]
                rounds,
            )
            rows.append({"pipelines": pipelines, "actions": actions, "seconds": seconds})
            print(f"| {actions} | {pipelines} | {statistics.median(seconds):.5f} |", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--actions", type=lambda text: int(float(text)), default=4_000_000, help="of a case")
    parser.add_argument("--most", type=lambda text: int(float(text)), default=10**8, help="of the growth")
    parser.add_argument("--stages", type=int, default=1024, help="of the large schedules")
    parser.add_argument("--micro-batches", type=int, default=4096, help="of the large schedules")
    parser.add_argument("--plot", help="file of the picture")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    # Here, as it loads torch, whose memory the processes of the large schedules need not have.
    from benchmarks.common.record import facts

    record = {
        "question": "actions per second of the simulation, and how its time grows",
        "date": time.strftime("%Y-%m-%d"),
        "command": "OMP_NUM_THREADS=1 "
        + shlex.join(["python", "benchmarks/simulation/run.py", *sys.argv[1:]]),
        **facts(),
        "rates": rates(arguments.actions, arguments.rounds),
        "large": large(arguments.stages, arguments.micro_batches),
        "growth": growth(arguments.most, arguments.rounds),
    }
    path = Path(arguments.out or HERE.parent / "results" / f"simulation-{record['date']}.json")
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)
    if arguments.plot:
        from draw import draw

        draw(record, arguments.plot)


if __name__ == "__main__":
    main()
