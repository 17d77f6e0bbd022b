"""The best plan of a given system: against all its plans, within the memory, and as far as it is left open."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from avgpipe.measure.forecast import Forecast, OnCluster
from avgpipe.plan import Plan
from avgpipe.systems import SYSTEMS
from avgpipe_lab.planning.of_system import best_of_system
from tests.measure.plans import cluster_of, with_whole_bytes
from tests.measure.uniform import flat, uniform
from tests.planning import chains

BATCH = 8
TOGETHER = [name for name, row in SYSTEMS.items() if "spread" not in row]


def every(system: str, seed: int, workers: int, **options: object) -> list[Forecast]:
    """All micro-batches and cuts of the plans of a system."""
    p, cluster, found = with_whole_bytes(seed), cluster_of(workers), []
    whole = SYSTEMS[system].get("weights") in ("stash", "predicted")  # batches, which are in flight
    for m in (1,) if whole else (1, 2, 3, 4, 6, 8):
        try:
            plan = Plan.for_system(system, stages=workers, **{"micro_batches": m, **options})
        except ValueError:
            continue  # the system has other micro-batches
        problem = OnCluster(p, plan, BATCH, cluster)
        cuts = combinations(range(1, len(p.layers)), plan.stages - 1)
        found += [problem.forecast(cut) for cut in cuts]
    return found


@pytest.mark.parametrize("system", [name for name in TOGETHER if name != "avgpipe"])
@pytest.mark.parametrize("seed", [0, 1, 4])
def test_no_plan_of_the_system_is_much_quicker(system: str, seed: int) -> None:
    found = best_of_system(system, with_whole_bytes(seed), cluster_of(2), BATCH)
    assert found.plan.system == system
    assert found.batch_s <= 1.03 * min(f.batch_s for f in every(system, seed, 2))


def test_pipelines_and_advance_are_chosen_where_they_are_open() -> None:
    cluster = flat(3, bytes_per_s=4.0)
    found = best_of_system("avgpipe", uniform(6), cluster, 12)
    one = best_of_system(
        "avgpipe", uniform(6), cluster, 12, {"pipelines": 1, "micro_batches": 4, "advance": 0}
    )
    assert (one.plan.pipelines, one.plan.micro_batches, one.plan.advance) == (1, 4, 0)
    assert found.plan.pipelines > 1
    assert found.batch_s < one.batch_s


@pytest.mark.parametrize("system", TOGETHER)
def test_a_limit_is_kept_to_or_said_to_be_too_small(system: str) -> None:
    p = with_whole_bytes(1)
    free = best_of_system(system, p, cluster_of(2), BATCH)
    need = max(free.memory_bytes)
    for share in (1.0, 0.8, 0.6):
        cluster = cluster_of(2, memory=share * need)
        try:
            found = best_of_system(system, p, cluster, BATCH)
        except ValueError as error:
            assert "nothing fits" in str(error)  # noqa: PT017
            continue
        assert max(found.memory_bytes) <= share * need
        assert found.batch_s >= 0.98 * free.batch_s
    with pytest.raises(ValueError, match="nothing fits; the smallest plan needs"):
        best_of_system(system, p, cluster_of(2, memory=1.0), BATCH)


def test_recomputation_is_a_way_to_fit() -> None:
    profile, asked = chains.profile(*[chains.layer(held=10.0, output=1.0)] * 4), {"micro_batches": 4}
    free = best_of_system("gpipe", profile, cluster_of(2), 4, asked)
    small = cluster_of(2, memory=0.9 * float(max(free.memory_bytes)))
    found = best_of_system("gpipe", profile, small, 4, asked)
    assert (free.plan.recompute, found.plan.recompute != "never") == ("never", True)
    with pytest.raises(ValueError, match="nothing fits"):
        best_of_system("gpipe", profile, small, 4, {**asked, "recompute": "never"})


def test_workers_that_each_have_a_pipeline_are_predicted_alone() -> None:
    found = best_of_system("data-parallel-asp", uniform(4), flat(3), 4)
    assert (found.plan.pipelines, found.plan.spread, found.plan.workers) == (3, True, 3)
    assert found.plan == replace(
        Plan.for_system("data-parallel-asp", stages=3), micro_batches=found.plan.micro_batches
    )


def test_too_few_samples() -> None:
    with pytest.raises(ValueError, match="pipedream-2bw on 4 workers needs larger batches"):
        best_of_system("pipedream-2bw", uniform(4), flat(4), 2)
