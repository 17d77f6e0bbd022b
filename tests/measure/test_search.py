"""The search over plans against every cut of every shape."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe.measure.forecast import Forecast, OnCluster
from avgpipe.measure.search import _WINDOW, PlanShape, Space, _PlanSearch, fits
from avgpipe.planning import steady_batch_s
from avgpipe.planning.cluster import Cluster, Device, Level
from avgpipe.planning.cuts import CutSearch
from avgpipe.planning.profile import Profile
from avgpipe.schedule import build_schedule
from tests.measure.plans import (
    BATCH,
    RECOMPUTE,
    Way,
    best_of,
    cluster_of,
    cuts_of,
    every,
    quickest,
    search,
    shape_of,
    space,
    with_accumulation,
    with_whole_bytes,
)
from tests.measure.uniform import forecast
from tests.planning import chains

EXACT = 1 + 1e-9
PICOSECONDS = 1e-9  # simulations count whole ones, of which a batch has many actions
# Of two plans whose times differ by less than a hundredth the search takes the one that needs less memory; and it
# leaves out what cannot be quicker in the long run, from which the batches simulated may differ by some per mille.
CLOSE = 1.02


# ---- time ------------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(0, 10**9), st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=3))
def test_no_cut_of_any_shape_is_quicker(seed: int, speeds: list[float]) -> None:
    """Where all shapes that may be best are among the five that are refined: up to three workers, two M, one N."""
    p = chains.random_profile(seed, 6)
    cluster = cluster_of(len(speeds), speeds=speeds)
    shapes = space(p, len(speeds), pipelines=(2,), micro_batches=(1, 4))
    found = search(p, cluster, shapes)
    assert found.ranked[0].batch_s <= CLOSE * quickest(every(p, cluster, shapes))
    assert (found.considered, found.excluded) == (len(list(shapes.shapes())), 0)


@pytest.mark.slow
def test_with_more_shapes_hardly_any_is() -> None:
    """The five are then those that are quickest with a balanced cut, which another may overtake with its best one."""
    ratios = []
    for seed in range(40):
        p, draw = with_accumulation(seed), random.Random(-seed)
        cluster = cluster_of(draw.randint(1, 3), bytes_per_s=draw.choice([1.0, 4.0, 100.0]))
        shapes = space(p, cluster.workers)
        best = quickest(every(p, cluster, shapes))
        if best > 0:
            ratios.append(search(p, cluster, shapes).ranked[0].batch_s / best)
    assert sorted(ratios)[len(ratios) // 2] <= EXACT
    assert max(ratios) <= 1.03


@settings(max_examples=30)
@given(st.integers(0, 10**9), st.integers(1, 3))
def test_what_is_found_is_forecast_so(seed: int, workers: int) -> None:
    p = chains.random_profile(seed, 6)
    cluster = cluster_of(workers)
    found = search(p, cluster, space(p, workers))
    assert [f.batch_s for f in found.ranked] == sorted(f.batch_s for f in found.ranked)
    for f in found.ranked:
        assert f == forecast(p, f.plan, BATCH, cluster)
        same = [other for other in found.ranked if shape_of(other.plan) == shape_of(f.plan)]
        assert same == [f]


SPEEDS = st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=3)
SECOND_LANE = st.sampled_from([None, 1.0, 1.2, 1.5, 2.0])


@settings(max_examples=40)
@given(st.integers(0, 10**9), SPEEDS, SECOND_LANE)
def test_no_cut_is_below_the_bound_of_its_shape(
    seed: int, speeds: list[float], second_lane: float | None
) -> None:
    """Up to two pipelines, not even over the few batches that a forecast times; any number of them, not of many
    batches of each: when 49 are timed, each worker has done at most one of them before.
    """
    p = with_accumulation(seed, second_lane)
    cluster = cluster_of(len(speeds), speeds=speeds)
    shapes = Space(p, cluster, BATCH, (1, 2, 3), (1, 2, 4))
    bounds = _PlanSearch(shapes)
    for shape in shapes.shapes():
        problem = OnCluster(p, shape.plan(), BATCH, cluster)
        plan = shape.plan()
        own = -(-plan.micro_batches_each // shape.width)
        built = build_schedule(plan.schedule, plan.stages, own, plan.advance, plan.stages_per_worker)
        least_s = bounds._least_s(shape)
        for cut in cuts_of(p, shape):
            costs = problem.costs(cut)
            n = plan.pipelines
            found_s = n * steady_batch_s(built, costs, pipelines=n, batches=100 * n)
            assert least_s / _WINDOW <= 49 / 48 * found_s + n * PICOSECONDS
            if plan.pipelines <= 2:
                assert least_s <= problem.forecast(cut).batch_s + n * PICOSECONDS


@settings(max_examples=30)
@given(st.integers(0, 10**9), SPEEDS, SECOND_LANE)
def test_the_best_cut_of_a_shape_is_found(seed: int, speeds: list[float], second_lane: float | None) -> None:
    """Also where a device gains by two pipelines: then its work takes less time."""
    p = with_accumulation(seed, second_lane)
    cluster = cluster_of(len(speeds), speeds=speeds)
    for shape in Space(p, cluster, BATCH, (1, 2), (1, 2, 4)).shapes():
        problem = OnCluster(p, shape.plan(), BATCH, cluster)
        _, seconds, exact = CutSearch(problem, None).best()
        assert exact
        best_s = min(problem.seconds(cut) for cut in cuts_of(p, shape))
        assert seconds == pytest.approx(best_s, rel=1e-6, abs=PICOSECONDS)


def test_a_lane_more_is_taken_where_it_gains() -> None:
    """Two pipelines on one device do half as much again; where they do not, one is as good and needs less memory."""
    p = chains.profile(*[chains.layer(parameters=1.0) for _ in range(4)])
    both = space(p, 1, (1, 2), (4,))
    gaining = search(replace(p, second_lane=(1.5,)), cluster_of(1), both).ranked[0]
    assert gaining.plan.pipelines == 2
    assert gaining.batch_s == pytest.approx(BATCH * 4 * 3.0 / 1.5)
    alone = search(replace(p, second_lane=(1.0,)), cluster_of(1), both).ranked[0]
    assert alone.batch_s == pytest.approx(BATCH * 4 * 3.0)


def test_transfers_that_take_long_leave_one_device() -> None:
    p = chains.profile(*[chains.layer(output=100.0, parameters=100.0) for _ in range(4)])
    best = search(p, cluster_of(2, bytes_per_s=0.01), space(p, 2)).ranked[0].plan
    assert (best.stages, best.workers) == (1, 1)


def test_light_weights_and_heavy_activations_make_data_parallelism() -> None:
    p = chains.profile(*[chains.layer(output=100.0) for _ in range(4)])
    best = search(p, cluster_of(2, bytes_per_s=1.0), space(p, 2)).ranked[0].plan
    assert (best.system, best.stages, best.workers) == ("data-parallel", 1, 2)


def test_heavy_weights_and_light_activations_make_a_pipeline() -> None:
    p = chains.profile(*[chains.layer(parameters=1000.0) for _ in range(4)])
    found = search(p, cluster_of(2, bytes_per_s=1.0), space(p, 2))
    assert (found.ranked[0].plan.stages, found.ranked[0].plan.partition) == (2, (2,))
    assert found.ranked[0].batch_s == pytest.approx(BATCH * 4 * 3.0 / 2)  # two pipelines leave no bubble


def test_the_best_with_one_stage_are_there_for_comparison() -> None:
    p = chains.profile(*[chains.layer(parameters=1000.0, update_s=0.5) for _ in range(4)])
    found = search(p, cluster_of(2), space(p, 2, micro_batches=(2, 4)))
    one, both = best_of(found, 1, 1), best_of(found, 1, 2)
    assert one is not None
    assert one.batch_s == pytest.approx(BATCH * 4 * 3.0 + 4 * 0.5)
    assert both is not None
    assert both.plan.replication == (2,)
    assert best_of(found, 2, 2) == found.ranked[0]


def test_an_advance_that_gains_nothing_is_left_out() -> None:
    """Where transfers take no time 1F1B is as quick as any, with fewer micro-batches in flight."""
    p = chains.profile(*[chains.layer(held=10.0, parameters=1e3) for _ in range(4)])
    cluster = Cluster((Device(),) * 2, (Level(2, 1.0),))
    best = best_of(search(p, cluster, space(p, 2, pipelines=(1,), micro_batches=(4,))), 2, 2)
    assert best is not None
    assert best.plan.build_schedule().peak_in_flight == [2, 1]
    assert best.batch_s == pytest.approx((4 + 2 - 1) * 2 * 3.0)


def test_of_long_schedules_those_with_a_name_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("avgpipe.measure.search._LONG", 0)
    for seed in range(5):
        p = chains.random_profile(seed, 6)
        for f in search(p, cluster_of(3), space(p, 3)).ranked:
            assert f.plan.advance in (None, 0)


# ---- memory ----------------------------------------------------------------------------------------------------------


WAYS = {"recompute": RECOMPUTE, "advances": (None, 0)}


def that_fit(found: dict[Way, list[Forecast]], cluster: Cluster) -> dict[Way, list[Forecast]]:
    fitting = {way: [f for f in several if fits(f, cluster)] for way, several in found.items()}
    return {way: several for way, several in fitting.items() if several}


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(0, 10**9), st.integers(1, 3), st.sampled_from([0.7, 0.99, 1.0, 1.2, 2.0]))
def test_what_is_found_fits(seed: int, workers: int, share: float) -> None:
    """If anything does, with any recomputation, advance and cut; else the least that would is said, and does."""
    p = with_whole_bytes(seed)
    shapes = space(p, workers)
    all_of_them = every(p, cluster_of(workers), shapes, **WAYS)
    least = min(max(f.memory_bytes) for several in all_of_them.values() for f in several)
    limit = max(1.0, float(int(share * least)))
    cluster = cluster_of(workers, memory=limit)
    fitting = that_fit(all_of_them, cluster)
    if not fitting:
        assert least_of_error(p, cluster, shapes, limit) == least
        enough = cluster_of(workers, memory=least)
        assert max(search(p, enough, shapes).ranked[0].memory_bytes) <= least
        return
    found = search(p, cluster, shapes)
    assert all(fits(f, cluster) for f in found.ranked)
    # With one stage there is nothing to cut, and the least recomputation is the quickest.
    for width in {1, workers}:
        alone = {way: f for way, f in fitting.items() if way[0][:2] == (1, width)}
        one = best_of(found, 1, width)
        assert (one is not None) == bool(alone)
        assert one is None or one.batch_s == quickest(alone)


@pytest.mark.slow
def test_within_a_limit_hardly_any_is_quicker() -> None:
    """Than the best of all shapes, recomputations, advances and cuts. Which shapes are refined, and with which
    recomputation and advance, is decided by their first cuts, so that nothing exact holds for each case; the best may
    be quicker, too, with an advance that is neither of the two.
    """
    ratios = []
    for seed in range(30):
        draw = random.Random(seed)
        p, workers = with_whole_bytes(seed), draw.randint(2, 3)
        shapes = space(p, workers)
        all_of_them = every(p, cluster_of(workers), shapes, **WAYS)
        least = min(max(f.memory_bytes) for several in all_of_them.values() for f in several)
        cluster = cluster_of(workers, memory=least * draw.choice([1.0, 1.1, 1.3, 2.0]) + 1)
        best_s = quickest(that_fit(all_of_them, cluster))
        if best_s > 0:
            ratios.append(search(p, cluster, shapes).ranked[0].batch_s / best_s)
    assert sorted(ratios)[len(ratios) // 2] <= EXACT
    assert sorted(ratios)[int(0.9 * len(ratios))] <= CLOSE
    assert max(ratios) <= 1.1


@settings(max_examples=40)
@given(
    st.integers(0, 10**9), st.sampled_from([1, 2]), st.sampled_from([2, 4]), st.sampled_from([1.0, 1.1, 1.4])
)
def test_of_the_way_that_is_chosen_no_cut_is_quicker(
    seed: int, pipelines: int, micro_batches: int, share: float
) -> None:
    """Of one shape with two stages: with the recomputation that was chosen, and one of the two advances."""
    p = with_whole_bytes(seed)
    shapes = space(p, 2, (pipelines,), (micro_batches,))
    all_of_them = {
        way: several for way, several in every(p, cluster_of(2), shapes, **WAYS).items() if way[0].stages == 2
    }
    if not all_of_them:  # of a single layer
        return
    least = min(max(f.memory_bytes) for several in all_of_them.values() for f in several)
    cluster = cluster_of(2, memory=max(1.0, share * least))
    result = search(p, cluster, shapes)
    fitting = that_fit(all_of_them, cluster)
    found = best_of(result, 2, 2)
    if found is None:  # its bound is above a plan of one stage
        assert result.ranked[0].batch_s <= quickest(fitting)
        return
    best_s = [quickest({way: f}) for way, f in fitting.items() if way[1] == found.plan.recompute]
    assert found.batch_s <= CLOSE * max(best_s)


@pytest.mark.slow
@settings(max_examples=20)
@given(st.integers(0, 10**9), st.lists(st.sampled_from([None, 0.2, 0.6, 0.9, 1.5]), min_size=2, max_size=4))
def test_devices_may_have_different_memory(seed: int, shares: list[float | None]) -> None:
    """And lanes gain, so that several pipelines on one device are tried as well."""
    p = replace(with_whole_bytes(seed), second_lane=(1.5,))
    shapes = space(p, len(shares))
    needed = max(search(p, cluster_of(len(shares)), shapes).ranked[0].memory_bytes) + 1
    devices = tuple(Device(None if share is None else share * needed) for share in shares)
    cluster = Cluster(devices, (Level(len(shares), 4.0, 0.1),))
    if that_fit(every(p, cluster, shapes, **WAYS), cluster):
        assert all(fits(f, cluster) for f in search(p, cluster, shapes).ranked)
        return
    with pytest.raises(ValueError, match=r"^memory_limit_bytes=\d+: nothing fits; the smallest plan needs "):
        search(p, cluster, shapes)


def least_of_error(p: Profile, cluster: Cluster, shapes: Space, limit: float) -> float:
    with pytest.raises(ValueError, match=f"^memory_limit_bytes={limit:.0f}: nothing fits; ") as caught:
        search(p, cluster, shapes)
    said = re.search(r"smallest plan needs (\d+) bytes on one worker, (\d+) more ", str(caught.value))
    assert said is not None
    assert float(said[2]) == float(said[1]) - limit
    return float(said[1])


def heavy() -> Profile:
    """Of each layer 100 bytes of weights, 200 of optimizer; of each sample 10 are held and 4 sent on."""
    return chains.profile(*[chains.layer(parameters=100.0, held=10.0, output=4.0, optimizer=200.0)] * 4)


def test_where_nothing_fits_the_least_that_would_is_said_and_does() -> None:
    p = heavy()
    shapes = space(p, 2, pipelines=(1,))
    # Two stages of two layers, micro-batches of one sample. Stage 1 has one in flight, its input of 4 bytes and what
    # the layers hold; stage 0 has two, which with 2 * 20 bytes would be more, so these are computed again.
    least = 2 * 400 + 4 + 20
    assert least_of_error(p, cluster_of(2, memory=700.0), shapes, 700.0) == least
    assert least_of_error(p, cluster_of(2, memory=least - 1), shapes, least - 1) == least
    found = search(p, cluster_of(2, memory=least), shapes)
    plan = found.ranked[0].plan
    assert (plan.stages, plan.micro_batches, plan.recompute, plan.partition) == (2, 4, "always", (2,))
    assert found.ranked[0].memory_bytes == (820.0, 824.0)
    assert (found.considered, found.excluded) == (
        8,
        7,
    )  # all five with one stage, and of two stages M = 1 and M = 2


def test_recomputation_only_where_memory_asks_for_it() -> None:
    """First 1F1B in place of the schedule's own advance, which costs less; then recomputation."""
    p = heavy()
    shapes = space(p, 2, pipelines=(1,), micro_batches=(4,))
    own, few = (
        OnCluster(p, replace(PlanShape(2, 1, 1, 4).plan(), advance=advance), BATCH, cluster_of(2)).forecast(
            (2,)
        )
        for advance in (None, 0)
    )
    assert (own.memory_bytes, few.memory_bytes) == ((860.0, 824.0), (840.0, 824.0))
    assert own.batch_s < few.batch_s / 1.01
    found = {
        size: search(p, cluster_of(2, memory=size), shapes).ranked[0] for size in (860.0, 859.0, 840.0, 839.0)
    }
    assert found[860.0].batch_s == own.batch_s
    assert found[859.0] == found[840.0] == few
    assert [f.plan.recompute for f in found.values()] == ["never", "never", "never", "always"]
    assert found[839.0].memory_bytes == (820.0, 824.0)
    assert found[839.0].batch_s > few.batch_s


def test_more_memory_is_never_slower() -> None:
    for seed in range(10):
        p = with_whole_bytes(seed)
        shapes = space(p, 2, micro_batches=(1,))
        unlimited = search(p, cluster_of(2), shapes).ranked[0]
        enough = cluster_of(2, memory=10 * max(unlimited.memory_bytes) + 1)
        assert search(p, enough, shapes).ranked[0].batch_s == pytest.approx(unlimited.batch_s)


def test_what_fits() -> None:
    p = heavy()
    f = OnCluster(p, PlanShape(2, 1, 1, 4).plan(), BATCH, cluster_of(2)).forecast((2,))
    assert f.memory_bytes == (860.0, 824.0)
    assert fits(f, cluster_of(2))
    assert fits(f, cluster_of(2, memory=860.0))
    assert not fits(f, cluster_of(2, memory=859.0))
    assert fits(f, Cluster((Device(900.0), Device(824.0)), (Level(2, 1.0),)))
    assert not fits(f, Cluster((Device(None), Device(823.0)), (Level(2, 1.0),)))
