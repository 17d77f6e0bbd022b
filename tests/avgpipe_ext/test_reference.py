"""The slow twins round the exact result once."""

from __future__ import annotations

import pytest
import torch

from tests.avgpipe_ext.cases import CASES, FLOATS, arguments, exact

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)


@EVERY_CASE
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("list_form", [False, True])
def test_twins_round_the_formula_once(case, dtype, list_form):
    tensors = arguments(case, (7, 3), dtype)
    expected = [value.to(dtype) for value in exact(case, tensors)]
    result = case.twin(*([[t] for t in tensors] if list_form else tensors), *case.scalars)
    assert result.shape == (0,)
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected))


@EVERY_CASE
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_twins_count_what_the_operators_count(case, dtype):
    for position in range(len(case.tensors)):
        for bad in (float("inf"), float("nan")):
            ours, twins = arguments(case, (50,), dtype), arguments(case, (50,), dtype)
            ours[position][3::9] = bad
            twins[position][3::9] = bad
            lost = case.operator(*ours, *case.scalars, check_finite=True)
            assert torch.equal(lost, case.twin(*twins, *case.scalars, check_finite=True))
            assert all(torch.equal(a.isfinite(), b.isfinite()) for a, b in zip(ours, twins))


@EVERY_CASE
def test_twins_take_empty_lists(case):
    empty = [[] for _ in case.tensors]
    assert case.twin(*empty, *case.scalars, check_finite=True).item() == 0
