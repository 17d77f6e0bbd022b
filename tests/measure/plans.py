"""Clusters, profiles, and all plans of a few shapes, to compare the search with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

from avgpipe.measure import search as searching
from avgpipe.measure.forecast import Forecast, OnCluster
from avgpipe.measure.search import Found, PlanShape, Space
from avgpipe.plan import Plan
from avgpipe.planning.cluster import Cluster, Device, Level
from avgpipe.planning.profile import Profile
from tests.planning import chains

BATCH = 4
RECOMPUTE = ("never", "except-last", "always")
Way = tuple[PlanShape, str, int | None]  # with the recomputation, and the advance


def cluster_of(
    workers: int,
    *,
    memory: float | None = None,
    speeds: Sequence[float] | None = None,
    bytes_per_s: float = 4.0,
) -> Cluster:
    devices = tuple(Device(memory, speed) for speed in speeds or [1.0] * workers)
    return Cluster(devices, (Level(workers, bytes_per_s, 0.1),))


def space(
    p: Profile, workers: int, pipelines: tuple[int, ...] = (1, 2), micro_batches: tuple[int, ...] = (1, 2, 4)
) -> Space:
    return Space(p, cluster_of(workers), BATCH, pipelines, micro_batches)


def search(p: Profile, cluster: Cluster, shapes: Space) -> Found:
    """Search the same sizes for another profile or cluster."""
    return searching.search(replace(shapes, profile=p, cluster=cluster))


def cuts_of(p: Profile, shape: PlanShape) -> list[tuple[int, ...]]:
    return [tuple(a for a, _ in blocks[1:]) for blocks in chains.cuts(len(p.layers), shape.stages)]


def every(
    p: Profile,
    cluster: Cluster,
    shapes: Space,
    recompute: Sequence[str] = ("never",),
    advances: Sequence[int | None] = (None,),
) -> dict[Way, list[Forecast]]:
    """Of each shape all cuts; advance None: the schedule's own."""
    found = {}
    for way in itertools.product(shapes.shapes(), recompute, advances):
        shape, again, advance = way
        if shape.stages > 1 or advance is None:
            problem = OnCluster(p, shape.plan(again, advance), BATCH, cluster)
            found[way] = [problem.forecast(cut) for cut in cuts_of(p, shape)]
    return found


def quickest(found: dict[Way, list[Forecast]]) -> float:
    return min(f.batch_s for several in found.values() for f in several)


def with_accumulation(seed: int, second_lane: float | None = None) -> Profile:
    """A batch's first backward is quicker, by any part of what makes the gradients of the weights."""
    p, draw = chains.random_profile(seed, 6), random.Random(seed)
    rows = tuple(
        replace(row, accumulate_s=draw.random() * (row.backward_s[0] - row.input_backward_s[0]))
        for row in p.layers
    )
    return replace(p, layers=rows, second_lane=() if second_lane is None else (second_lane,))


def with_whole_bytes(seed: int) -> Profile:
    """As of a real model: sums of them have no rounding errors."""
    p = chains.random_profile(seed, 6)
    rows = tuple(
        replace(
            row,
            held_bytes=(round(10 * row.held_bytes[0]),),
            output_bytes=(round(10 * row.output_bytes[0]),),
            parameter_bytes=round(10 * row.parameter_bytes),
            optimizer_bytes=round(10 * row.optimizer_bytes),
        )
        for row in p.layers
    )
    return replace(p, layers=rows, skips=(), ties=())


def shape_of(plan: Plan) -> PlanShape:
    return PlanShape(plan.stages, (plan.replication or [1])[0], plan.pipelines, plan.micro_batches)


def best_of(found: Found, stages: int, workers: int) -> Forecast | None:
    """The best with so many stages and workers."""
    return next((f for f in found.ranked if (f.plan.stages, f.plan.workers) == (stages, workers)), None)
