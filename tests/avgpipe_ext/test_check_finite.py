"""What check_finite counts, and what reference_apply_ then leaves alone."""

from __future__ import annotations

import pytest
import torch

import avgpipe_ext
from tests.avgpipe_ext.cases import CASES, FLOATS, arguments

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_finite_values_count_zero_and_change_nothing(case, dtype):
    plain, counted = arguments(case, (1000,), dtype), arguments(case, (1000,), dtype)
    case.operator(*plain, *case.scalars)
    lost = case.operator(*counted, *case.scalars, check_finite=True)
    assert lost.shape == ()
    assert lost.dtype == torch.int64
    assert lost.item() == 0
    assert all(torch.equal(a, b) for a, b in zip(plain, counted))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [INF, -INF, NAN], ids=str)
def test_an_element_counts_once_wherever_it_is_not_finite(case, dtype, bad):
    for position in range(len(case.tensors)):
        tensors = arguments(case, (1000,), dtype)
        tensors[position][[0, 511, 999]] = bad
        tensors[-1][999] = bad  # in two operands: still one element
        assert case.operator(*tensors, *case.scalars, check_finite=True).item() == 3
        assert avgpipe_ext.elastic_pull_(tensors[0], torch.zeros_like(tensors[0]), 0.0).shape == (0,)


def test_lists_count_over_all_their_tensors():
    x = [torch.tensor([1.0, INF]), torch.tensor([]), torch.tensor([[NAN, 1.0, NAN]])]
    z = [torch.zeros_like(t) for t in x]
    assert avgpipe_ext.elastic_pull_(x, z, 0.5, check_finite=True).item() == 3


@pytest.mark.parametrize(
    ("dtype", "largest", "overflowing"),
    [(torch.float16, 65519.0, 65520.0), (torch.bfloat16, 3.3961e38, 3.3962e38)],
    ids=str,
)
def test_a_value_that_only_its_16_bit_dtype_cannot_hold_counts(dtype, largest, overflowing):
    z = torch.tensor([largest, -largest, overflowing, -overflowing])
    x = torch.zeros(4, dtype=dtype)
    assert avgpipe_ext.elastic_pull_(x, z, 1.0, check_finite=True).item() == 2
    assert x.isfinite().tolist() == [True, True, False, False]


def test_an_update_alone_can_be_lost():
    x, before = torch.tensor([1.0, 1.0]), torch.tensor([1.0, INF])
    update = torch.zeros(2)
    assert avgpipe_ext.elastic_step_(x, before, torch.zeros(2), update, 0.5, 0, check_finite=True).item() == 1
    assert x.tolist() == [0.5, 0.5]
    assert update.tolist() == [0.0, -INF]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reference_apply_leaves_z_where_the_update_is_not_finite(dtype):
    z = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype)
    update = torch.tensor([1.0, INF, NAN, -INF], dtype=dtype)
    assert avgpipe_ext.reference_apply_(z, update, 0.5, check_finite=True).item() == 3
    assert z.tolist() == [1.5, 2.0, 3.0, 4.0]
    assert update.tolist() == [0.0] * 4


def test_reference_apply_leaves_z_where_the_sum_overflows():
    z, update = torch.tensor([60000.0], dtype=torch.float16), torch.tensor([60000.0], dtype=torch.float16)
    assert avgpipe_ext.reference_apply_(z, update, 1.0, check_finite=True).item() == 1
    assert z.item() == 60000.0


def test_reference_apply_without_the_check_passes_values_on():
    z = torch.tensor([1.0, 2.0])
    avgpipe_ext.reference_apply_(z, torch.tensor([INF, 1.0]), 0.5)
    assert z.tolist() == [INF, 2.5]
