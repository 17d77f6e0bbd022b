"""The operators against their twins in float64, within the bounds of `rounding.py` and `formulas.py`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import avgpipe_ext
from tests.avgpipe_ext.cases import (
    APPLY,
    CASES,
    EASGD_RULE,
    EMPTY,
    FLOATS,
    MIXED_RULE,
    RULES,
    SIXTEEN_BIT,
    adam,
    arguments,
    assert_near,
    copies,
    mixes,
    same,
    sgd,
    trial,
)

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)
# Around the kernels' tile of 512 and a thread's share of 32768, and sizes that no vector divides.
SIZES = (0, 1, 7, 511, 512, 513, 1025, 70001)


def check(case, tensors, *, list_form=False):
    """A float64 value, or one rounded as the kernels round: within the chain's bound of the twin.

    The kernels' results are chains of correctly rounded operations without fused multiply-add, so what each
    operation may add to the error is known: half an eps of its result (see `Rounded`).
    """
    before = copies(tensors)
    passed = [[t] for t in tensors] if list_form else tensors
    assert case.operator(*passed, *case.scalars).shape == (0,)
    assert_near(case, tensors, before)


@pytest.mark.grid
@EVERY_CASE
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_follows_its_twin(case, dtype, size):
    check(case, arguments(case, (size,), dtype), list_form=size == 513)


@EVERY_CASE
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_mixes_16_bit_with_float32_masters(case, dtype):
    for dtypes in mixes(case, dtype):
        check(case, arguments(case, (3, 171), dtypes))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_a_float32_reference_takes_16_bit_updates(dtype):
    check(APPLY, arguments(APPLY, (513,), (torch.float32, dtype)))


@pytest.mark.grid
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
@settings(max_examples=15)
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
        assert all(same(a, b) for a, b in zip(listed, single))


@EVERY_CASE
def test_an_empty_list_is_nothing_to_do(case):
    empty = [[] for _ in case.tensors]
    assert case.operator(*empty, *case.scalars).shape == (0,)
    counted = case.operator(*empty, *case.scalars, check_finite=True)
    assert counted.shape == ()
    assert counted.dtype == torch.int64
    assert counted.item() == 0


FACTORS = st.floats(-2, 2, width=32)
DECAYS = st.sampled_from([0.0, 0.01, 1.0])
RATES = st.floats(2**-20, 2, width=32)


@st.composite
def optimizer_cases(draw):
    """elastic_sgd_ and elastic_adamw_ with any options."""
    common = {
        "alpha": draw(FACTORS),
        "staleness": draw(st.sampled_from([0, 1])),
        "lr": draw(RATES),
        "weight_decay": draw(DECAYS),
        "maximize": draw(st.booleans()),
        "accumulate": draw(st.booleans()),
    }
    common |= draw(st.sampled_from([EMPTY, EASGD_RULE, MIXED_RULE]))
    if draw(st.booleans()):
        betas = {
            "beta1": draw(st.sampled_from([0.0, 0.5, 0.9])),
            "beta2": draw(st.sampled_from([0.0, 0.9, 0.999])),
        }
        count = {"step": draw(st.integers(1, 10**6)), "eps": draw(st.sampled_from([1e-8, 1e-3]))}
        return adam("any", decoupled=draw(st.booleans()), **common, **betas, **count)
    mu = draw(st.sampled_from([0.0, 0.5, 0.99]))
    nesterov = bool(mu) and draw(st.booleans())
    dampening = 0.0 if nesterov or not mu else draw(st.sampled_from([0.0, 0.3]))
    first = bool(mu) and draw(st.booleans())
    return sgd("any", mu=mu, nesterov=nesterov, dampening=dampening, first_step=first, **common)


ANY_CASE = optimizer_cases() | optimizer_cases().map(trial) | st.sampled_from(CASES)


@settings(max_examples=150)
@given(
    case=ANY_CASE,
    shape=st.lists(st.integers(0, 9), max_size=4),
    order=st.randoms(use_true_random=False),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 1000),
)
def test_any_options_shapes_and_orders_of_dimensions(case, shape, order, dtype, seed):
    dimensions = list(range(len(shape)))
    order.shuffle(dimensions)
    check(case, [t.permute(dimensions) for t in arguments(case, shape, dtype, seed)])


def any_values(case, values, dtype):
    tensors = [torch.tensor(values).roll(shift).to(dtype) for shift in range(len(case.tensors))]
    return [t.abs() if name in case.squares else t for name, t in zip(case.tensors, tensors)]


@settings(max_examples=200)
@given(
    case=ANY_CASE,
    values=st.lists(st.floats(width=32), min_size=1, max_size=40),
    dtype=st.sampled_from(FLOATS),
)
def test_any_values(case, values, dtype):
    """Subnormal, huge, infinite, NaN; there is a bound wherever nothing overflows on the way."""
    check(case, any_values(case, values, dtype))


@settings(max_examples=200)
@given(case=ANY_CASE, values=st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_float32_rounds_as_separate_operations_do(case, values):
    """Bit for bit, also for subnormal, huge, infinite numbers and NaN."""
    tensors = any_values(case, values, torch.float32)
    expected = case.formula(*tensors, *case.scalars)
    results = copies(tensors)
    case.operator(*results, *case.scalars)
    for name, a, b in zip(case.tensors, results, expected):
        assert same(a, b), (name, a, b)


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cutting_tensors_into_lists_changes_nothing(case, dtype):
    whole = arguments(case, (3000,), dtype)
    cut = [list(t.clone().split([1, 700, 0, 1024, 1275])) for t in whole]
    lost = case.operator(*whole, *case.scalars, check_finite=True)
    assert torch.equal(lost, case.operator(*cut, *case.scalars, check_finite=True))
    assert all(torch.equal(t, torch.cat(parts)) for t, parts in zip(whole, cut))


@EVERY_CASE
@pytest.mark.parametrize("list_form", [False, True])
def test_results_do_not_depend_on_the_number_of_threads(case, list_form):
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            tensors = arguments(case, (200003,), torch.float32)
            tensors[-1][::1000] = float("inf")
            passed = [list(t.split(77777)) for t in tensors] if list_form else tensors
            lost = case.operator(*passed, *case.scalars, check_finite=True)
            results.append((lost, *tensors))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(same(a, b) for a, b in zip(results[0], other))
    assert case not in RULES or results[0][0].item() == 201


def test_parameters_are_updated_without_gradients():
    x = torch.nn.Parameter(torch.ones(3))
    avgpipe_ext.elastic_pull_(x, torch.zeros(3), 0.25)
    assert x.requires_grad
    assert x.is_leaf
    assert x.tolist() == [0.75] * 3


def test_a_tensor_beside_a_list_is_a_type_error():
    with pytest.raises(TypeError, match="pass tensors only, or lists of tensors only"):
        avgpipe_ext.elastic_pull_(torch.ones(2), [torch.ones(2)], 0.5)
