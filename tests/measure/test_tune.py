"""``avgpipe.tune``, with a profile that is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import avgpipe
from avgpipe import Plan
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.profile import LinkProfile
from tests.measure.examples import cluster, heavy
from tests.runner import run
from tests.runtime.cases import momentum


def tuned(**options: object) -> Plan:
    torch.manual_seed(0)
    model = [nn.Linear(4, 4) for _ in range(4)]
    known = {"profile": heavy(), "micro_batches": (1, 2), "pipelines": (1, 2), **options}
    return avgpipe.tune(model, torch.ones(4, 4), **known)  # type: ignore[arg-type]


def test_the_plan_is_for_the_workers_that_are_named() -> None:
    slow = LinkProfile(0.0, 10.0)
    assert tuned().workers == 1
    assert (tuned(workers=2, link=slow).stages, tuned(cluster=cluster(2)).stages) == (2, 2)


def test_a_cluster_says_how_many_workers_there_are() -> None:
    with pytest.raises(ValueError, match="leave out one of the two"):
        tuned(cluster=Cluster.like(heavy(), 2), workers=2)


def test_what_fits_into_no_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_limit_bytes=100: nothing fits"):
        tuned(workers=1, memory_limit_bytes=100)


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_time_the_best_plans_and_agree() -> None:
    options = {"loss_fn": nn.MSELoss(), "target": torch.zeros(4, 4), "optimizer": momentum, "trials": 1}
    first, second = run(2, tuned, **options)
    assert first == second
    assert first.workers == 2  # plans of one device are not timed on two ranks
