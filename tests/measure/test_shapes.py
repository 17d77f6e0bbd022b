from __future__ import annotations

from dataclasses import replace

import pytest

from avgpipe.measure.search import PIPELINES, PlanShape, Space, check_sizes
from avgpipe.plan import Plan
from tests.measure.plans import cluster_of, shape_of
from tests.planning import chains


def space_of(
    workers: int,
    layers: int,
    batch_size: int,
    pipelines: tuple[int, ...] = PIPELINES,
    micro_batches: tuple[int, ...] | None = None,
    second_lane: float = 1.0,
) -> Space:
    p = replace(chains.profile(*[chains.layer()] * layers), second_lane=(second_lane,))
    return Space(p, cluster_of(workers), batch_size, pipelines, micro_batches)


def sizes(space: Space) -> list[tuple[int, int]]:
    """Stages and replicas of each, without what is tried for each of them."""
    return list(dict.fromkeys(shape[:2] for shape in space.shapes()))


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        (1, [(1, 1)]),
        (2, [(1, 1), (1, 2), (2, 1)]),
        (4, [(1, 1), (1, 4), (2, 2), (3, 1), (4, 1)]),
        (7, [(1, 1), (1, 7), (2, 3), (3, 2), (4, 1), (5, 1), (6, 1), (7, 1)]),
    ],
)
def test_few_workers(workers: int, expected: list[tuple[int, int]]) -> None:
    assert sizes(space_of(workers, layers=10, batch_size=32)) == expected


def test_no_more_stages_than_layers() -> None:
    assert sizes(space_of(7, layers=3, batch_size=32)) == [(1, 1), (1, 7), (2, 3), (3, 2)]
    assert sizes(space_of(7, layers=1, batch_size=32)) == [(1, 1), (1, 7)]


def test_many_workers_leave_few_idle() -> None:
    found = sizes(space_of(1000, layers=200, batch_size=4096))
    at_most_20_idle = [
        (stages, 1000 // stages) for stages in range(2, 201) if stages * (1000 // stages) >= 980
    ]
    assert found == [(1, 1), (1, 1000), *at_most_20_idle]
    assert {(8, 125), (10, 100), (100, 10), (200, 5), (7, 142), (164, 6)} <= set(found)
    assert (180, 5) not in found  # 100 idle


def test_no_replica_is_without_a_sample() -> None:
    assert space_of(8, layers=5, batch_size=3).width(1) == 3
    assert sizes(space_of(8, layers=5, batch_size=3)) == [(1, 1), (1, 3), (2, 3), (3, 2), (4, 2), (5, 1)]
    assert sizes(space_of(8, layers=5, batch_size=1)) == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]
    # As many parts as are asked for are as many as can have one.
    asked = space_of(8, layers=2, batch_size=12, micro_batches=(2, 4))
    assert sizes(asked) == [(1, 1), (1, 4), (2, 4)]


def test_many_workers_with_a_small_batch() -> None:
    """The replicas that have no sample do not count as idle: the most that any number of stages keeps busy does."""
    found = sizes(space_of(1000, layers=10, batch_size=64))
    assert found == [(1, 1), (1, 64), (10, 64)]
    found = sizes(space_of(1000, layers=200, batch_size=64))
    assert all(width == min(1000 // stages, 64) for stages, width in found[1:])
    assert found[2:] == [(k, min(1000 // k, 64)) for k in range(2, 201) if k * min(1000 // k, 64) >= 980]


def test_a_batch_is_parted_alike_among_replicas() -> None:
    parts = {width: space_of(8, 8, batch_size=12).parts(width) for width in (1, 2, 3, 8, 13)}
    assert parts == {1: [1, 2, 3, 4, 6, 8, 12], 2: [2, 4, 6, 8, 12], 3: [3, 6, 9, 12], 8: [8], 13: []}
    asked = space_of(8, 8, batch_size=12, micro_batches=(2, 3, 4, 6))
    assert {width: asked.parts(width) for width in (1, 2, 3, 5)} == {
        1: [2, 3, 4, 6],
        2: [2, 4, 6],
        3: [3, 6],
        5: [],
    }


def test_all_shapes_of_two_workers() -> None:
    space = space_of(2, layers=4, batch_size=2, pipelines=(1, 2))
    assert list(space.shapes()) == [
        PlanShape(1, 1, 1, 1),
        PlanShape(1, 1, 1, 2),
        PlanShape(1, 2, 1, 2),
        PlanShape(2, 1, 1, 1),
        PlanShape(2, 1, 1, 2),
        PlanShape(2, 1, 2, 2),
    ]


def test_several_pipelines_on_one_device_where_that_may_gain() -> None:
    space = space_of(2, layers=4, batch_size=4, pipelines=(1, 2), micro_batches=(3, 4), second_lane=1.5)
    assert list(space.shapes()) == [
        PlanShape(1, 1, 1, 3),
        PlanShape(1, 1, 1, 4),
        PlanShape(1, 1, 2, 3),  # two and one
        PlanShape(1, 1, 2, 4),
        PlanShape(1, 2, 1, 4),
        PlanShape(1, 2, 2, 4),
        PlanShape(2, 1, 1, 3),
        PlanShape(2, 1, 1, 4),
        PlanShape(2, 1, 2, 3),
        PlanShape(2, 1, 2, 4),
    ]


def test_pipelines_and_replicas_part_a_batch_alike() -> None:
    shapes = list(space_of(4, layers=4, batch_size=16, pipelines=(1, 2, 3)).shapes())
    assert {s.micro_batches for s in shapes if s[:3] == (2, 2, 3)} == {6, 12}
    assert all(s.micro_batches % (s.width * s.pipelines) == 0 for s in shapes)


def test_every_shape_is_a_plan() -> None:
    for shape in space_of(7, layers=7, batch_size=32, second_lane=1.5).shapes():
        plan = shape.plan("except-last")
        assert (plan.workers, plan.recompute) == (shape.stages * shape.width, "except-last")
        assert plan.workers <= 7
        assert shape_of(plan) == shape


def test_plans_of_shapes() -> None:
    assert PlanShape(1, 1, 1, 4).plan() == Plan(stages=1, micro_batches=4, schedule="1f1b")
    assert PlanShape(1, 3, 1, 6).plan() == Plan(
        stages=1, micro_batches=6, schedule="1f1b", system="data-parallel", replication=[3]
    )
    assert PlanShape(2, 1, 3, 4).plan() == Plan(stages=2, pipelines=3, micro_batches=4)
    assert PlanShape(2, 2, 1, 4).plan("always") == Plan(
        stages=2, micro_batches=4, replication=[2, 2], recompute="always"
    )


@pytest.mark.parametrize("size", [0, -4, 2.0, True, "8"])
def test_a_batch_has_samples(size: object) -> None:
    with pytest.raises(ValueError, match=r"^batch_size=.*: must be a whole number of at least 1$"):
        check_sizes(size, (1,), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["pipelines", "micro_batches"])
@pytest.mark.parametrize("values", [(), (0,), (1, -1), (1.0,), (True,)])
def test_counts_to_try_are_whole_numbers(name: str, values: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=rf"^{name}=.*: must be whole numbers of at least 1$"):
        check_sizes(8, **{"pipelines": (1,), "micro_batches": None, name: values})  # type: ignore[arg-type]


def test_no_more_micro_batches_than_samples() -> None:
    with pytest.raises(
        ValueError, match=r"^micro_batches=\[9, 16\]: a batch of 8 samples has too few samples"
    ):
        check_sizes(8, (1,), (4, 8, 9, 16))
