"""Slow twins of the operators: the same names and arguments, in plain torch and float64.

They round once, when a result is stored, and check nothing: made for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = "Tensor | Sequence[Tensor]"
# New x and optimizer state from the old ones and the gradient, all float64.
Step: TypeAlias = Callable[[Tensor, Tensor, "list[Tensor]"], "tuple[Tensor, list[Tensor]]"]


def _list(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _tuples(*arguments: Tensors) -> Iterator[tuple[Tensor, ...]]:
    """The arguments' tensors, tuple by tuple."""
    return zip(*map(_list, arguments))


def _count(lost: list[Tensor], like: Tensors, check_finite: bool) -> Tensor:
    """How many elements of the masks are set, as the operators say it."""
    device = next((t.device for t in _list(like)), torch.device("cpu"))
    if not check_finite:
        return torch.empty(0, dtype=torch.int64, device=device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for mask in lost:
        total += mask.sum()
    return total


def _follow_rule(
    before: Tensor,
    after: Tensor,
    z: Tensor,
    alpha: float,
    staleness: int,
    from_step: float = 1.0,
    from_force: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """What the rule makes of a step from before to after: the new x, and what the update grows by."""
    force = alpha * ((before if staleness == 1 else after) - z)
    return after - force, from_step * (after - before) + from_force * force


def _store(x: Tensor, update: Tensor, new_x: Tensor, grown: Tensor, accumulate: bool) -> Tensor:
    """Write x and update; returns the mask of the elements that are not finite."""
    update.copy_(update.double() + grown if accumulate else grown)
    x.copy_(new_x)
    return ~(x.isfinite() & update.isfinite())


def _gradient(grad: Tensor, x: Tensor, grad_scale: Tensor | None, maximize: bool, decay: float) -> Tensor:
    """The gradient of what is minimised, with `decay` x added."""
    unscaled = grad if grad_scale is None else grad / grad_scale.double()
    signed = -unscaled if maximize else unscaled
    return signed + decay * x if decay != 0 else signed


def _sgd(
    lr: float,
    mu: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first_step: bool,
    grad_scale: Tensor | None,
) -> Step:
    """The algorithm in the documentation of `torch.optim.SGD`."""

    def step(x: Tensor, grad: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        g = _gradient(grad, x, grad_scale, maximize, weight_decay)
        if mu == 0:
            return x - lr * g, state
        momentum = g if first_step else mu * state[0] + (1 - dampening) * g
        return x - lr * (g + mu * momentum if nesterov else momentum), [momentum]

    return step


def _adam(
    count: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    grad_scale: Tensor | None,
) -> Step:
    """The algorithms in the documentation of `torch.optim.AdamW` and, unless decoupled, `torch.optim.Adam`."""

    def step(x: Tensor, grad: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        g = _gradient(grad, x, grad_scale, maximize, 0.0 if decoupled else weight_decay)
        if decoupled and weight_decay != 0:
            x = x - lr * weight_decay * x
        first = beta1 * state[0] + (1 - beta1) * g
        second = beta2 * state[1] + (1 - beta2) * g * g
        unbiased = first / (1 - beta1**count)
        return x - lr * unbiased / ((second / (1 - beta2**count)).sqrt() + eps), [first, second]

    return step


def _number(step: Tensor | float) -> float:
    return float(step.item()) if isinstance(step, Tensor) else float(step)


def _unless(found_inf: Tensor | None, step: Step) -> Step:
    """The step, or none where an infinite gradient was found."""
    if found_inf is None or found_inf.item() == 0:
        return step
    return lambda x, grad, state: (x, state)


def _optimize(step: Step, x: Tensor, grad: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """x before and after the step, in float64; the state is stored."""
    before = x.double()
    after, new_state = step(before, grad.double(), [s.double() for s in state])
    for stored, value in zip(state, new_state):
        stored.copy_(value)
    return before, after


@torch.no_grad()
def elastic_pull_(x: Tensors, z: Tensors, alpha: float, *, check_finite: bool = False) -> Tensor:
    """x += alpha (z - x). See `avgpipe_ext.elastic_pull_`."""
    lost = []
    for xt, zt in _tuples(x, z):
        xt.copy_(xt.double() + alpha * (zt.double() - xt.double()))
        lost.append(~xt.isfinite())
    return _count(lost, x, check_finite)


@torch.no_grad()
def elastic_step_(
    x: Tensors,
    x_before: Tensors,
    z: Tensors,
    update: Tensors,
    alpha: float,
    staleness: int,
    *,
    from_step: float = 1.0,
    from_force: float = 0.0,
    accumulate: bool = True,
    check_finite: bool = False,
) -> Tensor:
    """update += x - x_before, then the elastic force. See `avgpipe_ext.elastic_step_`."""
    lost = []
    for xt, bt, zt, ut in _tuples(x, x_before, z, update):
        new = _follow_rule(bt.double(), xt.double(), zt.double(), alpha, staleness, from_step, from_force)
        lost.append(_store(xt, ut, *new, accumulate))
    return _count(lost, x, check_finite)


@torch.no_grad()
def easgd_step_(
    x: Tensors,
    z: Tensors,
    update: Tensors,
    alpha: float,
    *,
    from_force: float = 1.0,
    accumulate: bool = True,
    check_finite: bool = False,
) -> Tensor:
    """e = alpha (x - z); x -= e; update += e. See `avgpipe_ext.easgd_step_`."""
    lost = []
    for xt, zt, ut in _tuples(x, z, update):
        new = _follow_rule(xt.double(), xt.double(), zt.double(), alpha, 0, 0.0, from_force)
        lost.append(_store(xt, ut, *new, accumulate))
    return _count(lost, x, check_finite)


@torch.no_grad()
def elastic_sgd_(
    x: Tensors,
    grad: Tensors,
    momentum: Tensors | None,
    z: Tensors,
    update: Tensors,
    alpha: float,
    staleness: int,
    *,
    lr: float,
    mu: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    first_step: bool = False,
    from_step: float = 1.0,
    from_force: float = 0.0,
    accumulate: bool = True,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    check_finite: bool = False,
) -> Tensor:
    """SGD's step, then the averaging rule. See `avgpipe_ext.elastic_sgd_`."""
    sgd = _sgd(lr, mu, dampening, weight_decay, nesterov, maximize, first_step, grad_scale)
    lost = []
    for xt, gt, zt, ut, *state in _tuples(x, grad, z, update, *([] if momentum is None else [momentum])):
        before, after = _optimize(_unless(found_inf, sgd), xt, gt, state)
        new = _follow_rule(before, after, zt.double(), alpha, staleness, from_step, from_force)
        lost.append(_store(xt, ut, *new, accumulate))
    return _count(lost, x, check_finite)


@torch.no_grad()
def elastic_adamw_(
    x: Tensors,
    grad: Tensors,
    exp_avg: Tensors,
    exp_avg_sq: Tensors,
    z: Tensors,
    update: Tensors,
    alpha: float,
    staleness: int,
    *,
    step: Tensor | float,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    decoupled: bool = True,
    maximize: bool = False,
    from_step: float = 1.0,
    from_force: float = 0.0,
    accumulate: bool = True,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    check_finite: bool = False,
) -> Tensor:
    """AdamW's or Adam's step, then the averaging rule. See `avgpipe_ext.elastic_adamw_`."""
    adam = _adam(_number(step), lr, beta1, beta2, eps, weight_decay, decoupled, maximize, grad_scale)
    lost = []
    for xt, gt, zt, ut, *state in _tuples(x, grad, z, update, exp_avg, exp_avg_sq):
        before, after = _optimize(_unless(found_inf, adam), xt, gt, state)
        new = _follow_rule(before, after, zt.double(), alpha, staleness, from_step, from_force)
        lost.append(_store(xt, ut, *new, accumulate))
    return _count(lost, x, check_finite)


@torch.no_grad()
def elastic_round_(
    xs: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    z: Tensors,
    alpha: float,
    *,
    optimizer: str,
    lr: float,
    step: Tensor | float = 1.0,
    mu: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    first_step: bool = False,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    check_finite: bool = False,
) -> Tensor:
    """All replicas' steps, z += their mean, all pulls. See `avgpipe_ext.elastic_round_`.

    x is rounded twice, as stored before and after the pull; the pull goes to z as stored.
    """
    if optimizer == "sgd":
        rule = _sgd(lr, mu, dampening, weight_decay, nesterov, maximize, first_step, grad_scale)
    else:
        decoupled = optimizer == "adamw"
        rule = _adam(_number(step), lr, beta1, beta2, eps, weight_decay, decoupled, maximize, grad_scale)
    rule = _unless(found_inf, rule)
    lost = []
    tensors = _list(z)
    for t, zt in enumerate(tensors):
        replicas = range(t, len(xs), len(tensors))
        total = zt.double()
        for i in replicas:
            before, after = _optimize(rule, xs[i], grads[i], states[i :: len(xs)])
            moved = total + (after - before) / len(replicas)
            xs[i].copy_(after)
            keeps = moved.to(zt.dtype).isfinite()
            lost.append(~(keeps & xs[i].isfinite()))
            total = torch.where(keeps, moved, total) if check_finite else moved
        zt.copy_(total)
        for i in replicas:
            xs[i].copy_(xs[i].double() + alpha * (zt.double() - xs[i].double()))
    return _count(lost, tensors, check_finite)


@torch.no_grad()
def reference_apply_(
    z: Tensors, update: Tensors, scale: float, *, zero: bool = True, check_finite: bool = False
) -> Tensor:
    """z += scale * update for each replica's update; update = 0. See `avgpipe_ext.reference_apply_`."""
    lost = []
    tensors, updates = _list(z), _list(update)
    for t, zt in enumerate(tensors):
        total = zt.double()
        for ut in updates[t :: len(tensors)]:
            moved = total + scale * ut.double()
            keeps = moved.to(zt.dtype).isfinite()
            lost.append(~keeps)
            total = torch.where(keeps, moved, total) if check_finite else moved
            if zero:
                ut.zero_()
        zt.copy_(total)
    return _count(lost, tensors, check_finite)


def _try(step: Step, x: Tensors, z: Tensors, grad: Tensors, update: Tensors, *state: Tensors) -> list[Tensor]:
    """x = the step from z, update = -grad; returns masks of the elements that are not finite."""
    lost = []
    for xt, zt, gt, ut, *states in _tuples(x, z, grad, update, *state):
        new, _ = step(zt.double(), gt.double(), [s.double() for s in states])
        lost.append(_store(xt, ut, new, -gt.double(), accumulate=False))
    return lost


@torch.no_grad()
def trial_sgd_(
    x: Tensors,
    z: Tensors,
    grad: Tensors,
    momentum: Tensors | None,
    update: Tensors,
    *,
    lr: float,
    mu: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    maximize: bool = False,
    first_step: bool = False,
    check_finite: bool = False,
) -> Tensor:
    """x = SGD's step from z, whose state stays; update = -grad. See `avgpipe_ext.trial_sgd_`."""
    sgd = _sgd(lr, mu, dampening, weight_decay, nesterov, maximize, first_step, None)
    lost = _try(sgd, x, z, grad, update, *([] if momentum is None else [momentum]))
    return _count(lost, x, check_finite)


@torch.no_grad()
def trial_adam_(
    x: Tensors,
    z: Tensors,
    grad: Tensors,
    exp_avg: Tensors,
    exp_avg_sq: Tensors,
    update: Tensors,
    *,
    step: Tensor | float,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    maximize: bool = False,
    check_finite: bool = False,
) -> Tensor:
    """x = AdamW's or Adam's step from z, whose state stays; update = -grad. See `avgpipe_ext.trial_adam_`."""
    adam = _adam(_number(step) + 1, lr, beta1, beta2, eps, weight_decay, decoupled, maximize, None)
    return _count(_try(adam, x, z, grad, update, exp_avg, exp_avg_sq), x, check_finite)


@torch.no_grad()
def predict_sgd_(
    out: Tensors, x: Tensors, momentum: Tensors, scale: float, *, check_finite: bool = False
) -> Tensor:
    """out = x - scale * momentum. See `avgpipe_ext.predict_sgd_`."""
    lost = []
    for ot, xt, mt in _tuples(out, x, momentum):
        ot.copy_(xt.double() - scale * mt.double())
        lost.append(~ot.isfinite())
    return _count(lost, out, check_finite)


@torch.no_grad()
def predict_adam_(
    out: Tensors,
    x: Tensors,
    exp_avg: Tensors,
    exp_avg_sq: Tensors,
    *,
    updates: float,
    step: Tensor | float,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    check_finite: bool = False,
) -> Tensor:
    """So many of Adam's steps with its state as it is. See `avgpipe_ext.predict_adam_`."""
    lost, count = [], _number(step)
    for ot, xt, mt, vt in _tuples(out, x, exp_avg, exp_avg_sq):
        mean, square = mt.double() / (1 - beta1**count), vt.double() / (1 - beta2**count)
        decayed = xt.double() * (1 - lr * weight_decay) ** updates
        ot.copy_(decayed - updates * lr * mean / (square.sqrt() + eps))
        lost.append(~ot.isfinite())
    return _count(lost, out, check_finite)


@torch.no_grad()
def correct_update_(
    x: Tensors,
    before: Tensors,
    last: Tensors,
    momentum: float,
    gain: float,
    first: bool = False,
    *,
    check_finite: bool = False,
) -> Tensor:
    """x = before + v + gain * (v - last), of averaged steps v. See `avgpipe_ext.correct_update_`."""
    lost = []
    for xt, bt, lt in _tuples(x, before, last):
        old = torch.zeros_like(lt, dtype=torch.float64) if first else lt.double()
        v = momentum * old + (1 - momentum) * (xt.double() - bt.double())
        difference = torch.zeros_like(v) if first and momentum == 0 else v - old
        xt.copy_(bt.double() + v + gain * difference)
        lt.copy_(v)
        lost.append(~xt.isfinite())
    return _count(lost, x, check_finite)


@torch.no_grad()
def pack(tensors: Sequence[Tensor], dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """The tensors' elements in one buffer. See `avgpipe_ext.pack`."""
    if out is not None:
        return out.copy_(pack(tensors, out.dtype))
    to = dtype or (tensors[0].dtype if tensors else torch.get_default_dtype())
    parts = [t.double().reshape(-1).to(to) for t in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=to)


@torch.no_grad()
def unpack_(buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    """The buffer's elements back into the tensors, in place. See `avgpipe_ext.unpack_`."""
    begin = 0
    for tensor in tensors:
        tensor.copy_(buffer[begin : begin + tensor.numel()].double().reshape(tensor.shape))
        begin += tensor.numel()
