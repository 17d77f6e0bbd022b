"""Samples to a target: from validation losses by samples, and beside one pipeline's with the same seed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf
from statistics import fmean, median_high
from typing import Any, NamedTuple

Run = dict[str, Any]  # workload, way, seed, lr, and the losses with their samples
Losses = Sequence[tuple[int, float]]
Ways = dict[str, dict[int, Losses]]  # by way and seed
BASELINE = "one"
TIMES = ", lr x "  # after a way's name: with another rate
SLACK = 0.005  # above the worst seed of the baseline, that a target is


class Passes(NamedTuple):
    """Samples to a target over the baseline's with the same seed; infinity where it was not reached."""

    median: float
    least: float
    most: float


def samples_to(losses: Losses, target: float) -> float:
    """Return the samples at which the loss first is at most ``target``, between two validations on a straight line.

    A first validation below the target counts as it stands; infinity where no validation reaches it.
    """
    if losses and losses[0][1] <= target:
        return float(losses[0][0])
    for (before, above), (after, below) in pairwise(losses):
        if below <= target:
            return before + (after - before) * (above - target) / (above - below)
    return inf


def loss_at(losses: Losses, samples: float) -> float:
    """Return the loss of the first validation at or after a number of samples; of the last one if there is none."""
    return next((loss for done, loss in losses if done >= samples), losses[-1][1])


def rates(runs: Iterable[Run], workload: str) -> dict[str, dict[float, dict[int, Run]]]:
    """Return the runs of each way of a workload by learning rate and seed; "one, lr x 1.4" is way "one"."""
    found: dict[str, dict[float, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        if run["workload"] == workload:
            found[run["way"].partition(TIMES)[0]][round(run["lr"], 6)][run["seed"]] = run
    return found


def best_rate(by_rate: dict[float, dict[int, Run]]) -> float:
    """Return the learning rate that has most seeds; of several, that with the least mean of last losses."""
    return min(by_rate, key=lambda lr: (-len(by_rate[lr]), last_loss(by_rate[lr])))


def last_loss(seeds: dict[int, Run]) -> float:
    return fmean(run["losses"][-1][1] for run in seeds.values())


def by_way(runs: Iterable[Run], workload: str) -> Ways:
    """Return the losses of each way of a workload and each of its seeds, at the best learning rate."""
    return {
        way: {
            seed: [(int(samples), float(loss)) for samples, loss, *_ in run["losses"]]
            for seed, run in by_rate[best_rate(by_rate)].items()
        }
        for way, by_rate in rates(runs, workload).items()
    }


def target_of(ways: Ways, slack: float = SLACK, baseline: str = BASELINE) -> float:
    """Return a target that the baseline reaches: the highest of its seeds' last losses, and so much more of it."""
    return (1 + slack) * max(losses[-1][1] for losses in ways[baseline].values())


def passes_to(ways: Ways, way: str, target: float, baseline: str = BASELINE) -> Passes:
    """Return how many times the baseline's samples a way needs, over the seeds that both have.

    ValueError for a target that the baseline does not reach.
    """
    needed = {seed: samples_to(losses, target) for seed, losses in ways[baseline].items()}
    if max(needed.values()) == inf:
        least = target_of(ways, 0, baseline)
        raise ValueError(
            f"target {target:g}: way {baseline!r} does not reach it with every seed; "
            f"give one of at least {least:g}"
        )
    both = sorted(needed.keys() & ways[way].keys())
    ratios = [samples_to(ways[way][seed], target) / needed[seed] for seed in both]
    return Passes(median_high(ratios), min(ratios), max(ratios))
