"""Question: what does the first-batch audit cost, in the first batches and afterwards?

    OMP_NUM_THREADS=1 AVGPIPE_DATA=DIR python -m benchmarks.overlap.audit [--models REGEX] [--rounds 3]

Models: workloads at preset small, two stages and four micro-batches in one process. Each is trained in fresh processes
with ``check="off"`` and ``check="first-batch"`` in turns (A B B A ...); of the first batches the seconds above those
of a later one, in later batches, and the process's peak memory.

Afterwards: the same two in turns, in the same two processes, once they have seen their first batches: stages that add
a vector, whose time is the host's, and emulated devices. A noisy machine hides what is smaller than some percent, so
the functions that Python calls in a batch are counted, too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import statistics
import sys
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import torch

import avgpipe

DATA = {
    "gpt": "wikitext-2",
    "awd-lstm": "wikitext-2",
    "gnmt": "multi30k-en-de",
    "bert": "mrpc",
    "resnet": "cifar10-jpeg",
}
CHECKS = "off", "first-batch"
STAGES, MICRO_BATCHES, FIRST, LATER = 2, 4, 3, 5
COUNT_FROM, COUNTED = 100, 200  # batches
WAIT_S = 0.002  # of an emulated forward; a backward takes twice that


def first_batches(model: str, data: str, check: str) -> dict[str, Any]:
    """Train some batches; return the seconds of each and the peak memory in MiB, of this process."""
    import avgpipe
    from avgpipe.tasks import build_workload

    torch.set_num_threads(1)
    workload = build_workload(model, preset="small", data=data)
    plan = avgpipe.Plan(stages=STAGES, micro_batches=MICRO_BATCHES)
    seconds = []
    with avgpipe.Pipeline(
        workload.layers,
        plan,
        loss_fn=workload.loss_fn,
        optimizer=workload.optimizer,
        extensions=[avgpipe.Source(loss_weight=workload.loss_weight), avgpipe.Audit(check)],
    ) as pipeline:
        begin = time.perf_counter()
        for _ in islice(pipeline.train(workload.train_batches(0)), FIRST + LATER):
            seconds.append(time.perf_counter() - begin)
            begin = time.perf_counter()
    return {"seconds": seconds, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def row_of(model: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return what the first batches take more with the audit, in later batches and MiB."""
    later = statistics.median(s for found in runs.values() for run in found for s in run["seconds"][FIRST:])
    first = {check: statistics.median(sum(run["seconds"][:FIRST]) for run in runs[check]) for check in CHECKS}
    peak = {check: statistics.median(run["peak_mib"] for run in runs[check]) for check in CHECKS}
    return {
        "model": model,
        "later_s": later,
        "first_s": first,
        "more_batches": (first["first-batch"] - first["off"]) / later,
        "peak_mib": peak,
    }


# ---- afterwards ------------------------------------------------------------------------------------------------------


def worker(rounds: int, batches: int) -> list[dict[str, Any]]:
    """Time both checks in turns."""
    from avgpipe.ranks.process import progress
    from avgpipe.ranks.rendezvous import join
    from avgpipe_lab.bench.schedules import EmulatedStage
    from benchmarks.common.rows import OurRow, Task, measure_rows, our_plan
    from benchmarks.overlap.overhead import SAMPLES, WIDTH, Adds, loss

    torch.set_num_threads(1)
    join(60, "gloo")
    inputs, targets = torch.ones(SAMPLES, WIDTH), torch.zeros(SAMPLES, 1)
    task = Task(inputs, targets, loss, lambda p: torch.optim.SGD(p, lr=1e-3))
    rows = []
    for n in (1, 2):
        for name in CHECKS:
            modules = [Adds() for _ in range(STAGES)]
            plan = our_plan(STAGES, 8, pipelines=n)
            rows.append(
                OurRow(
                    f"host, N = {n}|{name}", task, modules, plan, link="shm", extensions=[avgpipe.Audit(name)]
                )
            )
    for name in CHECKS:
        emulated = [EmulatedStage(WAIT_S, 2 * WAIT_S) for _ in range(STAGES)]
        rows.append(
            OurRow(
                f"emulated|{name}",
                task,
                emulated,
                our_plan(STAGES, 8),
                link="shm",
                extensions=[avgpipe.Audit(name)],
            )
        )
    return [row._asdict() for row in measure_rows(rows, rounds, batches, progress)]


def calls_of(check: str, pipelines: int) -> float:
    """Return how many functions are called per batch, of Python and of its extensions, in one process."""
    import avgpipe
    from benchmarks.overlap.overhead import SAMPLES, WIDTH, Adds, loss

    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    batch = torch.ones(SAMPLES, WIDTH), torch.zeros(SAMPLES, 1)
    plan = avgpipe.Plan(stages=STAGES, micro_batches=8, pipelines=pipelines, warmup_rounds=0)
    threading.setprofile(note)  # of threads that start
    sys.setprofile(note)
    try:
        with avgpipe.Pipeline(
            [Adds() for _ in range(STAGES)],
            plan,
            loss_fn=loss,
            optimizer=lambda p: torch.optim.SGD(p, lr=1e-3),
            extensions=[avgpipe.Audit(check)],
        ) as pipeline:
            results = pipeline.train(repeat(batch, COUNT_FROM + COUNTED))
            deque(islice(results, COUNT_FROM), maxlen=0)
            before = count
            deque(results, maxlen=0)
            return (count - before) / COUNTED
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def afterwards(rounds: int, batches: int) -> list[dict[str, Any]]:
    from avgpipe.ranks.launch import run_on_ranks
    from benchmarks.common.record import say

    asked = {"rounds": rounds, "batches": batches}
    ranks = run_on_ranks("benchmarks.overlap.audit:worker", STAGES, asked, timeout_s=900, say=say)
    found: dict[str, dict[str, list[float]]] = {}
    for row in ranks[0]:
        what, _, check = row["name"].partition("|")
        found.setdefault(what, {})[check] = row["seconds"]
    calls = {f"host, N = {n}": {check: calls_of(check, n) for check in CHECKS} for n in (1, 2)}
    return [
        {
            "what": what,
            "calls": calls.get(what),
            "off_ms": 1e3 * statistics.median(of["off"]),
            # Each round by itself: what slows the machine down slows both.
            "ratio": statistics.median(b / a for a, b in zip(of["off"], of["first-batch"])),
            "ratios": [b / a for a, b in zip(of["off"], of["first-batch"])],
        }
        for what, of in found.items()
    ]


def main() -> None:
    from benchmarks.common.record import say, write_record

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="", metavar="REGEX", help="workloads by name; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="processes of a model and check")
    parser.add_argument("--later-rounds", type=int, default=21)
    parser.add_argument("--batches", type=int, default=60, help="of a row in a round, at least")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    rows, folder = [], Path(os.environ["AVGPIPE_DATA"])
    context = multiprocessing.get_context("spawn")
    for model, data in DATA.items():
        if not re.search(arguments.models, model):
            continue
        runs: dict[str, list[dict[str, Any]]] = {check: [] for check in CHECKS}
        for n in range(arguments.rounds):
            for check in CHECKS[:: 1 if n % 2 == 0 else -1]:
                with ProcessPoolExecutor(1, mp_context=context) as pool:
                    runs[check].append(pool.submit(first_batches, model, str(folder / data), check).result())
        rows.append(row_of(model, runs))
        say(json.dumps(rows[-1]))
    later = afterwards(arguments.later_rounds, arguments.batches) if arguments.later_rounds else []
    for found in later:
        say(f"{found['what']}: {found['off_ms']:.3f} ms, times {found['ratio']:.4f}")
    write_record(
        "overlap-audit",
        "what does the first-batch audit cost, in the first batches and afterwards?",
        {"stages": STAGES, "micro_batches": MICRO_BATCHES, "first": FIRST, "rows": rows, "later": later},
        arguments.out,
    )


if __name__ == "__main__":
    main()
