"""Profiles of equal layers, flat clusters and even cuts."""

from __future__ import annotations

import math
from dataclasses import replace

from avgpipe.measure.forecast import Forecast, OnCluster
from avgpipe.plan import Plan
from avgpipe.planning.cluster import Cluster, Device, Level
from avgpipe.planning.profile import LayerProfile, Profile
from tests.planning import chains


def layer(**more: float) -> LayerProfile:
    """A forward of 1 s and a backward of 2 s for each sample; ``more``: of what has no size of micro-batch."""
    return replace(chains.layer(), **more)  # type: ignore[arg-type]


def uniform(count: int, **more: object) -> Profile:
    return chains.profile(*[layer() for _ in range(count)], **more)  # type: ignore[arg-type]


def flat(workers: int, bytes_per_s: float = math.inf, latency_s: float = 0.0) -> Cluster:
    return Cluster((Device(),) * workers, (Level(workers, bytes_per_s, latency_s),))


def even(stages: int, layers: int, **options: object) -> Plan:
    cut = [layers // stages * k for k in range(1, stages)]
    return Plan(stages=stages, partition=cut or None, **options)  # type: ignore[arg-type]


def forecast(profile: Profile, plan: Plan, batch_size: int, cluster: Cluster) -> Forecast:
    """Forecast a plan with its own cut, by numbers of layers."""
    cut = tuple(int(first) for first in plan.partition or ())
    return OnCluster(profile, plan, batch_size, cluster).forecast(cut)
