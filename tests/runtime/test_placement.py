"""Placement: which worker and process holds which stage replica, and who speaks with whom."""

from __future__ import annotations

from typing import Any

import pytest

from avgpipe import Plan
from avgpipe.runtime.placement import Placement

REPLICATED: dict[str, Any] = {"stages": 3, "micro_batches": 6, "replication": [2, 1, 3]}
SPREAD: dict[str, Any] = {"stages": 2, "pipelines": 3, "micro_batches": 2, "spread": True}


def placement(ranks: int | None = None, **options: Any) -> Placement:
    plan = Plan(**options)
    return Placement.of(plan, plan.workers if ranks is None else ranks)


def test_replicas_are_numbered_stage_after_stage() -> None:
    p = placement(**REPLICATED)
    assert [p.replicas_of(k) for k in range(3)] == [[0, 1], [2], [3, 4, 5]]
    assert [p.stage_of(n) for n in range(6)] == [0, 0, 1, 2, 2, 2]
    assert (p.is_replicated, p.is_dedicated, p.is_plain) == (True, False, False)


def test_micro_batches_go_round_robin_over_the_replicas_of_each_stage() -> None:
    p = placement(**REPLICATED)
    assert [p.replica_for(0, m) for m in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [p.replica_for(2, m) for m in range(6)] == [3, 4, 5, 3, 4, 5]


def test_one_process_holds_all_and_else_each_holds_a_worker() -> None:
    alone, apart = placement(1, **REPLICATED), placement(**REPLICATED)
    assert alone.held_by(0) == list(range(6))
    assert {alone.rank_of(n) for n in range(6)} == {0}
    assert [apart.held_by(rank) for rank in range(6)] == [[n] for n in range(6)]
    assert [apart.rank_of(n) for n in range(6)] == list(range(6))


def test_a_worker_may_have_several_stages() -> None:
    p = placement(stages=4, micro_batches=2, schedule="interleaved-1f1b")
    assert p.workers == ((0, 2), (1, 3))
    assert [p.worker_of(k) for k in range(4)] == [0, 1, 0, 1]


def test_stages_go_to_the_workers_that_a_plan_names() -> None:
    p = placement(stages=3, micro_batches=2, placement=[[2], [0], [1]])
    assert [p.worker_of(k) for k in range(3)] == [2, 0, 1]
    assert p.held_by(0) == [1]


def test_dedicated_pipelines_have_replicas_of_their_own() -> None:
    p = placement(**SPREAD)
    assert [p.replicas_of(1, i) for i in range(3)] == [[1], [3], [5]]
    assert [p.pipelines_of(n) for n in range(6)] == [[0], [0], [1], [1], [2], [2]]
    assert [p.first_replicas(i) for i in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert p.has_part_in(2, 1)
    assert not p.has_part_in(2, 0)


def test_pipelines_that_share_workers_share_replicas() -> None:
    p = placement(stages=2, pipelines=3, micro_batches=2)
    assert [p.pipelines_of(n) for n in range(2)] == [[0, 1, 2]] * 2
    assert p.is_plain


def test_what_stages_tell_each_other_has_one_way_between_all_replicas() -> None:
    """Every replica of a stage is told by exactly one of another stage, and that one knows whom it tells."""
    for options in (REPLICATED, SPREAD, {"stages": 2}):
        p = placement(**options)
        for n, replica in enumerate(p.replicas):
            for k in range(p.stages):
                if k != replica.stage:
                    source = p.source_for(n, k)
                    assert p.stage_of(source) == k
                    assert n in p.receivers_of(source, replica.stage)


def test_ranks_must_be_one_or_as_many_as_workers() -> None:
    with pytest.raises(
        ValueError, match="for 6 workers and there are 2 ranks: start one rank per worker, or"
    ):
        placement(2, **REPLICATED)
