from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe.measure.forecast import OnCluster
from avgpipe.plan import Plan
from avgpipe.planning import choose_advance
from avgpipe.planning.cluster import Cluster, Device, Level
from avgpipe.planning.profile import Profile, Tie
from tests.measure.uniform import even, flat, forecast, uniform
from tests.planning import chains

RECOMPUTE = st.sampled_from(["never", "except-last", "always"])


def heavy(count: int, **more: object) -> Profile:
    """Of each layer: 100 bytes of weights, 200 of optimizer, 7 frozen; of each sample 10 held, 4 of them sent on."""
    row = replace(
        chains.layer(parameters=100.0, held=10.0, output=4.0, optimizer=200.0),
        frozen_bytes=7.0,
        handed_bytes=(3.0,),
        working_bytes=(30.0,),
    )
    return chains.profile(*[row] * count, **more)  # type: ignore[arg-type]


def memory(p: Profile, plan: Plan, batch_size: int) -> tuple[float, ...]:
    return forecast(p, plan, batch_size, flat(plan.workers)).memory_bytes


def test_memory_of_one_device() -> None:
    # Weights, gradients, optimizer, frozen; one micro-batch of 4 samples; the working bytes of one layer; the process.
    p = heavy(3, process_bytes=1000.0)
    state = 3 * (100 + 100 + 200 + 7)
    assert memory(p, Plan(micro_batches=2), 8) == (state + 4 * 30 + 4 * 30 + 1000,)


def test_memory_of_several_pipelines() -> None:
    # Each has weights, gradients, optimizer, an update buffer and a micro-batch; all have one reference.
    plan = Plan(micro_batches=2, pipelines=2, rule="avgpipe")
    state = 3 * (100 + 100 + 200 + 7)
    rest = 2 * 4 * 30 + 4 * 30
    assert memory(heavy(3), plan, 8) == (2 * state + (1 + 2) * 300 + rest,)
    # With one optimizer there is one state, and a buffer for the mean of the gradients.
    state = 3 * (100 + 100 + 7)
    shared = replace(plan, rule="mean-gradient")
    assert memory(heavy(3), shared, 8) == (2 * state + 3 * 200 + (1 + 2 + 1) * 300 + rest,)


def test_memory_of_stages() -> None:
    # In flight 3 and 1 micro-batches of 2 samples. Stage 0 hands 3 of 20 bytes a sample on; stage 1 holds its input.
    plan = even(2, 4, micro_batches=4)
    state = 2 * (100 + 100 + 200 + 7)
    assert memory(heavy(4), plan, 8) == (state + 3 * 2 * 17 + 60, state + 1 * 2 * 24 + 60)
    assert memory(heavy(4), replace(plan, schedule="1f1b"), 8) == (
        state + 2 * 2 * 17 + 60,
        state + 2 * 24 + 60,
    )
    assert memory(heavy(4), replace(plan, schedule="gpipe"), 8) == (
        state + 4 * 2 * 17 + 60,
        state + 4 * 2 * 24 + 60,
    )


def test_memory_of_uneven_stages_has_the_dearest_layers_working_bytes() -> None:
    rows = [replace(chains.layer(), working_bytes=(size,)) for size in (5.0, 1.0, 9.0, 2.0)]
    plan = Plan(stages=2, micro_batches=1, partition=[2])
    assert memory(chains.profile(*rows), plan, 3) == (15.0, 27.0)
    assert memory(chains.profile(*rows), replace(plan, partition=[3]), 3) == (27.0, 6.0)


def test_memory_with_recomputation() -> None:
    # Of all micro-batches in flight the input (of stage 1: 4 bytes a sample), of some at a time the rest (20 of 24).
    plan = even(2, 4, micro_batches=4, schedule="gpipe", recompute="always")
    state = 2 * (100 + 100 + 200 + 7)
    assert memory(heavy(4), plan, 8) == (state + 2 * 17 + 60, state + 4 * 2 * 4 + 2 * 20 + 60)
    # The last one, which keeps all, may be there while another is computed again.
    kept = replace(plan, recompute="except-last")
    assert memory(heavy(4), kept, 8) == (state + 2 * 2 * 17 + 60, state + 4 * 2 * 4 + 2 * 2 * 20 + 60)
    single = replace(kept, micro_batches=1)  # nothing is computed again
    assert memory(heavy(4), single, 8) == (state + 8 * 17 + 240, state + 8 * 24 + 240)
    assert memory(heavy(4), single, 8) == memory(heavy(4), replace(single, recompute="never"), 8)
    # With one in flight nothing is saved.
    flush = replace(plan, schedule="1f1b")
    assert memory(heavy(4), flush, 8)[1] == memory(heavy(4), replace(flush, recompute="never"), 8)[1]


def test_memory_of_replicas() -> None:
    # Each replica of a stage has 2 of the 4 micro-batches.
    plan = even(2, 4, micro_batches=4, replication=[2, 2])
    first, second = memory(heavy(4), even(2, 4, micro_batches=2), 4)
    assert memory(heavy(4), plan, 8) == (first, first, second, second)


def test_memory_of_shared_weights_counts_once_on_a_stage() -> None:
    p = heavy(4, ties=(Tie((0, 3), 100.0),))
    apart, together = memory(p, even(2, 4), 1), memory(p, Plan(), 1)
    assert (
        sum(apart) - memory(heavy(4), Plan(), 1)[0] == 30 + 1
    )  # working bytes, and an input less what is handed on
    assert memory(heavy(4), Plan(), 1)[0] - together[0] == 100 + 100 + 200


def test_stages_of_one_worker_have_one_process() -> None:
    p = heavy(4, process_bytes=1000.0)
    plan = Plan(stages=4, micro_batches=2, schedule="interleaved-1f1b", partition=[1, 2, 3])
    found = forecast(p, plan, 2, flat(2, 8.0, 0.5))
    alone = OnCluster(p, plan, 2, flat(2))
    stage = [alone.stage_bytes(k, k, k + 1) for k in range(4)]
    assert found.memory_bytes == (stage[0] + stage[2] - 1000, stage[1] + stage[3] - 1000)


@settings(max_examples=40)
@given(st.integers(0, 10**9), st.integers(1, 3), st.integers(1, 2), RECOMPUTE, st.integers(0, 5))
def test_memory_as_a_simulation_counts_it(
    seed: int, stages: int, pipelines: int, recompute: str, more: int
) -> None:
    """From so many micro-batches in flight on that all that are computed again may be there."""
    p = replace(chains.random_profile(seed, 6), process_bytes=50.0)
    stages = min(stages, len(p.layers))
    plan = Plan(stages=stages, pipelines=pipelines, micro_batches=8, recompute=recompute)
    problem = OnCluster(p, plan, 8, flat(stages))
    cut = tuple(range(1, stages))
    costs, limit = problem.costs_in_memory(cut)
    assert limit is None
    assert costs is not None
    assert replace(costs, activation_bytes=None, weight_bytes=None) == problem.costs(cut)
    assert isinstance(costs.activation_bytes, tuple)
    assert isinstance(costs.weight_bytes, tuple)
    in_flight = 1 + pipelines + more
    for k, block in enumerate(pairwise([0, *cut, len(p.layers)])):
        counted = pipelines * costs.weight_bytes[k] + in_flight * costs.activation_bytes[k]
        assert counted == pytest.approx(problem.bytes_with(k, *block, in_flight))


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.integers(1, 3), st.integers(1, 2), RECOMPUTE, st.data())
def test_memory_as_a_share_of_each_workers(
    seed: int, stages: int, pipelines: int, recompute: str, data: st.DataObject
) -> None:
    """None for the costs only where 1F1B does not fit; with recomputation also where few in flight need less than is
    counted for them.
    """
    p = replace(chains.random_profile(seed, 6), process_bytes=50.0)
    stages = min(stages, len(p.layers))
    plan = Plan(stages=stages, pipelines=pipelines, micro_batches=8 * pipelines, recompute=recompute)
    cut = tuple(range(1, stages))
    blocks = list(pairwise([0, *cut, len(p.layers)]))
    in_bytes, _ = OnCluster(p, plan, 8 * pipelines, flat(stages)).costs_in_memory(cut)
    assert in_bytes is not None
    shares = st.sampled_from([0.9, 0.999, 1.001, 1.2, 3.0])
    least = [pipelines * min(8, stages - k) for k in range(stages)]
    counted = [
        pipelines * in_bytes.weight_bytes[k] + least[k] * in_bytes.activation_bytes[k] for k in range(stages)
    ]
    limits = [data.draw(shares) * size for size in counted]
    cluster = Cluster(tuple(map(Device, limits)), (Level(stages, 8.0, 0.5),))
    problem = OnCluster(p, plan, 8 * pipelines, cluster)
    costs, limit = problem.costs_in_memory(cut)
    needed = [problem.bytes_with(k, *block, n) for k, (block, n) in enumerate(zip(blocks, least))]
    if any(size > most for size, most in zip(counted, limits)):
        assert (costs, limit) == (None, None)
        assert recompute != "never" or any(size > most for size, most in zip(needed, limits))
        return
    assert limit == 1.0
    assert costs is not None
    assert all(size <= most * (1 + 1e-9) for size, most in zip(needed, limits))
    assert costs.activation_bytes == pytest.approx([h / b for h, b in zip(in_bytes.activation_bytes, limits)])
    assert costs.weight_bytes == pytest.approx([w / b for w, b in zip(in_bytes.weight_bytes, limits)])
    chosen = choose_advance(stages, 8, costs, pipelines=pipelines, memory_limit_bytes=limit)
    for k, block in enumerate(blocks):
        assert problem.bytes_with(k, *block, pipelines * chosen.peak_in_flight[k]) <= limits[k] * (1 + 1e-9)


def test_a_worker_without_a_limit_has_room_for_all() -> None:
    cluster = Cluster((Device(None), Device(1e6)), (Level(2, 1.0),))
    costs, limit = OnCluster(heavy(4), even(2, 4, micro_batches=2), 2, cluster).costs_in_memory((2,))
    assert limit == 1.0
    assert costs is not None
    assert (costs.activation_bytes[0], costs.weight_bytes[0]) == (0.0, 0.0)
    assert costs.activation_bytes[1] == pytest.approx(24 / 1e6)


def test_limits_are_of_the_least_replica() -> None:
    devices = tuple(Device(size) for size in (None, 50.0, 70.0, 60.0))
    cluster = Cluster(devices, (Level(4, 1.0),))
    plan = even(2, 2, micro_batches=2, replication=[2, 2])
    assert OnCluster(uniform(2), plan, 2, cluster).limits == [50.0, 60.0]
    assert OnCluster(uniform(2), even(2, 2), 2, cluster).limits == [math.inf, 50.0]
    assert OnCluster(uniform(2), Plan(), 2, cluster).limits is None
