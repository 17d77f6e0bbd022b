"""Trial steps from the reference: the step of the fused operators and of torch's optimizers, without its traces."""

from __future__ import annotations

import math

import pytest
import torch

import avgpipe_ext
from tests.avgpipe_ext.cases import (
    FLOATS,
    SIXTEEN_BIT,
    TRIAL_ADAM,
    TRIAL_SGD,
    TRIALS,
    adam,
    arguments,
    bounds,
    copies,
    sgd,
    trial,
)
from tests.avgpipe_ext.rounding import assert_within
from tests.avgpipe_ext.torch_steps import torch_step

STEPS = (
    sgd("plain", lr=0.1, weight_decay=0.01),
    sgd("nesterov", lr=0.1, mu=0.9, nesterov=True, weight_decay=0.01),
    sgd("dampened", lr=0.5, mu=0.5, dampening=0.5, weight_decay=0.1, maximize=True),
    sgd("first", lr=0.1, mu=0.9, nesterov=True, first_step=True),
    adam("decoupled", step=3, lr=0.01),
    adam("first", step=1, lr=1e-3, maximize=True, weight_decay=0.1),
    adam("coupled", step=1000, lr=0.1, decoupled=False, weight_decay=0.01),
    adam("betas", step=2, lr=0.01, beta1=0.6, beta2=0.8, eps=1e-3, weight_decay=0.0),
)
EVERY_STEP = pytest.mark.parametrize("step", STEPS, ids=str)
EVERY_CASE = pytest.mark.parametrize("case", TRIALS, ids=str)
EVERY_DTYPE = pytest.mark.parametrize("dtype", FLOATS, ids=str)
# Our chain's error and torch's, which counts twice (see test_operators_torch.py).
TIMES = 3


@EVERY_STEP
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equals_the_fused_step_of_clones_without_elasticity(step, dtype):
    case = trial(step)
    x, z, grad, *state, update = arguments(case, (1003,), dtype)
    clone, *clones = copies([z, *state])
    case.operator(x, z, grad, *state, update)
    step.operator(clone, grad, *clones, z, torch.zeros_like(z), 0.0, 0)
    assert torch.equal(x, clone)


@EVERY_STEP
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equals_torchs_step_of_clones(step, dtype):
    case = trial(step)
    tensors = arguments(case, (1003,), dtype)
    limits = bounds(case, tensors)
    x, z, grad, *state, update = tensors
    expected, *clones = copies([z, *state])
    torch_step(step, expected, grad, clones)
    case.operator(*tensors)
    assert bool(limits[0].fits.all())
    assert_within(x, expected, limits[0], TIMES)
    assert torch.equal(update, -grad)


@EVERY_CASE
def test_trials_in_turn_leave_reference_and_state_for_the_next(case):
    """Replicas with gradients of their own try from the same z; what they tell does not depend on their order."""
    rows = [arguments(case, (100,), torch.float32, seed) for seed in range(3)]
    shared = rows[0][1], *rows[0][3:-1]
    before = copies(shared)

    def tried(row):
        x, _, grad, *_, update = row
        case.operator(x, shared[0], grad, *shared[1:], update)
        return copies([x, update])

    there, back = [tried(row) for row in rows], [tried(row) for row in rows[::-1]][::-1]
    assert all(torch.equal(a, b) for pair in zip(there, back) for a, b in zip(*pair))
    assert all(torch.equal(a, b) for a, b in zip(shared, before))


@EVERY_CASE
@EVERY_DTYPE
def test_what_is_overwritten_is_not_read(case, dtype):
    quiet, loud = arguments(case, (600,), dtype), arguments(case, (600,), dtype)
    loud[0].fill_(math.nan)
    loud[-1].fill_(math.nan)
    case.operator(*quiet)
    assert case.operator(*loud, check_finite=True).item() == 0
    assert all(torch.equal(a, b) for a, b in zip(quiet, loud))


@EVERY_DTYPE
def test_the_first_step_does_not_read_the_momentum(dtype):
    case = TRIALS[2]
    quiet, loud = arguments(case, (600,), dtype), arguments(case, (600,), dtype)
    loud[3].fill_(math.nan)
    case.operator(*quiet)
    assert case.operator(*loud, check_finite=True).item() == 0
    assert torch.equal(quiet[0], loud[0])
    x, z, grad, _, update = arguments(case, (600,), dtype)
    case.operator(x, z, grad, grad, update)
    assert torch.equal(x, quiet[0])


@EVERY_CASE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trials_larger_than_the_caches_are_those_of_their_parts(case, dtype):
    """From 8 MiB on, a CPU writes weights and updates past its caches."""
    whole = arguments(case, (3 * 2**21 + 5,), dtype)
    parts = [t.clone().split(10**6) for t in whole]
    case.operator(*whole)
    for part in zip(*parts):
        case.operator(*part)
    assert all(torch.equal(t, torch.cat(cut)) for t, cut in zip(whole, parts))


@EVERY_CASE
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_16_bit_weights_from_a_float32_reference_are_rounded_once(case, dtype):
    x, *rest = arguments(case, (1003,), [dtype] + [torch.float32] * (len(case.tensors) - 1))
    wide = torch.empty_like(rest[0])
    case.operator(x, *rest)
    case.operator(wide, *rest)
    assert torch.equal(x, wide.to(dtype))


@EVERY_CASE
@EVERY_DTYPE
def test_weights_and_updates_that_are_not_finite_count_once(case, dtype):
    x, z, grad, *state, update = arguments(case, (600,), dtype)
    z[::10] = math.inf
    grad[:20] = math.nan
    assert case.operator(x, z, grad, *state, update, check_finite=True).item() == 60 + 18
    assert not x[::10].isfinite().any()
    assert update[:20].isnan().all()
    assert update[20:].isfinite().all()


def test_an_update_that_only_its_dtype_cannot_hold_counts():
    x, z = torch.zeros(2, dtype=torch.float16), torch.zeros(2)
    grad, update = torch.tensor([1e5, 1.0]), torch.zeros(2, dtype=torch.float16)
    assert avgpipe_ext.trial_sgd_(x, z, grad, None, update, lr=1e-3, check_finite=True).item() == 1
    assert update.tolist() == [-math.inf, -1.0]
    assert x.isfinite().all()


@pytest.mark.parametrize("case", [TRIAL_SGD, TRIAL_ADAM], ids=str)
def test_weights_do_not_share_the_references_memory(case):
    _, z, *rest = arguments(case, (10,), torch.float32)
    with pytest.raises(ValueError, match=r"z shares 40 bytes of memory with x; pass a \.clone"):
        case.operator(z, z, *rest)


def test_the_reference_of_one_replica_comes_to_where_its_trials_were():
    """Torch's optimizer steps z by what was told, and its state is what the next trial takes."""
    generator = torch.Generator().manual_seed(0)
    z = torch.nn.Parameter(torch.randn(50, dtype=torch.float64, generator=generator))
    optimizer = torch.optim.AdamW([z], lr=0.01)
    x, told, nothing = (torch.zeros_like(z, requires_grad=False) for _ in range(3))
    for _ in range(4):
        grad = torch.randn(50, dtype=torch.float64, generator=generator)
        state = optimizer.state[z] or {"exp_avg": nothing, "exp_avg_sq": nothing, "step": 0}
        options = {"step": state["step"], "lr": 0.01, "weight_decay": 0.01}
        avgpipe_ext.trial_adam_(x, z, grad, state["exp_avg"], state["exp_avg_sq"], told, **options)
        z.grad = -told
        optimizer.step()
        torch.testing.assert_close(x, z.detach(), rtol=1e-13, atol=1e-13)
