"""The operators against their formulas in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import avgpipe_ext
from tests.avgpipe_ext.cases import CASES, FLOATS, SIXTEEN_BIT, arguments, assert_near, exact

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)
# Around the kernels' tile of 512 and a thread's share of 32768, and sizes that no vector divides.
SIZES = (0, 1, 7, 511, 512, 513, 1025, 70001)


def check(case, tensors, *, list_form=False):
    before = [t.clone() for t in tensors]
    expected = exact(case, tensors)
    passed = [[t] for t in tensors] if list_form else tensors
    assert case.operator(*passed, *case.scalars).shape == (0,)
    assert_near(tensors, expected, before)


@EVERY_CASE
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_follows_the_formula(case, dtype, size):
    check(case, arguments(case, (size,), dtype))


@EVERY_CASE
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_mixes_16_bit_with_float32_masters(case, dtype):
    for choice in itertools.product((dtype, torch.float32), repeat=len(case.tensors) - 1):
        check(case, arguments(case, (3, 171), (dtype, *choice)))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_a_float32_reference_takes_16_bit_updates(dtype):
    check(CASES[-1], arguments(CASES[-1], (513,), (torch.float32, dtype)))


@EVERY_CASE
@pytest.mark.parametrize("shape", [(), (1,), (5, 3), (2, 0, 3), (2, 3, 4, 5)], ids=str)
def test_takes_any_shape(case, shape):
    check(case, arguments(case, shape, torch.float32))


@EVERY_CASE
def test_takes_channels_last_and_transposed_tensors(case):
    base = arguments(case, (2, 3, 4, 5), torch.float32)
    check(case, [t.contiguous(memory_format=torch.channels_last) for t in base])
    check(case, [t.permute(3, 1, 0, 2) for t in base])


@EVERY_CASE
def test_takes_views_at_any_address(case):
    check(case, [t[1:] for t in arguments(case, (1000,), torch.bfloat16)])


@EVERY_CASE
@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=0, max_size=5),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 1000),
)
def test_a_list_is_its_tensors_one_by_one(case, shapes, dtype, seed):
    tuples = [arguments(case, shape, dtype, seed + t) for t, shape in enumerate(shapes)]
    singles = [[t.clone() for t in row] for row in tuples]
    case.operator(*([row[i] for row in tuples] for i in range(len(case.tensors))), *case.scalars)
    for row in singles:
        case.operator(*row, *case.scalars)
    for listed, single in zip(tuples, singles):
        assert all(torch.equal(a, b) for a, b in zip(listed, single))


@EVERY_CASE
def test_an_empty_list_is_nothing_to_do(case):
    empty = [[] for _ in case.tensors]
    assert case.operator(*empty, *case.scalars).shape == (0,)
    counted = case.operator(*empty, *case.scalars, check_finite=True)
    assert counted.shape == ()
    assert counted.dtype == torch.int64
    assert counted.item() == 0


@EVERY_CASE
@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-1e4, 1e4, width=16), min_size=1, max_size=40),
    factor=st.floats(-2, 2, width=32),
    dtype=st.sampled_from(FLOATS),
)
def test_values_and_factors(case, values, factor, dtype):
    tensors = [torch.tensor(values).roll(shift).to(dtype) for shift in range(len(case.tensors))]
    before = [t.clone() for t in tensors]
    scalars = (factor, *case.scalars[1:])
    expected = case.formula(*(t.double() for t in tensors), *scalars)
    finite = torch.stack([e.abs() <= torch.finfo(t.dtype).max for e, t in zip(expected, tensors)]).all(0)
    case.operator(*tensors, *scalars)
    assert_near([t[finite] for t in tensors], [e[finite] for e in expected], [3 * t[finite] for t in before])


def test_float32_rounds_as_separate_operations_do():
    x, z = torch.randn(70001), torch.randn(70001)
    expected = x + 0.3 * (z - x)
    avgpipe_ext.elastic_pull_(x, z, 0.3)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_16_bit_values_round_as_torch_rounds_them(dtype):
    """All 65536 bit patterns: z = 0 and alpha = 0 leave x, alpha = 1 narrows a float32 z."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite()]
    kept = x.clone()
    avgpipe_ext.elastic_pull_(kept, torch.zeros_like(x), 0.0)
    assert torch.equal(kept, x)
    around = x.float() * (1 + torch.linspace(-0.002, 0.002, len(x)))
    narrowed = torch.zeros_like(x)
    avgpipe_ext.elastic_pull_(narrowed, around, 1.0)
    assert torch.equal(narrowed, around.to(dtype))


@EVERY_CASE
def test_results_do_not_depend_on_the_number_of_threads(case):
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            tensors = arguments(case, (200003,), torch.float32)
            tensors[-1][::1000] = float("inf")
            lost = case.operator(*tensors, *case.scalars, check_finite=True)
            results.append((lost, *tensors))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*results))
    assert results[0][0].item() == 201


def test_parameters_are_updated_without_gradients():
    x = torch.nn.Parameter(torch.ones(3))
    avgpipe_ext.elastic_pull_(x, torch.zeros(3), 0.25)
    assert x.requires_grad
    assert x.is_leaf
    assert x.tolist() == [0.75] * 3


def test_a_tensor_beside_a_list_is_a_type_error():
    with pytest.raises(TypeError, match="pass tensors only, or lists of tensors only"):
        avgpipe_ext.elastic_pull_(torch.ones(2), [torch.ones(2)], 0.5)
