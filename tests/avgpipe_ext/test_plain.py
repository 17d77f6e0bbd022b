"""The operators in plain torch, as accelerators without kernels get them: against the kernels, bit for bit, and against
the twins in float64. Asked for by their dispatch key, with tensors of the CPU.
"""

from __future__ import annotations

import pytest
import torch

from avgpipe_ext import operators, plain
from tests.avgpipe_ext.cases import (
    APPLY,
    CASES,
    FLOATS,
    SIXTEEN_BIT,
    arguments,
    assert_near,
    copies,
    mixes,
    round_case,
    same,
)

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)
PLAIN = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)


def in_plain_torch(case, tensors, **options):
    overload, values = case.raw(tensors)
    return overload.redispatch(PLAIN, *values, **{**case.raw_options, **options})


def by_kernels(case, tensors, **options):
    return case.operator(*tensors, *case.scalars, **options)


def agree(case, tensors, **options):
    """Both give the same, but for float32 roots, which torch may round to the neighbour of what is right."""
    expected, before = copies(tensors), copies(tensors)
    lost = in_plain_torch(case, tensors, **options)
    assert torch.equal(lost, by_kernels(case, expected, **options))
    if "adam" not in str(case):
        assert all(same(ours, theirs) for ours, theirs in zip(tensors, expected))
    return before


@pytest.mark.parametrize("key", plain.KEYS)
def test_every_operator_has_a_plain_form_on_other_accelerators(key):
    names = [f"{name}{overload}" for name in operators.OPERATORS for overload in ("", ".list")]
    for name in (*names, "pack", "pack.out", "unpack_"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"avgpipe::{name}", key), name


@EVERY_CASE
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_follows_twin_and_kernel(case, dtype):
    for shape in ((), (0,), (1003,), (3, 5)):
        tensors = arguments(case, shape, dtype)
        before = agree(case, tensors)
        assert_near(case, tensors, before)


@EVERY_CASE
def test_takes_lists(case):
    base = arguments(case, (513,), torch.float32)
    one, several = copies(base), [[t.clone(), 2 * t] for t in base]
    in_plain_torch(case, one)
    in_plain_torch(case, several)
    assert all(same(a, b[0]) for a, b in zip(one, several))


@EVERY_CASE
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_mixes_16_bit_with_float32_masters(case, dtype):
    for dtypes in mixes(case, dtype):
        tensors = arguments(case, (3, 171), dtypes)
        assert_near(case, tensors, agree(case, tensors))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_a_float32_reference_takes_16_bit_updates(dtype):
    tensors = arguments(APPLY, (513,), (torch.float32, dtype))
    assert_near(APPLY, tensors, agree(APPLY, tensors))


@EVERY_CASE
def test_counts_what_is_not_finite(case):
    tensors = arguments(case, (1003,), torch.float32)
    for position, tensor in enumerate(tensors):
        tensor[position :: 50 + position] = (float("inf"), float("nan"))[position % 2]
    agree(case, tensors, check_finite=True)


@pytest.mark.parametrize("case", [c for c in CASES if "grad_scale" in str(c.packet.default._schema)], ids=str)
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_scaled_gradients_and_skipped_steps(case, found):
    scaling = {"grad_scale": torch.tensor([8.0]), "found_inf": torch.tensor([found])}
    tensors, options = arguments(case, (1003,), torch.float32), case.raw_options
    expected = copies(tensors)
    agree(case, tensors, **scaling)
    by_kernels(case, expected, **scaling)
    for ours, theirs in zip(tensors, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert options.keys() == case.raw_options.keys()


@pytest.mark.parametrize("replicas", [1, 3])
def test_rounds_of_several_replicas_and_tensors(replicas):
    case = round_case("plain", optimizer="sgd", lr=0.1, mu=0.9)
    overload = torch.ops.avgpipe.elastic_round_.list
    kinds = [[torch.randn(7) for _ in range(2 * replicas)] for _ in range(3)]
    kinds.append([torch.randn(7) for _ in range(2)])
    expected = [copies(kind) for kind in kinds]
    overload.redispatch(PLAIN, *kinds, 0.3, **case.raw_options)
    overload(*expected, 0.3, **case.raw_options)
    assert all(same(a, b) for ours, theirs in zip(kinds, expected) for a, b in zip(ours, theirs))


def test_a_step_that_is_counted_on_the_device():
    """Its bias correction is made there, in whatever precision it has."""
    for beta in (0.0, 0.9, 0.999):
        for step in (1.0, 7.0, 1000.0):
            exact = 1 - beta**step
            assert float(plain._bias(beta, torch.tensor(step))) == pytest.approx(exact, rel=1e-6)
            assert plain._bias(beta, step) == exact


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="shapes"):
        torch.ops.avgpipe.elastic_pull_.default.redispatch(PLAIN, torch.ones(2, 1), torch.ones(2), 0.5)


@pytest.mark.parametrize("dtype", [None, *FLOATS], ids=str)
def test_pack_and_unpack(dtype):
    tensors = [torch.randn(3, 4).t(), torch.randn(()), torch.randn(0, 2), torch.randn(5)[::2]]
    ops = torch.ops.avgpipe
    buffer = ops.pack.default.redispatch(PLAIN, tensors, dtype=dtype)
    assert torch.equal(buffer, ops.pack(tensors, dtype=dtype))
    again = torch.empty_like(buffer)
    ops.pack.out.redispatch(PLAIN, tensors, out=again)
    assert torch.equal(again, buffer)
    back = [torch.zeros_like(t) for t in tensors]
    ops.unpack_.default.redispatch(PLAIN, buffer, back)
    assert all(torch.equal(a, b.to(buffer.dtype).float()) for a, b in zip(back, tensors))
    for wrong in (buffer[1:], buffer[None]):
        with pytest.raises(ValueError, match="elements"):
            ops.unpack_.default.redispatch(PLAIN, wrong, back)
    with pytest.raises(ValueError, match="several dtypes"):
        ops.pack.default.redispatch(PLAIN, [torch.ones(1), torch.ones(1).double()])
