"""The best plan of one published system, which has fewer choices than the search over all plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from operator import attrgetter
from typing import Any

from avgpipe import systems
from avgpipe.measure.forecast import Forecast, OnCluster
from avgpipe.measure.search import fastest_first_cut, fits, nothing_fits
from avgpipe.plan import Plan
from avgpipe.planning import choose_advance
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.cuts import Cut, CutSearch
from avgpipe.planning.profile import Profile
from avgpipe.schedule import RECOMPUTE
from avgpipe.systems import SYSTEMS

PIPELINES = (1, 2, 3, 4)
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # micro-batches to try, per replica of each pipeline
_REFINED = 3  # plans with a search for the cut, which others only balance
_CLOSE = 1.01  # of two plans with closer times, choose the one with less memory
_ADVANCES = "advance-forward"
_seconds = attrgetter("batch_s")


def best_of_system(
    system: str, profile: Profile, cluster: Cluster, batch_size: int, given: Mapping[str, Any] | None = None
) -> Forecast:
    """Return the plan of a system on all workers that fits into their memory and is predicted to be fastest.

    It tries micro-batches, pipelines, advance and recomputation, as far as the system leaves them open, and
    searches for the cut. Systems whose pipelines have their own workers are predicted as one such pipeline.

    Args:
        system: Name of the system.
        profile: Profile of the model.
        cluster: The workers, and the memory of each.
        batch_size: Samples of a batch.
        given: Options of ``Plan`` that are fixed.

    Raises:
        ValueError: Nothing fits into the memory (by how much), or the system rejects the given options.
    """
    options = dict(given or {})
    sizes = list(_sizes(system, cluster.workers, batch_size, options))
    if not sizes:
        raise ValueError(
            f"batch_size={batch_size}: {system} on {cluster.workers} workers needs larger batches"
        )

    def on_cluster(plan: Plan) -> OnCluster:
        return OnCluster(profile, plan, batch_size, cluster)

    ways = [[on_cluster(plan) for plan in _ways(system, {**options, **size})] for size in sizes]
    rough = sorted(filter(None, map(fastest_first_cut, ways)), key=_seconds)
    if not rough:
        raise nothing_fits(problem for of_size in ways for problem in of_size)
    found = [*rough]
    for forecast in rough[:_REFINED]:
        whole = replace(forecast.plan, partition=None)
        cut, plans = _refined(on_cluster(whole), "advance" not in options)
        found += [on_cluster(plan).forecast(cut) for plan in plans]
    fitting = [f for f in found if fits(f, cluster)]
    best_s = min(map(_seconds, fitting))
    near = [f for f in fitting if f.batch_s <= _CLOSE * best_s]
    best = min(near, key=lambda f: (max(f.memory_bytes), f.batch_s))
    if _is_apart(system):
        plan = replace(best.plan, pipelines=cluster.workers, spread=True, system=system)
        best = replace(best, plan=plan)
    return best


def _is_apart(system: str) -> bool:
    return bool(SYSTEMS[system].get("spread"))


def _sizes(system: str, workers: int, batch_size: int, given: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Yield stages, pipelines and micro-batches to try."""
    row = systems.row(system, workers)
    replication = row.get("replication")
    open_pipelines = [given["pipelines"]] if "pipelines" in given else PIPELINES
    for n in [row["pipelines"]] if "pipelines" in row else open_pipelines:
        shares = n if given.get("batch", row.get("batch", "global")) == "global" else 1
        each = shares * max(replication or [1])
        wanted = [given["micro_batches"]] if "micro_batches" in given else [each * m for m in _PARTS]
        if "micro_batches" in row:
            wanted = [row["micro_batches"]]
        parts = {systems.micro_batches(system, workers, replication, m) for m in wanted}
        for m in sorted(m for m in parts if m <= batch_size):
            yield {"stages": workers, "pipelines": n, "micro_batches": m}


def _ways(system: str, options: Mapping[str, Any]) -> Iterator[Plan]:
    """Yield the plans of a size; recomputation, and 1F1B instead of the schedule's advance, need less memory."""
    schedule = options.get("schedule", SYSTEMS[system]["schedule"])
    own = {"recompute": RECOMPUTE, "advance": (None, 0) if schedule == _ADVANCES else (None,)}
    tried = {name: (options[name],) if name in options else values for name, values in own.items()}
    for recompute, advance in product(tried["recompute"], tried["advance"]):
        plan = Plan.for_system(system, **{**options, "recompute": recompute, "advance": advance})
        yield replace(plan, pipelines=1, spread=False, system="avgpipe") if _is_apart(system) else plan


def _refined(problem: OnCluster, chooses: bool) -> tuple[Cut, list[Plan]]:
    """Return the best cut of a plan, and the plan, with the best advance for the cut if it ``chooses`` that, too."""
    cut, _, _ = CutSearch(problem, problem.limits).best()
    plan = problem.plan
    if not chooses or plan.schedule != _ADVANCES or plan.stages == 1:
        return cut, [plan]
    costs, limit = problem.costs_in_memory(cut)
    if costs is None:
        return cut, [plan]
    parts, pipelines = problem.micro_batches, plan.pipelines
    chosen = choose_advance(plan.stages, parts, costs, pipelines=pipelines, memory_limit_bytes=limit)
    return cut, [plan, replace(plan, advance=chosen.advance)]
