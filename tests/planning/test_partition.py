from __future__ import annotations

import itertools

import pytest

from avgpipe.planning import Partition, partition, partition_methods
from avgpipe.planning.profile import LayerProfile, LinkProfile, Profile, Skip, Tie
from tests.planning import chains

CHAIN = chains.profile(
    *[chains.layer(parameters=1e6, held=2e6, output=1e6) for _ in range(6)], link=LinkProfile(0.0, 1e6)
)


@pytest.mark.parametrize("method", partition_methods())
def test_every_method_makes_the_stages_asked_for(method: str) -> None:
    found = partition(CHAIN, 3, method=method)
    assert found.method == method
    assert found.stages == len(found.replication) == len(found.stage_s) == 3
    assert found.bounds[0] == 0
    assert found.bounds[-1] == 6
    assert found.value > 0


@pytest.mark.parametrize("method", partition_methods())
def test_every_method_refuses_more_stages_than_layers(method: str) -> None:
    with pytest.raises(ValueError, match=r"stages=7: 6 layers can be cut into 1 to 6 stages"):
        partition(CHAIN, 7, method=method)


@pytest.mark.parametrize("method", partition_methods())
def test_every_method_knows_a_number_of_stages_by_itself(method: str) -> None:
    assert 1 <= partition(CHAIN, method=method).stages <= 4
    assert partition(chains.profile(chains.layer()), method=method).stages == 1


def test_an_unknown_method_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'pipedraem': did you mean 'pipedream'\?"):
        partition(CHAIN, method="pipedraem")


def test_an_option_that_a_method_does_not_know_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"micro_batchs=4: method 'dapple' has no such option; did you mean 'micro_batches'"
    ):
        partition(CHAIN, method="dapple", micro_batchs=4)
    with pytest.raises(TypeError, match=r"workers=4: method 'balance' has no such option"):
        partition(CHAIN, method="balance", workers=4)


def test_a_profile_is_asked_for() -> None:
    with pytest.raises(TypeError, match=r"must be a Profile"):
        partition([1.0, 2.0])  # type: ignore[arg-type]


def test_negative_costs_never_become_a_profile() -> None:
    with pytest.raises(
        ValueError, match=r"layer 0 \(layer\): forward_s=-1.0: must be a finite number of at least 0"
    ):
        chains.profile(chains.layer(forward_s=-1.0))


def test_a_partition_reads_in_plain_words() -> None:
    assert str(partition(CHAIN, 2, method="pipedream")).splitlines() == [
        "pipedream: 6 layers in 2 stages on 2 workers, micro-batches of 1 samples",
        "slowest stage, link or synchronisation, per micro-batch: 9.00 s",
        "stage 0: layers 0 to 2, 1 worker, 9.00 s per micro-batch, 20 MiB",
        "stage 1: layers 3 to 5, 1 worker, 9.00 s per micro-batch, 12.4 MiB",
    ]


def test_devices_of_machines_are_named() -> None:
    found = partition(CHAIN, 1, method="dapple", levels=[(2, 1e12), (2, 1e12)])
    assert str(found).splitlines()[-1].endswith("on 2 of each of machines 0 to 1")


def test_free_transfers_are_said() -> None:
    p = chains.profile(chains.layer(), chains.layer())
    assert "transfers count as free" in str(partition(p, 2))
    assert partition(p, 2, link=LinkProfile(0.0, 1.0)).notes == ()


def test_an_impossible_partition_is_refused() -> None:
    with pytest.raises(ValueError, match=r"boundaries=\(3, 2\): must rise between 0 and 6 layers"):
        Partition("x", 6, [3, 2], [1, 1, 1], [1.0] * 3, "time", 1.0, 1, 3)
    with pytest.raises(ValueError, match=r"give one for each of 2 stages"):
        Partition("x", 6, [3], [1], [1.0] * 2, "time", 1.0, 1, 3)


# ---- what all methods see of a profile -----------------------------------------------------------------------------


def test_a_skip_makes_a_cut_under_it_dearer() -> None:
    layers = [chains.layer(output=1.0) for _ in range(4)]
    link = LinkProfile(0.0, 1.0)
    plain = chains.profile(*layers, link=link)
    skipping = chains.profile(*layers, link=link, skips=(Skip(1, 3, (100.0,)),))
    assert partition(plain, 2, method="pipedream").boundaries == (2,)
    assert partition(skipping, 2, method="pipedream").boundaries == (1,)


def test_tied_weights_count_once_in_a_stage() -> None:
    tied = [chains.layer(0.0, 0.0, parameters=10.0) for _ in range(3)]
    p = chains.profile(*tied, ties=(Tie((0, 2), 10.0),))
    assert partition(p, 1, method="balance", by="bytes").value == 40.0
    assert partition(p, 2, method="balance", by="bytes").value == 40.0


def test_what_the_next_stage_keeps_is_not_counted_twice() -> None:
    row = LayerProfile(
        "layer", (1.0,), (1.0,), (0.5,), (10.0,), (4.0,), 0.0, handed_bytes=(4.0,), frozen_bytes=3.0
    )
    p = chains.profile(row, row)
    found = partition(p, 2, method="balance", by="bytes")
    assert found.memory_bytes == (3.0 + 10.0 - 4.0, 3.0 + 10.0 + 4.0)


def test_costs_follow_the_micro_batch_size() -> None:
    first = LayerProfile("grows", (1.0, 8.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), 0.0)
    other = LayerProfile("stays", (3.0, 3.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), 0.0)
    p = Profile("m", "d", (1, 8), (first, other, other))
    assert partition(p, 2, method="balance", micro_batch_size=1).boundaries == (2,)
    assert partition(p, 2, method="balance").boundaries == (1,)
    assert partition(p, 2, method="balance").micro_batch_size == 8


# ---- balance ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["time", "bytes"])
def test_balance_equals_brute_force(by: str) -> None:
    def size(p: Profile, a: int, b: int) -> float:
        return 2 * chains.weights(p, a, b) + chains.optimizer(p, a, b) + chains.held(p, a, b)

    cost = chains.compute_s if by == "time" else size
    for seed in range(100):
        p = chains.random_profile(seed)
        for stages in range(1, min(4, len(p.layers)) + 1):
            found = partition(p, stages, method="balance", by=by)
            best = min(max(cost(p, a, b) for a, b in blocks) for blocks in chains.cuts(len(p.layers), stages))
            assert found.value == pytest.approx(best, rel=1e-9, abs=1e-9)
            reached = max(cost(p, a, b) for a, b in itertools.pairwise(found.bounds))
            assert reached == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_balance_knows_time_and_bytes() -> None:
    with pytest.raises(ValueError, match=r"by='byte': did you mean 'bytes'\?"):
        partition(CHAIN, method="balance", by="byte")
