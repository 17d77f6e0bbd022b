"""The operators' formulas as chains of operations, for float32 tensors, which then round as the kernels do, and for
`Rounded` numbers, which tell how far such a chain may be off.

`longest` counts the roundings on the longest way of a value to a result, constants included: to first order, the
error of a result is at most longest * eps/2 * (the sum of its terms' magnitudes), where no quotient is involved.
"""

from __future__ import annotations

import math

import torch

from tests.avgpipe_ext.rounding import plus_nothing_of, zero_of


def root(value):
    """Correctly rounded, which torch's own float32 roots are not: through float64, which has enough digits."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        return value.double().sqrt().float()
    return value.sqrt()


def pull(x, z, alpha):
    """longest 4: alpha, -, *, +."""
    return x + alpha * (z - x)


def step(x, x_before, z, update, alpha, staleness, accumulate=True, from_step=1.0, from_force=0.0):
    """longest 4 of x; of the update 2 with the step alone, 4 with the force alone, else 6: products with 0 and 1, and
    sums with 0, are exact."""
    step, force = x - x_before, alpha * (z - (x_before if staleness else x))
    if from_force == 0:
        grown = plus_nothing_of(step if from_step == 1 else from_step * step, force)
    elif from_step == 0:
        grown = plus_nothing_of(-force if from_force == 1 else from_force * -force, step)
    else:
        grown = from_step * step - from_force * force
    return x + force, update + grown if accumulate else grown


def easgd(x, z, update, alpha, accumulate=True):
    """longest 4."""
    return step(x, x, z, update, alpha, 0, accumulate, 0.0, 1.0)


def apply(z, updates, scale):
    """longest 3 with one update (scale, *, +), then one more for each."""
    for update in updates:
        z = z + scale * update
    return z


def gradient(x, grad, weight_decay, maximize, grad_scale):
    """longest 4: 1/scale, *, then weight_decay's +."""
    signed = (-1.0 if maximize else 1.0) / grad_scale
    g = grad * signed if signed != 1 else grad
    return g + weight_decay * x if weight_decay else g


def sgd(
    x,
    grad,
    state,
    *,
    lr,
    mu=0.0,
    dampening=0.0,
    weight_decay=0.0,
    nesterov=False,
    maximize=False,
    first_step=False,
    grad_scale=1.0,
):
    """The step. longest 4 of the gradient, 3 of the momentum, 3 of Nesterov's, 3 with lr: 13."""
    g = gradient(x, grad, weight_decay, maximize, grad_scale)
    if not mu:
        return x - lr * g, []
    momentum = g if first_step else mu * state[0] + (1 - dampening) * g
    return x - lr * (g + mu * momentum if nesterov else momentum), [momentum]


def adam(
    x,
    grad,
    state,
    *,
    step,
    lr,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weight_decay=1e-2,
    decoupled=True,
    maximize=False,
    grad_scale=1.0,
):
    """The step. longest 4 of the gradient and 4 of `first` over 4 of `second`, sqrt, 3 of the rest; /, lr, *, -: 20."""
    first, second = state
    g = gradient(x, grad, 0.0 if decoupled else weight_decay, maximize, grad_scale)
    first = first + (1 - beta1) * (g - first)
    second = beta2 * second + (1 - beta2) * g * g
    decay = weight_decay if decoupled else 0.0
    return predict_adam(x, first, second, 1, step, lr, beta1, beta2, eps, decay), [first, second]


def predict_adam(x, first, second, updates, step, lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
    """longest 8: sqrt, unbias, *, + below, then /, lr, *, -."""
    unbias = 1 / math.sqrt(1 - beta2**step)
    factor = lr * updates / (1 - beta1**step)
    decayed = (1 - lr * weight_decay) ** updates * x if weight_decay else x
    return decayed - factor * (first / (root(second) * unbias + eps))


def predict_sgd(x, momentum, scale):
    """longest 3: scale, *, -."""
    return x - scale * momentum


def correct(x, before, last, momentum, gain, first=False):
    """longest 4 of v: -, 1 - momentum, *, +; of x then -, gain, *, +, -: 9."""
    step = x - before
    if first:
        last, gain = zero_of(last), gain if momentum else 0.0
    v = momentum * last + (1 - momentum) * step
    return x - ((step - v) + gain * (last - v)), v


def round_(optimizer, xs, grads, states, z, alpha, store_x=lambda x: x, store_z=lambda z: z):
    """A round of N replicas. longest: the step's, then -, 1/N, *, and + for each replica; then a pull."""
    replicas, news, new_states = len(xs), [], []
    for i, (x, grad) in enumerate(zip(xs, grads)):
        new, state = optimizer(x, grad, states[i::replicas])
        z = z + 1 / replicas * (new - x)
        news.append(store_x(new))
        new_states.append(state)
    z = store_z(z)
    kinds = [state for kind in zip(*new_states) for state in kind]
    return [pull(x, z, alpha) for x in news], kinds, z
