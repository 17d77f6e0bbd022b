"""The fused operators against torch.optim's own step followed by the separate rules."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import avgpipe_ext
from tests.avgpipe_ext.cases import (
    EASGD_RULE,
    FLOATS,
    OPTIMIZERS,
    PREDICT_ADAM,
    SIXTEEN_BIT,
    TRIAL_ADAM,
    adam,
    arguments,
    bounds,
    copies,
    rule_options,
    sgd,
)
from tests.avgpipe_ext.rounding import assert_within
from tests.avgpipe_ext.torch_steps import torch_optimizer, torch_step

WAYS = ({"foreach": True}, {"foreach": False}, {"fused": True})
STEPS = (
    *OPTIMIZERS,
    sgd("first", lr=0.1, mu=0.9, nesterov=True, first_step=True),
    sgd("dampened", lr=0.5, mu=0.5, dampening=0.5, weight_decay=0.1, maximize=True, accumulate=False),
    adam("maximized-first", step=1, lr=1e-3, maximize=True, weight_decay=0.1),
    adam("coupled-easgd", step=1000, lr=0.1, decoupled=False, weight_decay=0.01, **EASGD_RULE),
    adam("betas", step=2, lr=0.01, beta1=0.6, beta2=0.8, eps=1e-3, weight_decay=0.0, staleness=1),
)
EVERY_STEP = pytest.mark.parametrize("case", STEPS, ids=str)
EVERY_WAY = pytest.mark.parametrize("how", WAYS, ids=str)
# Our chain's error and torch's. Torch makes the same operations, some of them in another order (lerp, addcdiv) and its
# square roots with an error of up to a whole unit, so its chain counts twice.
TIMES = 3


def separately(case, tensors, how):
    """torch's step, then the separate operator of the rule; in place."""
    x, grad, *state, z, update = tensors
    before = x.clone()
    torch_step(case, x, grad, state, **how)
    avgpipe_ext.elastic_step_(x, before, z, update, *case.scalars, **rule_options(case.options))


@pytest.mark.grid
@EVERY_STEP
@EVERY_WAY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equals_torchs_step_and_the_rule(case, how, dtype):
    tensors = arguments(case, (1003,), dtype)
    limits = bounds(case, tensors)
    theirs = copies(tensors)
    separately(case, theirs, how)
    case.operator(*tensors, *case.scalars)
    for ours, value, limit in zip(tensors, theirs, limits):
        assert bool(limit.fits.all())
        assert_within(ours, value, limit, TIMES)


# On the CPU, torch's fused SGD leaves 16-bit parameters as they are (torch 2.13).
WORKING = [(case, how) for case in STEPS for how in WAYS if "fused" not in how or case.name != "elastic_sgd_"]


@pytest.mark.grid
@pytest.mark.parametrize(("case", "how"), WORKING, ids=str)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_16_bit_parameters_are_as_near_as_torchs_chain_of_16_bit_operations_may_be_off(case, how, dtype):
    """torch's error is bounded by the same chain in 16-bit arithmetic; ours is at most that."""
    tensors = arguments(case, (1003,), dtype)
    limits = bounds(case, tensors, arithmetic=dtype)
    theirs = copies(tensors)
    separately(case, theirs, how)
    case.operator(*tensors, *case.scalars)
    for ours, value, limit in zip(tensors, theirs, limits):
        assert_within(ours, value, limit, TIMES)


@pytest.mark.grid
@EVERY_STEP
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_float32_masters_beside_16_bit_parameters(case, dtype):
    """torch's step in float32 on the widened weights; all that is rounded to 16 bits is the new x."""
    tensors = arguments(case, (1003,), [dtype] + [torch.float32] * (len(case.tensors) - 1))
    limits = bounds(case, tensors)
    theirs = [t.float() for t in copies(tensors)]
    separately(case, theirs, {"foreach": True})
    case.operator(*tensors, *case.scalars)
    assert tensors[0].dtype == dtype
    for ours, value, limit in zip(tensors, theirs, limits):
        assert_within(ours, value, limit, TIMES)


@EVERY_STEP
@pytest.mark.parametrize("scale", [1024.0, 3.0])
def test_grad_scale_is_gradscalers_unscale_bit_for_bit_in_float32(case, scale):
    tensors = arguments(case, (1003,), torch.float32)
    unscaled, grad = copies(tensors), tensors[1].clone()
    found, reciprocal = torch.zeros(1), torch.tensor(scale).double().reciprocal().float()
    torch._amp_foreach_non_finite_check_and_unscale_([unscaled[1]], found, reciprocal)
    case.operator(*unscaled, *case.scalars)
    case.operator(*tensors, *case.scalars, grad_scale=torch.tensor(scale), found_inf=found)
    assert torch.equal(tensors[1], grad)
    del tensors[1], unscaled[1]
    assert all(torch.equal(a, b) for a, b in zip(tensors, unscaled))


@pytest.mark.grid
@EVERY_STEP
@pytest.mark.parametrize("scale", [1024.0, 3.0])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_grad_scale_multiplies_by_the_reciprocal(case, scale, dtype):
    tensors = arguments(case, (1003,), dtype)
    optimizer = partial(case.formula.keywords["optimizer"], grad_scale=scale)
    limits = bounds(replace(case, formula=partial(case.formula, optimizer=optimizer)), tensors)
    expected = [t.double() if dtype != torch.float64 else t.clone() for t in tensors]
    case.twin(*expected, *case.scalars, grad_scale=torch.tensor(scale))
    case.operator(*tensors, *case.scalars, grad_scale=torch.tensor([scale]))
    for ours, value, limit in zip(tensors, expected, limits):
        assert_within(ours, value, limit, times=2 if dtype == torch.float64 else 1)


@pytest.mark.grid
@EVERY_STEP
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=str)
def test_found_inf_leaves_out_the_step_and_keeps_the_rule(case, dtype, bad):
    tensors = arguments(case, (1003,), dtype)
    tensors[1][::7] = bad
    x, _, *state, z, update = copies(tensors)
    scaling = {"grad_scale": torch.tensor(bad), "found_inf": torch.tensor([1.0])}
    assert case.operator(*tensors, *case.scalars, check_finite=True, **scaling).item() == 0
    avgpipe_ext.elastic_step_(x, x.clone(), z, update, *case.scalars, **rule_options(case.options))
    kept = [x, *state, z, update]
    assert all(torch.equal(a, b) for a, b in zip(tensors[:1] + tensors[2:], kept))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_not_accumulated_is_not_read(dtype):
    for case in STEPS:
        quiet, loud = arguments(case, (600,), dtype), arguments(case, (600,), dtype)
        quiet[-1].zero_()
        loud[-1].fill_(float("nan"))
        case.operator(*quiet, *case.scalars, accumulate=False)
        assert case.operator(*loud, *case.scalars, accumulate=False, check_finite=True).item() == 0
        assert all(torch.equal(a, b) for a, b in zip(quiet, loud))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_first_step_does_not_read_the_momentum(dtype):
    case = next(case for case in STEPS if case.options.get("first_step"))
    quiet, loud = arguments(case, (600,), dtype), arguments(case, (600,), dtype)
    loud[2].fill_(float("nan"))
    case.operator(*quiet, *case.scalars)
    assert case.operator(*loud, *case.scalars, check_finite=True).item() == 0
    assert all(torch.equal(a, b) for a, b in zip(quiet, loud))


def follow_torch(case, dtype, states, changing):
    """20 steps of both on the same gradients: x and state, ours and theirs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, dtype=dtype, generator=generator)
    z, state = x.clone(), [torch.zeros_like(x) for _ in states]
    optimizer, theirs = torch_optimizer(case, x.clone(), copies(state))
    if states == ("momentum_buffer",):
        optimizer.state.clear()  # torch makes it in the first step
    for step in range(1, 21):
        grad = torch.randn(300, dtype=dtype, generator=generator)
        theirs.grad = grad.clone()
        optimizer.step()
        case.operator(x, grad, *state, z, torch.zeros_like(x), 0.0, 0, **changing(step))
    return [x, *state], [theirs.detach(), *(optimizer.state[theirs][name] for name in states)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_many_steps_follow_torch_from_the_first_on(dtype):
    """20 chains of at most 20 roundings each, of numbers around 1."""
    near = {"rtol": 0, "atol": 400 * torch.finfo(dtype).eps}
    momentum, adams = ("momentum_buffer",), ("exp_avg", "exp_avg_sq")
    sgds = follow_torch(sgd(lr=0.1, mu=0.9), dtype, momentum, lambda step: {"first_step": step == 1})
    adams = follow_torch(adam(lr=0.01, step=1), dtype, adams, lambda step: {"step": step})
    for ours, theirs in (*zip(*sgds), *zip(*adams)):
        torch.testing.assert_close(ours, theirs, **near)


@pytest.mark.parametrize("case", [adam(lr=0.1, step=5), PREDICT_ADAM, TRIAL_ADAM], ids=str)
def test_step_may_be_a_tensor(case):
    numbers = arguments(case, (9,), torch.float32)
    for step in (torch.tensor(5.0), torch.tensor([5.0], dtype=torch.float64), 5.0):
        again = arguments(case, (9,), torch.float32)
        case.operator(*again, *case.scalars, step=step)
        fresh = copies(numbers)
        case.operator(*fresh, *case.scalars)
        assert all(torch.equal(a, b) for a, b in zip(again, fresh))
