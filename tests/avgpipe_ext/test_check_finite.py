"""What check_finite counts, and what reference_apply_ then leaves alone."""

from __future__ import annotations

import pytest
import torch

import avgpipe_ext
from tests.avgpipe_ext.cases import CASES, FLOATS, OPTIMIZERS, ROUNDS, RULES, arguments, copies

INF, NAN = float("inf"), float("nan")


@pytest.mark.grid
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


@pytest.mark.grid
@pytest.mark.parametrize("case", RULES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [INF, -INF, NAN], ids=str)
def test_an_element_counts_once_wherever_it_is_not_finite(case, dtype, bad):
    for position in range(len(case.tensors)):
        tensors = arguments(case, (1000,), dtype)
        tensors[position][[0, 511, 999]] = bad
        tensors[-1][999] = bad  # in two operands: still one element
        assert case.operator(*tensors, *case.scalars, check_finite=True).item() == 3
        assert avgpipe_ext.elastic_pull_(tensors[0], torch.zeros_like(tensors[0]), 0.0).shape == (0,)


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [INF, -INF, NAN], ids=str)
def test_twins_count_what_the_operators_count(case, dtype, bad):
    for position in range(len(case.tensors)):
        ours = arguments(case, (50,), dtype)
        ours[position][3::9] = bad
        twins = copies(ours)
        lost = case.operator(*ours, *case.scalars, check_finite=True)
        assert torch.equal(lost, case.twin(*twins, *case.scalars, check_finite=True))
        assert all(torch.equal(a.isfinite(), b.isfinite()) for a, b in zip(ours, twins))


@pytest.mark.parametrize("case", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("bad", [INF, NAN], ids=str)
def test_a_diverged_replica_leaves_z_alone(case, bad):
    """Its update is not finite and counted, and then left out of the reference."""
    *tensors, z, update = arguments(case, (100,), torch.float32)
    tensors[1][::10] = bad
    old = z.clone()
    assert case.operator(*tensors, z, update, *case.scalars, check_finite=True).item() == 10
    assert torch.equal(z, old)
    assert avgpipe_ext.reference_apply_(z, update, 0.5, check_finite=True).item() == 10
    assert torch.equal(z[::10], old[::10])
    assert z.isfinite().all()


@pytest.mark.parametrize("case", ROUNDS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [INF, NAN], ids=str)
def test_a_round_leaves_a_diverged_replica_out_of_z(case, dtype, bad):
    """The other replica's step counts; the elements of the diverged one stay with it."""
    tensors = arguments(case, (100,), dtype)
    tensors[2][::10] = bad
    alone = copies(tensors)
    alone[2].zero_()
    alone[2][::10] = NAN
    z = tensors[-1].clone()
    assert case.operator(*tensors, *case.scalars, check_finite=True).item() == 10
    assert case.operator(*alone, *case.scalars, check_finite=True).item() == 10
    assert tensors[-1].isfinite().all()
    assert torch.equal(tensors[-1][::10], alone[-1][::10])
    assert not torch.equal(tensors[-1][::10], z[::10])
    assert tensors[1].isfinite().all()
    assert not tensors[0][::10].isfinite().any()


@pytest.mark.parametrize("case", ROUNDS, ids=str)
def test_a_round_without_the_check_passes_values_on(case):
    tensors = arguments(case, (100,), torch.float32)
    tensors[2][::10] = NAN
    assert case.operator(*tensors, *case.scalars).shape == (0,)
    assert tensors[-1][::10].isnan().all()


@pytest.mark.parametrize("case", ROUNDS, ids=str)
def test_a_rounds_count_is_of_each_replicas_elements(case):
    tensors = arguments(case, (100,), torch.float32)
    tensors[2][:5] = NAN
    tensors[3][3:10] = NAN
    assert case.operator(*tensors, *case.scalars, check_finite=True).item() == 12


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


def test_reference_apply_leaves_out_only_what_is_not_finite_of_several_updates():
    z = torch.tensor([1.0, 2.0, 3.0])
    updates = [torch.tensor([1.0, NAN, 1.0]), torch.tensor([INF, 1.0, 1.0]), torch.tensor([1.0, 1.0, 1.0])]
    assert avgpipe_ext.reference_apply_(z, updates, 0.5, zero=False, check_finite=True).item() == 2
    assert z.tolist() == [2.0, 3.0, 4.5]
    assert updates[0][0].item() == 1.0


# The sum of several updates is made in float32, which could hold what z cannot.
MOST = torch.finfo(torch.float16).max


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_float16_reference_stays_finite_where_a_sum_of_updates_overflows(replicas):
    z = torch.tensor([MOST, 1.0], dtype=torch.float16)
    updates = [torch.tensor([MOST / 2, 1.0], dtype=torch.float16) for _ in range(replicas)]
    assert avgpipe_ext.reference_apply_(z, updates, 1.0, check_finite=True).item() == replicas
    assert z.tolist() == [MOST, 1.0 + replicas]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_float16_reference_stays_finite_where_a_round_overflows(replicas):
    z = torch.tensor([MOST, 1.0], dtype=torch.float16)
    xs = [torch.zeros(2, dtype=torch.float16) for _ in range(replicas)]
    grads = [torch.tensor([-MOST, -2.0]) for _ in range(replicas)]
    lost = avgpipe_ext.elastic_round_(xs, grads, [], z, 0.0, optimizer="sgd", lr=1.0, check_finite=True)
    assert lost.item() == replicas
    assert z.tolist() == [MOST, 3.0]
