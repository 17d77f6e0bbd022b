"""A round in one pass, and a reference moved by several replicas, against the separate operators: bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import avgpipe_ext
from tests.avgpipe_ext.cases import SIXTEEN_BIT, copies, same

FLOAT = torch.float32
# Ways of a round: optimizer, its options, states for each x.
WAYS = {
    "sgd": ("sgd", {"lr": 0.1, "weight_decay": 0.01}, 0),
    "momentum": ("sgd", {"lr": 0.1, "mu": 0.9, "dampening": 0.1}, 1),
    "nesterov-first": ("sgd", {"lr": 0.1, "mu": 0.9, "nesterov": True, "first_step": True}, 1),
    "adam": ("adam", {"lr": 0.01, "weight_decay": 0.1, "step": 4}, 2),
    "adamw": ("adamw", {"lr": 0.01, "weight_decay": 0.1, "step": 4, "maximize": True}, 2),
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def make_round(way, replicas, shapes, x_dtype=FLOAT, other=FLOAT, z_dtype=None, seed=0):
    """xs, grads, states, z of a round."""
    generator = torch.Generator().manual_seed(seed)

    def tensors(dtype, count):
        return [torch.randn(s, generator=generator).to(dtype) for _ in range(count) for s in shapes]

    kinds = WAYS[way][2]
    states = tensors(other, kinds * replicas)
    if kinds == 2:
        states = states[: len(states) // 2] + [s.abs() for s in states[len(states) // 2 :]]
    return tensors(x_dtype, replicas), tensors(other, replicas), states, tensors(z_dtype or other, 1)


def one_step(way, x, grad, state, z, update, **scaling):
    """An optimizer's pass of one replica that only collects its step."""
    optimizer, options, _ = WAYS[way]
    rule = {"accumulate": False, **scaling}
    if optimizer == "sgd":
        momentum = state[0] if state else None
        return avgpipe_ext.elastic_sgd_(x, grad, momentum, z, update, 0.0, 0, **options, **rule)
    decoupled = optimizer == "adamw"
    return avgpipe_ext.elastic_adamw_(
        x, grad, *state, z, update, 0.0, 0, decoupled=decoupled, **options, **rule
    )


def separately(way, xs, grads, states, zs, alpha, **scaling):
    """N passes with staleness 0 and no pull, one that moves z by all the updates, and N pulls."""
    count = len(zs)
    replicas = len(xs) // count
    update_dtype = torch.float64 if zs and zs[0].dtype == torch.float64 else FLOAT
    updates = [torch.empty_like(x, dtype=update_dtype) for x in xs]
    lost = torch.zeros((), dtype=torch.int64)
    for i, x in enumerate(xs):
        result = one_step(way, x, grads[i], states[i :: len(xs)], zs[i % count], updates[i], **scaling)
        lost += result.sum()
    check = scaling.get("check_finite", False)
    avgpipe_ext.reference_apply_(zs, updates, 1 / replicas, zero=False, check_finite=check)
    for i, x in enumerate(xs):
        avgpipe_ext.elastic_pull_(x, zs[i % count], alpha)
    return lost


def check(way, tensors, alpha=0.3, **scaling):
    optimizer, options, _ = WAYS[way]
    expected = [copies(kind) for kind in tensors]
    lost = avgpipe_ext.elastic_round_(*tensors, alpha, optimizer=optimizer, **options, **scaling)
    expected_lost = separately(way, *expected, alpha, **scaling)
    for ours, theirs in zip(tensors, expected):
        assert all(same(a, b) for a, b in zip(ours, theirs))
    return lost, expected_lost


@EVERY_WAY
@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "shapes", [[(70001,)], [(3, 5), (), (0,), (8193,), (2, 2, 2)]], ids=["arena", "list"]
)
def test_equals_separate_passes_bit_for_bit(way, replicas, shapes):
    check(way, make_round(way, replicas, shapes))


@EVERY_WAY
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
@pytest.mark.parametrize("z_dtype", [None, "float32"])
def test_16_bit_weights_too_if_the_updates_between_are_float32(way, dtype, z_dtype):
    check(way, make_round(way, 3, [(1003,), (7, 3)], dtype, FLOAT, FLOAT if z_dtype else dtype))


@EVERY_WAY
def test_float64_too(way):
    wide = torch.float64
    check(way, make_round(way, 3, [(1003,), (7, 3)], wide, wide, wide))


@settings(max_examples=100)
@given(
    way=st.sampled_from(sorted(WAYS)),
    replicas=st.integers(1, 5),
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4),
    alpha=st.floats(-2, 2, width=32),
    seed=st.integers(0, 1000),
)
def test_any_shapes_and_replicas(way, replicas, shapes, alpha, seed):
    check(way, make_round(way, replicas, shapes, seed=seed), alpha)


@EVERY_WAY
def test_channels_last_weights(way):
    tensors = make_round(way, 2, [(2, 3, 4, 5)])
    check(way, [[t.contiguous(memory_format=torch.channels_last) for t in kind] for kind in tensors])


@EVERY_WAY
@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_scaled_gradients_and_skipped_steps(way, skipped):
    scaling = {"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(skipped)}
    check(way, make_round(way, 2, [(1003,)]), **scaling)


@EVERY_WAY
def test_values_that_are_not_finite(way):
    tensors = make_round(way, 3, [(1003,)])
    for kind, position in ((0, 0), (1, 1), (1, 2)):
        tensors[kind][position][position :: 5 + position] = (float("inf"), float("nan"))[position % 2]
    lost, expected = check(way, tensors, check_finite=True)
    assert torch.equal(lost, expected)
    assert lost.item() > 0
    assert tensors[3][0].isfinite().all()


@EVERY_WAY
def test_one_z_is_a_list_of_one(way):
    optimizer, options, _ = WAYS[way]
    xs, grads, states, z = make_round(way, 3, [(100,)])
    again = [copies(kind) for kind in (xs, grads, states, z)]
    avgpipe_ext.elastic_round_(xs, grads, states, z[0], 0.3, optimizer=optimizer, **options)
    avgpipe_ext.elastic_round_(*again, 0.3, optimizer=optimizer, **options)
    assert all(torch.equal(a, b) for a, b in zip((*xs, *states, *z), (*again[0], *again[2], *again[3])))


def test_without_tensors_there_is_nothing_to_do():
    lost = avgpipe_ext.elastic_round_([], [], [], [], 0.3, optimizer="sgd", lr=0.1, mu=0.9, check_finite=True)
    assert lost.item() == 0


@pytest.mark.parametrize("dtype", [FLOAT, torch.float64], ids=str)
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("replicas", [1, 2, 5, 9])
def test_updates_of_several_replicas_are_those_of_separate_calls(dtype, zero, replicas):
    zs = [torch.randn(70001, dtype=dtype), torch.randn(3, 5, dtype=dtype), torch.empty(0, dtype=dtype)]
    updates = [torch.randn(z.shape, dtype=dtype) for _ in range(replicas) for z in zs]
    updates[0][::100] = float("nan")
    expected, parts = copies(zs), copies(updates)
    lost = avgpipe_ext.reference_apply_(zs, updates, 0.3, zero=zero, check_finite=True)
    expected_lost = 0
    for r in range(replicas):
        mine = parts[3 * r : 3 * r + 3]
        expected_lost += avgpipe_ext.reference_apply_(
            expected, mine, 0.3, zero=zero, check_finite=True
        ).item()
    assert lost.item() == expected_lost == 701
    assert all(torch.equal(a, b) for a, b in zip(zs, expected))
    assert all(same(a, b) for a, b in zip(updates, parts))
    assert all(not zero or not bool(u.any()) for u in updates)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
@pytest.mark.parametrize("updates_dtype", [None, FLOAT], ids=str)
def test_16_bit_references_are_rounded_once_for_all_replicas(dtype, updates_dtype):
    z = torch.randn(1003).to(dtype)
    updates = [torch.randn(1003).to(updates_dtype or dtype) for _ in range(5)]
    expected = z.float()
    for update in updates:
        expected = expected + 0.3 * update.float()
    avgpipe_ext.reference_apply_(z, updates, 0.3)
    assert torch.equal(z, expected.to(dtype))
