"""The search over plans against every cut of every shape."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe.partitioning.network import Level
from avgpipe.profiling.profile import Profile
from avgpipe.simulation import steady_batch_s
from avgpipe.tuning.cluster import Cluster, Device
from avgpipe.tuning.forecast import Forecast, OnCluster, forecast
from avgpipe.tuning.search import _Search, fits, search, shape_of
from avgpipe.tuning.shapes import Shape, Space
from tests.partitioning import chains

BATCH = 4
EXACT = 1 + 1e-9
# Of two plans whose times differ by less than a hundredth the search takes the one that needs less memory; and it
# leaves out what cannot be quicker in the long run, from which the batches simulated may differ by some per mille.
CLOSE = 1.02
RECOMPUTE = ("never", "except-last", "always")


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
    return Space(workers, len(p.layers), BATCH, pipelines, micro_batches)


def every(
    p: Profile, cluster: Cluster, shapes: Space, recompute: Sequence[str] = ("never",)
) -> dict[tuple[Shape, str], list[Forecast]]:
    """Of each shape all cuts, with the schedule's own advance."""
    found = {}
    for shape in shapes.shapes():
        for again in recompute:
            problem = OnCluster(p, shape.plan(again), BATCH, cluster)
            cuts = chains.cuts(len(p.layers), shape.stages)
            found[shape, again] = [problem.forecast(tuple(a for a, _ in blocks[1:])) for blocks in cuts]
    return found


def quickest(found: dict[tuple[Shape, str], list[Forecast]]) -> float:
    return min(f.batch_s for several in found.values() for f in several)


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


# ---- time ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**9), st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=3))
def test_no_cut_of_any_shape_is_quicker(seed: int, speeds: list[float]) -> None:
    """Where all shapes that may be best are among the five that are refined: up to three workers, two M, one N."""
    p = chains.random_profile(seed, 6)
    cluster = cluster_of(len(speeds), speeds=speeds)
    shapes = space(p, len(speeds), pipelines=(2,), micro_batches=(1, 4))
    found = search(p, cluster, shapes)
    assert found.best.batch_s <= CLOSE * quickest(every(p, cluster, shapes))
    assert (found.considered, found.excluded) == (len(list(shapes.shapes())), 0)


def test_with_more_shapes_hardly_any_is() -> None:
    """The five are then those that are quickest with a balanced cut, which another may overtake with its best one."""
    ratios = []
    for seed in range(40):
        draw = random.Random(seed)
        p = chains.random_profile(seed, 6)
        adding = [draw.random() * (row.backward_s[0] - row.input_backward_s[0]) for row in p.layers]
        rows = tuple(replace(row, accumulate_s=s) for row, s in zip(p.layers, adding))
        p = replace(p, layers=rows)
        cluster = cluster_of(draw.randint(1, 3), bytes_per_s=draw.choice([1.0, 4.0, 100.0]))
        shapes = space(p, cluster.workers)
        best = quickest(every(p, cluster, shapes))
        if best > 0:
            ratios.append(search(p, cluster, shapes).best.batch_s / best)
    assert sorted(ratios)[len(ratios) // 2] <= EXACT
    assert max(ratios) <= 1.03


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**9), st.integers(1, 3))
def test_what_is_found_is_forecast_so(seed: int, workers: int) -> None:
    p = chains.random_profile(seed, 6)
    cluster = cluster_of(workers)
    found = search(p, cluster, space(p, workers))
    assert found.best is found.ranked[0]
    assert [f.batch_s for f in found.ranked] == sorted(f.batch_s for f in found.ranked)
    for f in found.ranked:
        assert f == forecast(p, f.plan, BATCH, cluster)
        same = [other for other in found.ranked if shape_of(other.plan) == shape_of(f.plan)]
        assert same == [f]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**9), st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=3))
def test_no_cut_is_below_the_bound_of_its_shape(seed: int, speeds: list[float]) -> None:
    """Of many batches of each pipeline: when 49 are timed, each worker has done at most one of them before."""
    p = chains.random_profile(seed, 6)
    cluster = cluster_of(len(speeds), speeds=speeds)
    shapes = space(p, len(speeds), pipelines=(2, 3))
    bounds = _Search(p, cluster, shapes)
    for shape in shapes.shapes():
        problem = OnCluster(p, shape.plan(), BATCH, cluster)
        built = shape.plan().build_schedule(-(-shape.micro_batches // shape.width))
        for blocks in chains.cuts(len(p.layers), shape.stages):
            costs = problem.costs(tuple(a for a, _ in blocks[1:]))
            found_s = steady_batch_s(built, costs, pipelines=shape.pipelines, batches=100 * shape.pipelines)
            assert bounds._least_s(shape) <= 49 / 48 * found_s + 1e-9  # simulations count whole picoseconds


def test_transfers_that_take_long_leave_one_device() -> None:
    p = chains.profile(*[chains.layer(output=100.0, parameters=100.0) for _ in range(4)])
    best = search(p, cluster_of(2, bytes_per_s=0.01), space(p, 2)).best.plan
    assert (best.stages, best.workers) == (1, 1)


def test_light_weights_and_heavy_activations_make_data_parallelism() -> None:
    p = chains.profile(*[chains.layer(output=100.0) for _ in range(4)])
    best = search(p, cluster_of(2, bytes_per_s=1.0), space(p, 2)).best.plan
    assert (best.system, best.stages, best.workers) == ("data-parallel", 1, 2)


def test_heavy_weights_and_light_activations_make_a_pipeline() -> None:
    p = chains.profile(*[chains.layer(parameters=1000.0) for _ in range(4)])
    found = search(p, cluster_of(2, bytes_per_s=1.0), space(p, 2))
    assert (found.best.plan.stages, found.best.plan.partition) == (2, [2])
    assert found.best.batch_s == pytest.approx(BATCH * 4 * 3.0 / 2)  # two pipelines leave no bubble


def test_the_best_with_one_stage_are_there_for_comparison() -> None:
    p = chains.profile(*[chains.layer(parameters=1000.0, update_s=0.5) for _ in range(4)])
    found = search(p, cluster_of(2), space(p, 2, micro_batches=(2, 4)))
    one, both = found.first(1, 1), found.first(1, 2)
    assert one is not None
    assert one.batch_s == pytest.approx(BATCH * 4 * 3.0 + 4 * 0.5)
    assert both is not None
    assert both.plan.replication == [2]
    assert found.first(2, 2) == found.best
    assert found.first(3, 3) is None


def test_an_advance_that_gains_nothing_is_left_out() -> None:
    """Where transfers take no time 1F1B is as quick as any, with fewer micro-batches in flight."""
    p = chains.profile(*[chains.layer(held=10.0, parameters=1e3) for _ in range(4)])
    cluster = Cluster((Device(),) * 2, (Level(2, 1.0),))
    best = search(p, cluster, space(p, 2, pipelines=(1,), micro_batches=(4,))).first(2, 2)
    assert best is not None
    assert best.plan.build_schedule().peak_in_flight == [2, 1]
    assert best.batch_s == pytest.approx((4 + 2 - 1) * 2 * 3.0)


def test_of_long_schedules_those_with_a_name_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("avgpipe.tuning.search._LONG", 0)
    for seed in range(5):
        p = chains.random_profile(seed, 6)
        for f in search(p, cluster_of(3), space(p, 3)).ranked:
            assert f.plan.advance in (None, 0)


# ---- memory ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 10**9), st.integers(1, 3), st.sampled_from([0.7, 0.99, 1.0, 1.2, 2.0]))
def test_what_is_found_fits(seed: int, workers: int, share: float) -> None:
    """If anything does, with any recomputation; and of each shape, with the least of that, no cut is quicker."""
    p = with_whole_bytes(seed)
    shapes = space(p, workers, micro_batches=(1,))
    all_of_them = every(p, cluster_of(workers), shapes, RECOMPUTE)
    least = min(max(f.memory_bytes) for several in all_of_them.values() for f in several)
    limit = max(1.0, float(int(share * least)))
    cluster = cluster_of(workers, memory=limit)
    fitting = {key: [f for f in several if fits(f, cluster)] for key, several in all_of_them.items()}
    if not any(fitting.values()):
        needed = least_of_error(p, cluster, shapes, limit)
        assert needed >= least
        enough = cluster_of(workers, memory=needed)
        assert max(search(p, enough, shapes).best.memory_bytes) <= needed
        return
    found = search(p, cluster, shapes)
    assert all(max(f.memory_bytes) <= limit for f in found.ranked)
    chosen = [
        next((fitting[shape, again] for again in RECOMPUTE if fitting[shape, again]), [])
        for shape in shapes.shapes()
    ]
    assert found.best.batch_s <= CLOSE * min(f.batch_s for several in chosen for f in several)


def least_of_error(p: Profile, cluster: Cluster, shapes: Space, limit: float) -> float:
    with pytest.raises(ValueError, match=f"^memory_limit_bytes={limit:.0f}: nothing fits; ") as caught:
        search(p, cluster, shapes)
    said = re.search(r"needs least needs (\d+) on one worker, (\d+) more ", str(caught.value))
    assert said is not None
    assert float(said[2]) == float(said[1]) - limit
    return float(said[1])


def heavy() -> Profile:
    """Of each layer 100 bytes of weights, 200 of optimizer; of each sample 10 are held and 4 sent on."""
    return chains.profile(*[chains.layer(parameters=100.0, held=10.0, output=4.0, optimizer=200.0)] * 4)


def test_where_nothing_fits_the_least_that_would_is_said_and_does() -> None:
    p = heavy()
    shapes = space(p, 2, pipelines=(1,))
    # Two stages of two layers, micro-batches of one sample, computed again: stage 1 keeps its input of 4 bytes, and
    # with all that the layers hold it has that once more.
    least = 2 * 400 + 4 + (4 + 20)
    assert least_of_error(p, cluster_of(2, memory=700.0), shapes, 700.0) == least
    assert least_of_error(p, cluster_of(2, memory=least - 1), shapes, least - 1) == least
    found = search(p, cluster_of(2, memory=least), shapes)
    plan = found.best.plan
    assert (plan.stages, plan.micro_batches, plan.recompute, plan.partition) == (2, 4, "always", [2])
    assert found.best.memory_bytes == (820.0, 828.0)
    # All five with one stage, and of two stages M = 2; M = 1 need not be looked at, it would take longer.
    assert (found.considered, found.excluded) == (8, 6)


def test_recomputation_only_where_memory_asks_for_it() -> None:
    p = heavy()
    shapes = space(p, 2, pipelines=(1,), micro_batches=(4,))
    assert search(p, cluster_of(2, memory=860.0), shapes).best.plan.recompute == "never"
    assert search(p, cluster_of(2, memory=858.0), shapes).best.plan.recompute != "never"


def test_more_memory_is_never_slower() -> None:
    for seed in range(10):
        p = with_whole_bytes(seed)
        shapes = space(p, 2, micro_batches=(1,))
        unlimited = search(p, cluster_of(2), shapes).best
        enough = cluster_of(2, memory=10 * max(unlimited.memory_bytes) + 1)
        assert search(p, enough, shapes).best.batch_s == pytest.approx(unlimited.batch_s)


def test_what_fits() -> None:
    p = heavy()
    f = OnCluster(p, Shape(2, 1, 1, 4).plan(), BATCH, cluster_of(2)).forecast((2,))
    assert f.memory_bytes == (860.0, 824.0)
    assert fits(f, cluster_of(2))
    assert fits(f, cluster_of(2, memory=860.0))
    assert not fits(f, cluster_of(2, memory=859.0))
    assert fits(f, Cluster((Device(900.0), Device(824.0)), (Level(2, 1.0),)))
    assert not fits(f, Cluster((Device(None), Device(823.0)), (Level(2, 1.0),)))
