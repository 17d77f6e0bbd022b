from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe.planning import partition
from avgpipe.planning.profile import LinkProfile, Profile
from benchmarks.partitioning.vgg16 import vgg16
from tests.planning import chains

Stage = tuple[int, int, int]  # first layer, the one after the last, workers


def bottleneck(p: Profile, stages: list[Stage], link: LinkProfile) -> float:
    """algorithms.md, section 3: the largest T and 2 C."""
    found = [2 * link.seconds(chains.crossing(p, first)) for first, _, _ in stages if first]
    for first, last, m in stages:
        sync_s = 4 * (m - 1) * chains.weights(p, first, last) / (m * link.bytes_per_s)
        found.append(max(chains.compute_s(p, first, last), sync_s) / m)
    return max(found)


def largest(p: Profile, stages: list[Stage]) -> float:
    """The most bytes of any worker: a version of the weights for each micro-batch in flight."""
    found = []
    for k, (first, last, m) in enumerate(stages):
        flight = 1 + math.ceil(sum(after[2] for after in stages[k + 1 :]) / m)
        weights = (flight + 1) * chains.weights(p, first, last)
        found.append(weights + chains.optimizer(p, first, last) + flight * chains.held(p, first, last))
    return max(found)


def every(p: Profile, workers: int) -> list[list[Stage]]:
    return [
        [(a, b, m) for (a, b), m in zip(blocks, replicas)]
        for blocks, replicas in chains.plans(len(p.layers), workers)
    ]


def stages_of(found: object) -> list[Stage]:
    return [(a, b, m) for (a, b), m in zip(itertools.pairwise(found.bounds), found.replication)]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_no_plan_has_a_shorter_bottleneck(workers: int) -> None:
    for seed in range(60):
        p = chains.random_profile(seed)
        found = partition(p, method="pipedream", workers=workers)
        best = min(bottleneck(p, stages, p.link) for stages in every(p, workers))
        assert found.value == pytest.approx(best, rel=1e-9), seed
        assert bottleneck(p, stages_of(found), p.link) == pytest.approx(found.value, rel=1e-9), seed


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.integers(1, 4), st.data())
def test_no_partition_into_that_number_of_stages_does(seed: int, workers: int, data: st.DataObject) -> None:
    p = chains.random_profile(seed)
    stages = data.draw(st.integers(1, min(workers, len(p.layers))))
    found = partition(p, stages, method="pipedream", workers=workers)
    best = min(bottleneck(p, plan, p.link) for plan in every(p, workers) if len(plan) == stages)
    assert found.stages == stages
    assert found.value == pytest.approx(best, rel=1e-9)


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.integers(1, 4), st.floats(0.3, 3))
def test_none_that_fits_into_memory_does(seed: int, workers: int, share: float) -> None:
    p = chains.random_profile(seed)
    plans = every(p, workers)
    least = min(largest(p, plan) for plan in plans)
    limit = share * least + 1e-6
    fitting = [plan for plan in plans if largest(p, plan) <= limit]
    if abs(limit - least) < 1e-6 * least:
        return
    if not fitting:
        with pytest.raises(ValueError, match="nothing fits") as raised:
            partition(p, method="pipedream", workers=workers, memory_limit_bytes=limit)
        enough = chains.least_said(str(raised.value), limit, least)
        allowed = partition(p, method="pipedream", workers=workers, memory_limit_bytes=enough)
        assert max(allowed.memory_bytes) <= enough
        return
    found = partition(p, method="pipedream", workers=workers, memory_limit_bytes=limit)
    best = min(bottleneck(p, plan, p.link) for plan in fitting)
    assert found.value == pytest.approx(best, rel=1e-9)
    assert max(found.memory_bytes) == pytest.approx(largest(p, stages_of(found)), rel=1e-9)
    assert max(found.memory_bytes) <= limit * (1 + 1e-9)


# ---- two levels ------------------------------------------------------------------------------------------------------


def inside(p: Profile, first: int, last: int, devices: int, speed: float) -> float:
    """The best of a machine for these layers alone."""
    found = []
    for blocks, replicas in chains.plans(last - first, devices):
        stages = [(first + a, first + b, m) for (a, b), m in zip(blocks, replicas)]
        cuts = [2 * chains.crossing(p, a) / speed for a, _, _ in stages if a > first]
        done = [
            max(chains.compute_s(p, a, b), 4 * (m - 1) * chains.weights(p, a, b) / (m * speed)) / m
            for a, b, m in stages
        ]
        found.append(max([*cuts, *done]))
    return min(found)


def test_on_two_levels_machines_are_cut_inside_as_if_each_were_a_worker() -> None:
    fast, slow = 20.0, 1.0
    for seed in range(40):
        p = chains.random_profile(seed, most_layers=6)
        found = partition(p, method="pipedream", levels=[(2, fast), (2, slow)])
        values = []
        for blocks, machines in chains.plans(len(p.layers), 2):
            parts = [2 * chains.crossing(p, a) / slow for a, _ in blocks if a]
            for (a, b), m in zip(blocks, machines):
                sync_s = 4 * (m - 1) * chains.weights(p, a, b) / (m * slow)
                parts.append(max(inside(p, a, b, 2, fast), sync_s) / m)
            values.append(max(parts))
        assert found.value == pytest.approx(min(values), rel=1e-9), seed
        assert sum(found.replication) <= 4


def test_one_unit_above_and_one_below_change_nothing() -> None:
    p = chains.random_profile(7)
    flat = partition(p, method="pipedream", levels=[(4, 2.0)])
    assert partition(p, method="pipedream", levels=[(4, 2.0), (1, 9.0)]).value == pytest.approx(flat.value)
    assert partition(p, method="pipedream", levels=[(1, 9.0), (4, 2.0)]).value == pytest.approx(flat.value)


def test_on_two_levels_the_plan_keeps_the_limit_and_an_infeasible_limit_says_what_would_do() -> None:
    refused = 0
    for seed in range(30):
        p = chains.random_profile(seed, most_layers=6)
        levels = [(2, 20.0), (2, 1.0)]
        free = partition(p, method="pipedream", levels=levels)
        limit = 0.7 * max(free.memory_bytes) + 1
        try:
            found = partition(p, method="pipedream", levels=levels, memory_limit_bytes=limit)
        except ValueError as error:
            refused += 1
            enough = float(re.search(r"needs (\d+) bytes on", str(error))[1])
            assert enough > limit
            found = partition(p, method="pipedream", levels=levels, memory_limit_bytes=enough)
            limit = enough
        assert max(found.memory_bytes) <= limit * (1 + 1e-9)
        assert found.value >= free.value * (1 - 1e-9)
        assert max(found.memory_bytes) == pytest.approx(largest(p, stages_of(found)))
    assert 0 < refused < 30


# ---- what was published ----------------------------------------------------------------------------------------------


def test_the_profile_of_vgg16_is_the_published_network() -> None:
    p = vgg16()
    assert sum(row.parameter_bytes for row in p.layers) == 4 * 138_357_544
    forward_s = sum(row.forward_s[0] for row in p.layers)
    assert forward_s * 15.7e12 * 0.7 / 64 == pytest.approx(2 * 15.47e9, rel=1e-3)


def test_vgg16_on_sixteen_workers_replicates_the_convolutions_and_leaves_the_dense_layers_to_one() -> None:
    p = vgg16()
    found = partition(p, method="pipedream", workers=16)
    assert found.replication == (15, 1)
    assert p.layers[found.boundaries[0]].name == "dense1"


def test_vgg16_on_four_machines_of_four_does_so_with_a_machine_for_the_dense_layers() -> None:
    p = vgg16()
    found = partition(p, method="pipedream", levels=[(4, 10e9), (4, 1.25e9)])
    first_dense = next(n for n, row in enumerate(p.layers) if row.name == "dense1")
    assert found.replication[0] == 12
    assert 12 < sum(found.replication) <= 16
    dense = [m for m, first in zip(found.replication, found.bounds) if first >= first_dense]
    assert dense
    assert max(dense) <= 4
    placed = sorted(w for workers in found.placement for w in workers)
    assert placed == list(range(sum(found.replication)))
    assert tuple(map(len, found.placement)) == found.replication
    data_parallel = partition(p, 1, method="pipedream", workers=16)
    assert found.value < data_parallel.value / 2


def test_what_is_cut_inside_a_unit_is_placed_in_every_such_unit() -> None:
    """Two machines of two devices: both divide the layers in the same way, a stage on the n-th device of each."""
    p = chains.profile(*[chains.layer(parameters=100.0) for _ in range(2)])
    found = partition(p, method="pipedream", levels=[(2, 1.0), (2, 1e6)])
    assert (found.boundaries, found.replication) == ((1,), (2, 2))
    assert found.placement == ((0, 2), (1, 3))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 4}, r"stages=4: 3 layers can be cut into 1 to 3 stages"),
        ({"stages": 0}, r"stages=0: 3 layers"),
        ({"stages": 3, "workers": 2}, r"workers=2: 3 stages need a worker each"),
        ({"workers": 0}, r"workers=0: must be an int of at least 1"),
        ({"workers": 3, "levels": [(2, 1.0), (2, 1.0)]}, r"workers=3, but the levels have 2 x 2 = 4"),
        ({"stages": 2, "levels": [(2, 1.0), (2, 1.0)]}, r"stages=2 with 2 levels"),
        ({"levels": [(2, 0.0)]}, r"levels\[0\]: bytes_per_s=0.0: must be above 0"),
        ({"levels": [(0, 1.0)]}, r"levels\[0\]: units=0"),
        ({"levels": []}, r"levels is empty"),
        ({"levels": [(1, 1.0)] * 3000}, r"the number of levels=3000: must be at most 16"),
        ({"levels": [(2, 1.0)], "link": LinkProfile(0.0, 1.0)}, r"leave one out"),
        ({"memory_limit_bytes": -1}, r"memory_limit_bytes=-1: must be a number of bytes above 0"),
        ({"micro_batch_size": 0}, r"micro_batch_size=0: must be a number of samples above 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    p = chains.profile(chains.layer(), chains.layer(), chains.layer())
    with pytest.raises(ValueError, match=message):
        partition(p, method="pipedream", **options)
