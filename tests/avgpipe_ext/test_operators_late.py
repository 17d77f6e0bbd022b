"""What the operators for late gradients are for: predictions and corrections against torch's own optimizers."""

from __future__ import annotations

import math

import pytest
import torch

import avgpipe_ext
from tests.avgpipe_ext import reference
from tests.avgpipe_ext.cases import (
    CORRECT,
    FLOATS,
    PREDICTIONS,
    SIXTEEN_BIT,
    arguments,
    copies,
    correct,
)

WIDE = torch.float64
# Chains of some ten roundings of numbers around 1.
NEAR = {"rtol": 1e-13, "atol": 1e-13}
BOTH = pytest.mark.parametrize("face", [avgpipe_ext, reference], ids=["operator", "twin"])


def trained(optimizer_class, steps=4, **options):
    """A parameter after some steps on random gradients, its optimizer and the state of it."""
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(50, dtype=WIDE, generator=generator))
    optimizer = optimizer_class([parameter], **options)
    for _ in range(steps):
        parameter.grad = torch.randn(50, dtype=WIDE, generator=generator)
        optimizer.step()
    return parameter.detach(), optimizer, optimizer.state[parameter]


# ---- predictions -------------------------------------------------------------------------------------------
@BOTH
def test_a_prediction_by_sgd_is_where_as_many_steps_like_the_last_lead(face):
    x, _, state = trained(torch.optim.SGD, lr=0.1, momentum=0.9)
    out = torch.empty_like(x)
    face.predict_sgd_(out, x, state["momentum_buffer"], 3 * 0.1)
    expected = x.clone()
    for _ in range(3):
        expected -= 0.1 * state["momentum_buffer"]
    torch.testing.assert_close(out, expected, **NEAR)


@BOTH
@pytest.mark.parametrize("updates", [1, 2, 5])
def test_a_prediction_by_sgd_without_gradients_is_where_sgd_goes_without_them(face, updates):
    x, optimizer, state = trained(torch.optim.SGD, lr=0.1, momentum=0.9)
    out = torch.empty_like(x)
    scale = 0.1 * 0.9 * (1 - 0.9**updates) / (1 - 0.9)
    face.predict_sgd_(out, x, state["momentum_buffer"], scale)
    (parameter,) = optimizer.param_groups[0]["params"]
    for _ in range(updates):
        parameter.grad = torch.zeros_like(x)
        optimizer.step()
    torch.testing.assert_close(out, parameter.detach(), **NEAR)


@BOTH
@pytest.mark.parametrize(
    ("kind", "decay", "kept"), [(torch.optim.Adam, 0.1, 0.0), (torch.optim.AdamW, 0.1, 0.1)]
)
def test_a_prediction_of_one_update_is_the_step_that_ends_in_this_state(face, kind, decay, kept):
    x, optimizer, _ = trained(kind, lr=0.01, weight_decay=decay)
    (parameter,) = optimizer.param_groups[0]["params"]
    before, out = x.clone(), torch.empty_like(x)
    parameter.grad = torch.linspace(-1, 1, 50, dtype=WIDE)
    optimizer.step()
    state = optimizer.state[parameter]
    moments = state["exp_avg"], state["exp_avg_sq"]
    face.predict_adam_(out, before, *moments, updates=1, step=state["step"], lr=0.01, weight_decay=kept)
    torch.testing.assert_close(out, parameter.detach(), **NEAR)


@BOTH
def test_a_prediction_by_adamw_decays_once_for_each_update(face):
    x, _, state = trained(torch.optim.AdamW, lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3)
    out = torch.empty_like(x)
    options = {"step": 4, "lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1}
    face.predict_adam_(out, x, state["exp_avg"], state["exp_avg_sq"], updates=3, **options)
    mean = state["exp_avg"] / (1 - 0.8**4)
    root = (state["exp_avg_sq"] / (1 - 0.95**4)).sqrt()
    torch.testing.assert_close(out, x * (1 - 0.01 * 0.1) ** 3 - 3 * 0.01 * mean / (root + 1e-3), **NEAR)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_prediction_of_no_update_is_the_weights(dtype):
    out, x, *state = arguments(PREDICTIONS[1], (1003,), dtype)
    avgpipe_ext.predict_adam_(out, x, *state, updates=0, step=5, lr=0.1, weight_decay=0.1)
    assert torch.equal(out, x)
    avgpipe_ext.predict_sgd_(out.zero_(), x, state[0], 0.0)
    assert torch.equal(out, x)


@pytest.mark.parametrize("case", PREDICTIONS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_a_prediction_overwrites_is_not_read(case, dtype):
    quiet, loud = arguments(case, (600,), dtype), arguments(case, (600,), dtype)
    loud[0].fill_(math.nan)
    case.operator(*quiet, *case.scalars)
    assert case.operator(*loud, *case.scalars, check_finite=True).item() == 0
    assert all(torch.equal(a, b) for a, b in zip(quiet, loud))


@pytest.mark.parametrize("case", PREDICTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_predictions_larger_than_the_caches_are_those_of_their_parts(case, dtype):
    """From 8 MiB on, a CPU writes them past its caches."""
    whole = arguments(case, (3 * 2**21 + 5,), dtype)
    parts = [t.clone().split(10**6) for t in whole]
    case.operator(*whole, *case.scalars)
    for part in zip(*parts):
        case.operator(*part, *case.scalars)
    assert torch.equal(whole[0], torch.cat(parts[0]))


@pytest.mark.parametrize("case", PREDICTIONS, ids=str)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_a_16_bit_prediction_of_float32_weights_is_rounded_once(case, dtype):
    out, *rest = arguments(case, (1003,), [dtype] + [torch.float32] * (len(case.tensors) - 1))
    wide = torch.empty_like(rest[0])
    case.operator(out, *rest, *case.scalars)
    case.operator(wide, *rest, *case.scalars)
    assert torch.equal(out, wide.to(dtype))


# ---- corrections -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_without_momentum_and_gain_weights_stay_bit_for_bit(dtype):
    x, before, last = arguments(CORRECT, (1003,), dtype)
    x[::5], x[1::5] = 0.0, -0.0
    before[2::5] = x[2::5]
    old = x.clone()
    avgpipe_ext.correct_update_(x, before, last, 0.0, 0.0)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    assert torch.equal(x.view(bits), old.view(bits))
    assert torch.equal(last, x - before)


@BOTH
def test_error_feedback_adds_the_difference_of_two_updates(face):
    generator = torch.Generator().manual_seed(0)
    x, last = torch.randn(50, dtype=WIDE, generator=generator), torch.full((50,), math.nan, dtype=WIDE)
    updates = [torch.randn(50, dtype=WIDE, generator=generator) for _ in range(5)]
    expected = x.clone()
    for t, update in enumerate(updates):
        expected += update + (0.5 * (update - updates[t - 1]) if t else 0.0)
        before = x.clone()
        x += update
        face.correct_update_(x, before, last, 0.0, 0.5, first=t == 0)
    torch.testing.assert_close(x, expected, **NEAR)


@BOTH
def test_momentum_as_gain_is_nesterovs_look_ahead(face):
    """Nesterov's two sequences: y goes by the updates' average, and x is y moved on by the last difference of y."""
    generator = torch.Generator().manual_seed(0)
    gamma, expected = 0.9, torch.randn(50, dtype=WIDE, generator=generator)
    x, last = expected.clone(), torch.full((50,), math.nan, dtype=WIDE)
    average = torch.zeros_like(x)
    for t in range(5):
        update = torch.randn(50, dtype=WIDE, generator=generator)
        older, average = average, gamma * average + (1 - gamma) * update
        expected += average + gamma * (average - older)
        before = x.clone()
        x += update
        face.correct_update_(x, before, last, gamma, gamma, t == 0)
        torch.testing.assert_close(last, average, **NEAR)
    torch.testing.assert_close(x, expected, **NEAR)


@pytest.mark.parametrize("case", [correct("", 0.0, 1.0), correct("", 0.9, 0.9)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_first_correction_does_not_read_the_last_one(case, dtype):
    quiet, loud = arguments(case, (600,), dtype), arguments(case, (600,), dtype)
    loud[2].fill_(math.nan)
    case.operator(*quiet, *case.scalars, first=True)
    assert case.operator(*loud, *case.scalars, first=True, check_finite=True).item() == 0
    assert all(torch.equal(a, b) for a, b in zip(quiet, loud))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_first_correction_by_error_feedback_is_none(dtype):
    x, before, last = arguments(CORRECT, (1003,), dtype)
    old = x.clone()
    avgpipe_ext.correct_update_(x, before, last, 0.0, 1.0, first=True)
    assert torch.equal(x, old)
    assert torch.equal(last, x - before)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_a_float32_last_update_keeps_what_16_bits_lose(dtype):
    x, before, last = arguments(CORRECT, (1003,), (dtype, dtype, torch.float32))
    masters = copies((x.float(), before.float(), last))
    avgpipe_ext.correct_update_(x, before, last, 0.5, 0.5)
    avgpipe_ext.correct_update_(*masters, 0.5, 0.5)
    assert torch.equal(x, masters[0].to(dtype))
    assert torch.equal(last, masters[2])
