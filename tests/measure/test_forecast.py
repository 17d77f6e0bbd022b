from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe.measure.forecast import OnCluster
from avgpipe.plan import Plan
from avgpipe.planning import Costs, steady_batch_s
from avgpipe.planning.cluster import Cluster, Device, Level
from avgpipe.planning.profile import LinkProfile, Tie
from avgpipe.schedule import build_schedule
from tests.measure.uniform import even, flat, forecast, layer, uniform
from tests.planning import chains

MIB = 2**20
PICOSECONDS = 1e-9  # simulations count whole ones, of which a batch has many actions


# ---- time, in closed form --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "advance-forward"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 1), (2, 4), (3, 2), (4, 8)])
def test_uniform_stages(schedule: str, stages: int, micro_batches: int) -> None:
    """(M + K - 1) (t_f + t_b), and an update."""
    p = chains.profile(*[layer(update_s=0.25) for _ in range(12)])
    plan = even(stages, 12, micro_batches=micro_batches, schedule=schedule)
    found = forecast(p, plan, 16, flat(stages))
    micro_batch_s = 16 / micro_batches * 12 / stages * (1.0 + 2.0)
    assert found.batch_s == pytest.approx((micro_batches + stages - 1) * micro_batch_s + 12 / stages * 0.25)
    assert found.plan == plan


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_one_device(micro_batches: int) -> None:
    """M (f + b) + update, where the first backward adds to no gradients and each update has a fixed part."""
    rows = [layer(update_s=0.5, accumulate_s=0.25), layer(update_s=1.0, elastic_s=9.0, accumulate_s=0.125)]
    p = chains.profile(*rows, action_s=0.01, step_s=0.1)
    found = forecast(p, Plan(micro_batches=micro_batches), 8, flat(1))
    assert found.batch_s == pytest.approx(8 * 6 + micro_batches * 2 * 0.01 - 0.375 + 1.5 + 0.1)


def test_first_backward_is_no_quicker_than_the_gradient_of_its_input() -> None:
    p = chains.profile(layer(accumulate_s=7.0))  # of a backward of 2 s, half of it for the input
    assert forecast(p, Plan(micro_batches=2), 2, flat(1)).batch_s == pytest.approx(2 * 3.0 - 1.0)


def test_first_backward_of_each_batch_on_a_pipeline() -> None:
    """It is the last stage's first one that the first stage waits for."""
    p = chains.profile(layer(accumulate_s=0.25), layer(accumulate_s=0.5))
    assert forecast(p, even(2, 2, micro_batches=1), 1, flat(2)).batch_s == pytest.approx(6.0 - 0.75)
    costs = OnCluster(p, Plan(stages=2, micro_batches=3), 3, flat(2)).costs((1,))
    assert costs.backward_s == ((1.75, 2.0, 2.0), (1.5, 2.0, 2.0))
    assert costs.forward_s == (1.0, 1.0)


@pytest.mark.parametrize(
    ("recompute", "backward_s"),
    [
        ("never", (1.75, 2.0, 2.0)),
        ("except-last", (2.75, 3.0, 2.0)),
        ("always", (2.75, 3.0, 3.0)),
    ],
)
def test_recomputation_is_of_each_micro_batch(recompute: str, backward_s: tuple[float, ...]) -> None:
    p = chains.profile(layer(accumulate_s=0.25))
    plan = Plan(micro_batches=3, recompute=recompute)
    assert OnCluster(p, plan, 3, flat(1)).costs(()).backward_s == (backward_s,)
    assert forecast(p, plan, 3, flat(1)).batch_s == pytest.approx(3 * 1.0 + sum(backward_s))


def test_averaging_belongs_to_updates_of_several_pipelines() -> None:
    p = chains.profile(layer(update_s=1.0, elastic_s=0.5), step_s=0.25)
    one, two = (forecast(p, Plan(pipelines=n, micro_batches=2), 2, flat(1)).batch_s for n in (1, 2))
    assert [one, two] == pytest.approx([2 * 3.0 + 1.25, 2 * (3.0 + 1.75)])


def test_transfers_of_one_micro_batch() -> None:
    """There and back, over each boundary, nothing else goes on."""
    outputs = (10.0, 40.0, 20.0, 80.0)
    p = chains.profile(*[chains.layer(output=size) for size in outputs])
    plan = Plan(stages=3, micro_batches=1, partition=[1, 3])
    found = forecast(p, plan, 2, flat(3, 5.0, 0.5))
    assert found.batch_s == pytest.approx(2 * 4 * 3.0 + 2 * (2 * 10 / 5 + 0.5) + 2 * (2 * 20 / 5 + 0.5))


def test_two_pipelines_fill_each_others_bubbles() -> None:
    found = forecast(uniform(2), even(2, 2, micro_batches=4, pipelines=2), 4, flat(2))
    assert found.batch_s == pytest.approx(4 * 3.0)


def test_two_pipelines_on_a_device_that_one_leaves_idle() -> None:
    p = uniform(2, second_lane=(1.5,))
    plan = Plan(micro_batches=4, pipelines=2)
    assert forecast(p, plan, 4, flat(1)).batch_s == pytest.approx(4 * 6 / 1.5)
    assert forecast(p, replace(plan, pipelines=1), 4, flat(1)).batch_s == pytest.approx(4 * 6)


# ---- speeds, hierarchy, replicas -------------------------------------------------------------------------------------


def test_speeds_of_stages() -> None:
    p = chains.profile(*[layer(update_s=0.5) for _ in range(2)])
    cluster = Cluster((Device(speed=4.0), Device(speed=0.5)), (Level(2, math.inf),))
    found = forecast(p, even(2, 2, micro_batches=1), 1, cluster)
    # Stage 1 computes in 6 s and updates in 1 s; the rest of the way, 7/8 s on stage 0, is beside that update.
    assert found.batch_s == pytest.approx(7.0)


def test_replicas_are_as_quick_as_the_slowest() -> None:
    speeds = (1.0, 0.5, 2.0, 1.0)
    cluster = Cluster(tuple(Device(speed=s) for s in speeds), (Level(4, math.inf),))
    plan = even(2, 2, micro_batches=2, replication=[2, 2])
    assert OnCluster(uniform(2), plan, 2, cluster).costs((1,)).forward_s == (2.0, 1.0)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("size", [1.0 * MIB, 8.0 * MIB, 80.0 * MIB])
def test_data_parallelism(width: int, size: float) -> None:
    """Each replica has M / R micro-batches; of the sum of gradients the last 8 MiB come after the backward."""
    bytes_per_s, latency_s = 16.0 * MIB, 0.01
    p = chains.profile(layer(parameter_bytes=size, update_s=0.5))
    plan = Plan(micro_batches=8, schedule="1f1b", system="data-parallel", replication=[width])
    found = forecast(p, plan, 8, flat(width, bytes_per_s, latency_s))
    steps = 2 * (width - 1)
    ring_s = steps * (size / width / bytes_per_s + latency_s)
    beyond_s = max(ring_s - 2.0, min(1.0, 8 * MIB / size) * ring_s)
    assert found.batch_s == pytest.approx(8 / width * 3.0 + beyond_s + 0.5)
    assert len(found.memory_bytes) == width


def test_a_sum_takes_what_was_measured_between_the_workers_at_hand() -> None:
    p = chains.profile(layer(parameter_bytes=100.0), reduction=LinkProfile(0.5, 10.0))
    plan = Plan(micro_batches=2, replication=[2])
    here = Cluster.like(p, 2)
    assert forecast(p, plan, 2, here).batch_s == pytest.approx(3.0 + 2 * (50.0 / 10.0 + 0.5))
    assert forecast(p, plan, 2, replace(here, is_here=False)).batch_s == pytest.approx(3.0)


def test_weights_that_stages_share_are_summed_where_that_was_measured() -> None:
    rows = [layer() for _ in range(4)]
    sums = LinkProfile(0.5, 10.0)
    tied = chains.profile(*rows, ties=(Tie((0, 3), 100.0),), reduction=sums)
    plain = chains.profile(*rows, reduction=sums)
    here = Cluster.like(plain, 2)
    apart, together = even(2, 4, micro_batches=2), Plan(micro_batches=2)

    def added_s(plan: Plan, cluster: Cluster) -> float:
        return forecast(tied, plan, 2, cluster).batch_s - forecast(plain, plan, 2, cluster).batch_s

    assert added_s(apart, here) == pytest.approx(2 * (50.0 / 10.0 + 0.5))
    assert added_s(apart, replace(here, is_here=False)) == 0
    assert added_s(together, Cluster.like(plain, 1)) == 0


def machines() -> Cluster:
    """Two of two devices."""
    return Cluster((Device(),) * 4, (Level(2, 100.0, 1.0), Level(2, 10.0, 5.0)))


def test_transfers_over_levels() -> None:
    p = chains.profile(*[chains.layer(output=20.0) for _ in range(4)])
    costs = OnCluster(p, even(4, 4, micro_batches=1), 1, machines()).costs((1, 2, 3))
    assert costs.transfer_s == (0.2, 2.0, 0.2)
    assert costs.latency_s == (1.0, 5.0, 1.0)


def test_replicas_that_send_at_once_share_their_link() -> None:
    p = chains.profile(*[chains.layer(output=20.0, parameters=30.0) for _ in range(2)])
    costs = OnCluster(p, even(2, 2, micro_batches=2, replication=[2, 2]), 2, machines()).costs((1,))
    assert costs.transfer_s == (20.0 / 5.0,)  # both of machine 0 send to machine 1
    assert costs.latency_s == (5.0,)
    sum_s = 2 * (30.0 / 2 / 100.0 + 1.0)  # of two in one machine
    assert costs.allreduce_s == pytest.approx((sum_s, sum_s))


def test_a_ring_over_machines_is_as_quick_as_the_links_between_them() -> None:
    p = chains.profile(layer(parameter_bytes=40.0))
    plan = Plan(micro_batches=4, replication=[4])
    found = OnCluster(p, plan, 4, machines()).costs(())
    assert found.allreduce_s == pytest.approx((6 * (40.0 / 4 / 10.0 + 5.0),))


RECOMPUTE = st.sampled_from(["never", "except-last", "always"])


@settings(max_examples=60)
@given(
    st.integers(0, 10**9),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 4),
    st.integers(1, 2),
    RECOMPUTE,
    st.data(),
)
def test_any_forecast_is_the_simulation_of_its_stages(
    seed: int, stages: int, width: int, each: int, pipelines: int, recompute: str, data: st.DataObject
) -> None:
    """Replicas next to each other, on one level: all speeds and links are plain."""
    p = replace(chains.random_profile(seed, 6), action_s=0.25, step_s=0.5)
    count = len(p.layers)
    stages = min(stages, count)
    first = data.draw(st.permutations(range(1, count))) if count > 1 else []
    cut = sorted(first[: stages - 1])
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=6, max_size=6))
    cluster = Cluster(tuple(Device(speed=s) for s in speeds), (Level(6, 4.0, 0.25),))
    plan = Plan(
        stages=stages,
        micro_batches=each * width * pipelines,
        pipelines=pipelines,
        recompute=recompute,
        partition=cut or None,
        replication=[width] * stages if width > 1 else None,
    )
    samples = 3  # of a micro-batch
    blocks = list(pairwise([0, *cut, count]))
    slowest = [min(speeds[width * k : width * (k + 1)]) for k in range(stages)]
    again = {"never": [0] * each, "always": [1] * each, "except-last": [1] * (each - 1) + [0]}[recompute]
    forward = [samples * sum(row.forward_s[0] for row in p.layers[a:b]) + 0.25 for a, b in blocks]
    backward = [samples * sum(row.backward_s[0] for row in p.layers[a:b]) + 0.25 for a, b in blocks]
    ring_s = [
        2 * (width - 1) * (chains.weights(p, a, b) / width / 4.0 + 0.25) if width > 1 else 0
        for a, b in blocks
    ]
    costs = Costs(
        forward_s=[f / s for f, s in zip(forward, slowest)],
        backward_s=[[(b + n * f) / s for n in again] for f, b, s in zip(forward, backward, slowest)],
        update_s=[
            (0.5 + sum(row.update_s + (pipelines > 1) * row.elastic_s for row in p.layers[a:b])) / s
            for (a, b), s in zip(blocks, slowest)
        ],
        transfer_s=[samples * chains.crossing(p, a) / 4.0 for a, _ in blocks[1:]],
        latency_s=0.25,
        allreduce_s=ring_s,  # all weights are in the last 8 MiB
    )
    built = build_schedule("advance-forward", stages, each)
    found = forecast(p, plan, samples * plan.micro_batches, cluster)
    share_s = steady_batch_s(built, costs, pipelines=pipelines)
    assert found.batch_s == pytest.approx(pipelines * share_s, rel=PICOSECONDS, abs=pipelines * PICOSECONDS)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_cluster_is_large_enough() -> None:
    with pytest.raises(ValueError, match=r"^the plan needs 4 workers, the cluster has 3$"):
        forecast(uniform(2), even(2, 2, micro_batches=2, replication=[2, 2]), 2, flat(3))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"replication": [2, 1]}, r"replication \[2, 1\], spread False"),
        ({"pipelines": 2, "spread": True}, "replication None, spread True"),
    ],
)
def test_plans_that_are_not_forecast(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"and equally many replicas of each stage; this plan has {named}$"):
        forecast(uniform(2), even(2, 2, micro_batches=2, **options), 2, flat(4))
