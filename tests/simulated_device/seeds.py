"""Train under many seeds of the simulated device, and compare each run with the CPU's, bit by bit.

    python -m tests.simulated_device.seeds --seeds 1000 --processes 2
    python -m tests.simulated_device.seeds --replay random:17
    python -m tests.simulated_device.seeds --mutants --seeds 20

A seed is four trainings, of 2 and 3 pipelines with staleness 0 and 1, each in an order of its own. The policies "eager"
and "late" leave nothing to chance, so one seed of them is all. Stages are not compared with the model beforehand: that
waits for the device, and hides the orders of the first batch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

from avgpipe import Plan
from tests.simulated_device import load, simulate
from tests.simulated_device.mutants import MUTANTS
from tests.simulated_device.training import Results, differences, pipeline_of, train

POLICIES = ("late", "random", "starved")
CERTAIN = ("eager", "late")


def cases() -> list[Plan]:
    """Two and three pipelines with either staleness, of 1 to 3 stages, by both rules."""
    shapes = [
        (2, 0, 2, "per-pipeline", None),
        (2, 1, 3, "global", None),
        (3, 0, 1, "per-pipeline", "avgpipe"),
    ]
    shapes += [(3, 1, 2, "per-pipeline", "avgpipe")]
    return [
        Plan(stages=k, pipelines=n, micro_batches=2, staleness=staleness, batch=batch, rule=rule)
        for n, staleness, k, batch, rule in shapes
    ]


@cache
def expected(case: int) -> Results:
    """What the CPU gives. One run on the device goes before: the runtime looks at some things once in a process."""
    with simulate("eager"):
        train(cases()[case], "sim:0", check="off")
    return train(cases()[case], "cpu", check="off")


class Run(NamedTuple):
    """One seed under a policy. ``found``: what differs or was raised, by case; empty if all is equal."""

    seed: int
    tasks: int
    host_waits: int
    found: list[str]


def run_seed(policy: str, seed: int, mutant: str | None = None) -> Run:
    tasks = waits = 0
    found = []
    for case, plan in enumerate(cases()):
        target = expected(case)
        with simulate(policy, seed * len(cases()) + case) as simulation:
            try:
                with MUTANTS[mutant]() if mutant else nullcontext():
                    differs = differences(train(plan, "sim:0", check="off"), target)
            except Exception as error:
                differs = [f"{type(error).__name__}: {str(error)[:200]}"]
            tasks += simulation.counters.tasks
            waits += simulation.counters.host_waits
        if differs:
            what = f"{plan.pipelines} pipelines, staleness {plan.staleness}, {plan.stages} stages"
            found.append(f"{what}: {', '.join(differs[:3])}")
    return Run(seed, tasks, waits, found)


def begin() -> None:
    import logging

    torch.set_num_threads(1)
    logging.getLogger("avgpipe").setLevel(logging.ERROR)  # NaN is what mutants are for
    load()
    with pipeline_of(cases()[0], "cpu"):  # imports what the first pipeline of a process does
        pass


def run_seeds(policy: str, seeds: Iterable[int], processes: int) -> list[Run]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=begin) as pool:
        numbers = list(seeds)
        return list(pool.map(run_seed, [policy] * len(numbers), numbers, chunksize=10))


def check(policies: list[str], wanted: int, processes: int) -> bool:
    """Print a line for each policy; whether all runs of all are equal."""
    good = True
    for policy in policies:
        start = time.perf_counter()
        seeds = 1 if policy in CERTAIN else wanted
        runs = run_seeds(policy, range(seeds), processes)
        differ = [run for run in runs if run.found]
        good &= not differ
        told = (
            "all equal"
            if not differ
            else f"{len(differ)} differ: " + ", ".join(str(r.seed) for r in differ[:20])
        )
        print(
            f"{policy}: {seeds} seeds, {seeds * len(cases())} trainings, {sum(r.tasks for r in runs):,} tasks, "
            f"{sum(r.host_waits for r in runs):,} host waits, {time.perf_counter() - start:.0f} s: {told}",
            flush=True,
        )
        for run in differ[:3]:
            print("\n".join(f"  {policy}:{run.seed} {line}" for line in run.found))
    return good


def first_seen(mutant: str, policy: str, seeds: int) -> Run | None:
    count = 1 if policy in CERTAIN else seeds
    return next((run for seed in range(count) if (run := run_seed(policy, seed, mutant)).found), None)


def check_mutants(names: list[str], policies: list[str], seeds: int) -> bool:
    """Print in which seed of each policy a missing order is first seen; whether each is, and only where it is late."""
    begin()
    good = True
    for name in names:
        seen = {policy: first_seen(name, policy, seeds) for policy in policies}
        eager = run_seed("eager", 0, name).found
        good &= any(seen.values()) and not eager
        told = [f"{policy} {'not' if run is None else run.seed}" for policy, run in seen.items()]
        example = (
            f"but eager: {eager[0]}" if eager else next((run.found[0] for run in seen.values() if run), "")
        )
        print(f"{name}: first seen in seed: {', '.join(told)} ({example[:110]})", flush=True)
    return good


def replay(what: str) -> bool:
    begin()
    policy, seed = what.split(":")
    run = run_seed(policy, int(seed))
    print(f"{what}: {run.tasks:,} tasks, {run.host_waits:,} host waits: {run.found or 'all equal'}")
    return not run.found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--replay", metavar="POLICY:SEED", help="run one seed again")
    parser.add_argument(
        "--mutant", choices=MUTANTS, help="leave out one order, and say in which seed that is seen"
    )
    parser.add_argument("--mutants", action="store_true", help="the same for each of them")
    given: Any = parser.parse_args()
    policies = given.policies.split(",")
    if given.replay:
        good = replay(given.replay)
    elif given.mutant or given.mutants:
        good = check_mutants([given.mutant] if given.mutant else list(MUTANTS), policies, given.seeds)
    else:
        good = check(policies, given.seeds, given.processes)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
