from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe.planning import Costs, partition, steady_batch_s
from avgpipe.planning.chain import Chain, stage_costs, weight_versions
from avgpipe.planning.profile import LayerProfile, LinkProfile, Profile
from avgpipe.schedule import RECOMPUTE, build_schedule
from tests.planning import chains


def costs(
    p: Profile, blocks: list[tuple[int, int]], pipelines: int, many: int = 1, again: str = "never"
) -> Costs:
    repeated = {"never": [0] * many, "always": [1] * many, "except-last": [1] * (many - 1) + [0]}[again]

    def total(name: str, first: int, last: int) -> float:
        return sum(getattr(row, name)[0] for row in p.layers[first:last])

    return Costs(
        forward_s=[total("forward_s", *b) for b in blocks],
        backward_s=[
            [total("backward_s", *b) + more * total("forward_s", *b) for more in repeated] for b in blocks
        ],
        transfer_s=[chains.crossing(p, a) / p.link.bytes_per_s for a, _ in blocks[1:]],
        latency_s=p.link.latency_s,
        update_s=[
            sum(row.update_s + (row.elastic_s if pipelines > 1 else 0) for row in p.layers[a:b])
            for a, b in blocks
        ],
    )


def largest(p: Profile, blocks: list[tuple[int, int]], pipelines: int, in_flight: list[int]) -> float:
    """Of flushing schedules."""
    copies = pipelines * 2 + (1 + pipelines if pipelines > 1 else 0)
    return max(
        copies * chains.weights(p, a, b)
        + pipelines * (chains.optimizer(p, a, b) + in_flight[k] * chains.held(p, a, b))
        for k, (a, b) in enumerate(blocks)
    )


SCHEDULES = st.sampled_from(["advance-forward", "1f1b", "gpipe", "pipedream", "pipedream-2bw"])


@settings(max_examples=40)
@given(
    st.integers(0, 10**9),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 2),
    SCHEDULES,
    st.sampled_from(RECOMPUTE),
)
def test_no_cut_takes_less_simulated_time(
    seed: int, stages: int, micro_batches: int, pipelines: int, schedule: str, recompute: str
) -> None:
    p = chains.random_profile(seed)
    stages = min(stages, len(p.layers))
    found = partition(
        p,
        stages,
        method="simulated",
        micro_batches=micro_batches,
        pipelines=pipelines,
        schedule=schedule,
        recompute=recompute,
    )
    built = build_schedule(schedule, stages, micro_batches)
    best = min(
        steady_batch_s(built, costs(p, blocks, pipelines, micro_batches, recompute), pipelines=pipelines)
        for blocks in chains.cuts(len(p.layers), stages)
    )
    assert found.notes == ()
    # Times are whole picoseconds.
    assert found.value == pytest.approx(best, rel=1e-9, abs=1e-10)


@settings(max_examples=40)
@given(st.integers(0, 10**9), st.integers(1, 4), st.integers(1, 2), st.floats(0.5, 2))
def test_none_that_fits_into_memory_does(seed: int, stages: int, pipelines: int, share: float) -> None:
    p = chains.random_profile(seed)
    stages = min(stages, len(p.layers))
    built = build_schedule("advance-forward", stages, 4)
    flight = built.peak_in_flight
    sizes = {
        tuple(blocks): largest(p, blocks, pipelines, flight) for blocks in chains.cuts(len(p.layers), stages)
    }
    least = min(sizes.values())
    limit = share * least + 1e-6
    if abs(limit - least) < 1e-6 * least:
        return
    options = {"micro_batches": 4, "pipelines": pipelines, "memory_limit_bytes": limit}
    fitting = [list(blocks) for blocks, size in sizes.items() if size <= limit]
    if not fitting:
        with pytest.raises(ValueError, match="nothing fits") as raised:
            partition(p, stages, method="simulated", **options)
        enough = chains.least_said(str(raised.value), limit, least)
        allowed = partition(p, stages, method="simulated", **{**options, "memory_limit_bytes": enough})
        assert max(allowed.memory_bytes) <= enough
        return
    found = partition(p, stages, method="simulated", **options)
    best = min(steady_batch_s(built, costs(p, b, pipelines, 4), pipelines=pipelines) for b in fitting)
    assert found.value == pytest.approx(best, rel=1e-9, abs=1e-10)
    assert max(found.memory_bytes) <= limit * (1 + 1e-9)


def test_local_search_comes_close_to_the_best_of_all_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = []
    for seed in range(40):
        p = chains.random_profile(seed)
        stages = min(4, len(p.layers))
        best = partition(p, stages, method="simulated")
        with monkeypatch.context() as patched:
            patched.setattr("avgpipe.planning.cuts.MOST_CUTS", 0)
            found = partition(p, stages, method="simulated")
        assert "local search" in found.notes[-1]
        ratios.append(found.value / best.value if best.value else 1.0)
    assert min(ratios) >= 1 - 1e-9
    assert sorted(ratios)[len(ratios) // 2] == pytest.approx(1)
    assert max(ratios) < 1.3


def test_a_cut_avoids_a_transfer_that_balance_does_not_see() -> None:
    outputs = [1.0, 50.0, 1.0, 1.0]
    layers = [chains.layer(output=size) for size in outputs]
    p = chains.profile(*layers, link=LinkProfile(0.0, 1.0))
    assert partition(p, 2, method="balance").boundaries == (2,)
    assert partition(p, 2, method="simulated", micro_batches=4).boundaries != [2]


def test_stages_of_one_worker_share_its_memory() -> None:
    p = chains.profile(*[chains.layer(parameters=10.0, held=1.0) for _ in range(8)])
    options = {"method": "simulated", "schedule": "interleaved-1f1b", "micro_batches": 4}
    found = partition(p, 4, **options)
    assert found.workers == 2
    both = max(found.memory_bytes[0] + found.memory_bytes[2], found.memory_bytes[1] + found.memory_bytes[3])
    partition(p, 4, **options, memory_limit_bytes=both)
    with pytest.raises(ValueError, match="nothing fits"):
        partition(p, 4, **options, memory_limit_bytes=max(found.memory_bytes))


def test_versions_of_the_weights() -> None:
    assert weight_versions(build_schedule("1f1b", 4, 4), "flush") == [1, 1, 1, 1]
    assert weight_versions(build_schedule("pipedream-2bw", 4, 4), "double-buffer") == [2, 2, 2, 2]
    assert weight_versions(build_schedule("pipedream", 4, 1), "stash") == [4, 3, 2, 1]
    assert weight_versions(build_schedule("pipedream", 4, 2), "stash") == [3, 2, 2, 1]


def test_costs_of_stages_have_averaging_with_several_pipelines_alone() -> None:
    p = chains.profile(chains.layer(update_s=1.0), LayerProfile(*_row(), update_s=2.0, elastic_s=3.0))
    chain = Chain(p, 1)
    assert stage_costs(chain, [0, 1, 2], 4).update_s == (1.0, 2.0)
    assert stage_costs(chain, [0, 1, 2], 4, 2).update_s == (1.0, 5.0)


def _row() -> tuple[object, ...]:
    return "layer", (1.0,), (2.0,), (1.0,), (0.0,), (0.0,), 0.0


def test_recomputation_costs_time_and_saves_memory() -> None:
    p = chains.profile(*[chains.layer(held=10.0, output=1.0) for _ in range(4)])
    found = {
        again: partition(p, 4, method="simulated", micro_batches=4, recompute=again) for again in RECOMPUTE
    }
    assert found["never"].value < found["except-last"].value < found["always"].value
    flight = build_schedule("advance-forward", 4, 4).peak_in_flight
    assert found["never"].memory_bytes == (flight[0] * 10.0, *(f * 11.0 for f in flight[1:]))
    # The input of one that is computed again is among those of all in flight; beside it are the 10 of its layer. Of the
    # stage with one in flight nothing is saved.
    assert flight[-1] == 1
    assert found["always"].memory_bytes == (10.0, *(f * 1.0 + 10.0 for f in flight[1:]))
    assert found["except-last"].memory_bytes == (20.0, *(f * 1.0 + min(2, f) * 10.0 for f in flight[1:]))
    with pytest.raises(ValueError, match=r"recompute='allways': did you mean 'always'\?"):
        partition(p, 4, method="simulated", recompute="allways")
