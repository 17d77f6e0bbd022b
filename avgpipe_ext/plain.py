"""The operators in plain torch, for accelerators without kernels in the library: slower, with the same numbers.

The arithmetic is that of csrc/elastic/element.h, operation by operation, in float32 (float64 for float64
tensors), so that devices with IEEE 754 rounding give the same bits. Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor

# Device types that torch knows, and those of plug-ins; a key without tensors is never used.
KEYS = ("XPU", "MPS", "MTIA", "HPU", "IPU", "VE", "XLA", "PrivateUse1")

Settings: TypeAlias = SimpleNamespace  # an operator's arguments by name, and derived values
Lost: TypeAlias = "Iterator[Tensor | None]"  # masks of elements that are not finite; None if not requested
State: TypeAlias = "list[Tensor]"


def plain_kernel(name: str, overload: Any, check: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an operator in plain torch. ``check`` checks its arguments, and makes its empty result."""
    arguments = overload._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    body = _BODIES[name]

    @torch.no_grad()
    def kernel(*values: Any, **options: Any) -> Tensor:
        result = check(*values, **options)
        s = Settings(**{**defaults, **{a.name: value for a, value in zip(arguments, values)}, **options})
        total: Tensor | int = 0
        for mask in body(s):
            total = total if mask is None else total + mask.sum()
        return result.fill_(total)

    return kernel


def _listed(value: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value or ())


def _together(*arguments: Any) -> Iterator[tuple[Tensor, ...]]:
    return zip(*map(_listed, arguments), strict=True)


def _wide(tensor: Tensor, x: Tensor) -> Tensor:
    """Return a tensor in the arithmetic's type, which follows from the written tensor ``x``."""
    return tensor.to(_arithmetic(x))


def _arithmetic(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _store(s: Settings, *pairs: tuple[Tensor, Tensor]) -> Tensor | None:
    """Write each value to its tensor; return a mask of elements that are not finite as stored."""
    for tensor, value in pairs:
        tensor.copy_(value)
    return ~_all_finite(*(tensor for tensor, _ in pairs)) if s.check_finite else None


def _all_finite(first: Tensor, *others: Tensor) -> Tensor:
    finite = first.isfinite()
    for tensor in others:
        finite = finite & tensor.isfinite()
    return finite


# ---- optimizers' steps -------------------------------------------------------------------------------------------


def _select(skips: Tensor | None, old: Tensor, new: Tensor) -> Tensor:
    return new if skips is None else torch.where(skips, old, new)


def _gradient(s: Settings, x: Tensor, grad: Tensor, decay: float) -> Tensor:
    """Return the gradient of the minimised loss, with ``decay`` x added."""
    sign = -1.0 if s.maximize else 1.0
    scale = getattr(s, "grad_scale", None)
    g = grad * (sign if scale is None else sign / scale.reshape(()).to(x.dtype))
    return g + decay * x if decay else g


def _sgd(s: Settings, x: Tensor, grad: Tensor, state: State) -> tuple[Tensor, State]:
    g = _gradient(s, x, grad, s.weight_decay)
    if not state:
        return x - s.lr * g, []
    momentum = g if s.first_step else s.mu * state[0] + (1 - s.dampening) * g
    return x - s.lr * (g + s.mu * momentum if s.nesterov else momentum), [momentum]


def _adam(s: Settings, x: Tensor, grad: Tensor, state: State) -> tuple[Tensor, State]:
    g = _gradient(s, x, grad, 0.0 if s.decoupled else s.weight_decay)
    first = state[0] + (1 - s.beta1) * (g - state[0])
    second = s.beta2 * state[1] + (1 - s.beta2) * g * g
    decay = 1.0 - s.lr * s.weight_decay if s.decoupled else 1.0
    return _adam_moved(s, x, first, second, decay, 1.0), [first, second]


def _adam_moved(
    s: Settings, x: Tensor, first: Tensor, second: Tensor, decay: float, updates: float
) -> Tensor:
    step: Any = s.step.reshape(()) if s.step.device.type != "cpu" else float(s.step)
    step = step + getattr(s, "uncounted", 0)
    lr: Any
    unbias: Any
    bias1, bias2 = _bias(s.beta1, step), _bias(s.beta2, step)
    if isinstance(bias2, Tensor):
        lr, unbias = (s.lr * updates / bias1).to(x.dtype), bias2.rsqrt().to(x.dtype)
    else:
        lr, unbias = s.lr * updates / bias1, 1 / math.sqrt(bias2)
    moved: Tensor = decay * x - lr * (first / (second.sqrt() * unbias + s.eps))
    return moved


def _bias(beta: float, step: Any) -> Any:
    """Return 1 - beta^step, for a step on a device, which may lack float64, without loss of precision."""
    if not isinstance(step, Tensor):
        return 1.0 - beta**step
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)


def _optimize(s: Settings, x: Tensor, grad: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Return start and end of the step from x, in the arithmetic's type. The state is stored."""
    found = getattr(s, "found_inf", None)
    skips = None if found is None else found.reshape(()) != 0
    before, old = _wide(x, x), [_wide(t, x) for t in state]
    after, new = s.rule(s, before, _wide(grad, x), old)
    for tensor, was, value in zip(state, old, new):
        tensor.copy_(_select(skips, was, value))
    return before, _select(skips, before, after)


def _follow(
    s: Settings, before: Tensor, after: Tensor, x: Tensor, z: Tensor, update: Tensor
) -> Tensor | None:
    """Apply the averaging rule after a step from ``before`` to ``after``; store x and update."""
    force = s.alpha * (_wide(z, x) - (before if s.staleness else after))
    grown = s.from_step * (after - before) - s.from_force * force
    return _store(s, (x, after + force), (update, (_wide(update, x) if s.accumulate else 0.0) + grown))


# ---- operators ---------------------------------------------------------------------------------------------------


def _elastic_pull(s: Settings) -> Lost:
    for x, z in _together(s.x, s.z):
        old = _wide(x, x)
        yield _store(s, (x, old + s.alpha * (_wide(z, x) - old)))


def _elastic_step(s: Settings) -> Lost:
    for x, before, z, update in _together(s.x, s.x_before, s.z, s.update):
        yield _follow(s, _wide(before, x), _wide(x, x), x, z, update)


def _easgd_step(s: Settings) -> Lost:
    s.x_before, s.staleness, s.from_step = s.x, 0, 0.0
    return _elastic_step(s)


def _elastic_sgd(s: Settings) -> Lost:
    s.rule = _sgd
    return _elastic_optimizer(s, [s.momentum] if _listed(s.momentum) else [])


def _elastic_adamw(s: Settings) -> Lost:
    s.rule = _adam
    return _elastic_optimizer(s, [s.exp_avg, s.exp_avg_sq])


def _elastic_optimizer(s: Settings, states: list[Any]) -> Lost:
    for x, grad, z, update, *state in _together(s.x, s.grad, s.z, s.update, *states):
        before, after = _optimize(s, x, grad, state)
        yield _follow(s, before, after, x, z, update)


def _elastic_round(s: Settings) -> Lost:
    s.rule, s.decoupled = (_sgd if s.optimizer == "sgd" else _adam), s.optimizer == "adamw"
    references, count = _listed(s.z), len(s.xs)
    for t, z in enumerate(references):
        replicas = range(t, count, len(references))
        total = _wide(z, s.xs[t])
        for i in replicas:
            x = s.xs[i]
            before, after = _optimize(s, x, s.grads[i], s.states[i::count])
            total, lost = _added(s, z, total, (after - before) * (1.0 / len(replicas)))
            overflows = _store(s, (x, after))
            yield None if lost is None or overflows is None else lost | overflows
        z.copy_(total)
        for i in replicas:
            old = _wide(s.xs[i], s.xs[i])
            s.xs[i].copy_(old + s.alpha * (_wide(z, s.xs[i]) - old))


def _added(s: Settings, z: Tensor, total: Tensor, part: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the reference plus one part: if requested, without values that would make it not finite."""
    moved = total + part
    if not s.check_finite:
        return moved, None
    keeps = moved.to(z.dtype).isfinite()
    return torch.where(keeps, moved, total), ~keeps


def _reference_apply(s: Settings) -> Lost:
    references, updates = _listed(s.z), _listed(s.update)
    for t, z in enumerate(references):
        total = _wide(z, z)
        for update in updates[t :: len(references)]:
            total, lost = _added(s, z, total, s.scale * _wide(update, z))
            yield lost
            if s.zero:
                update.zero_()
        z.copy_(total)


def _trial_sgd(s: Settings) -> Lost:
    s.rule = _sgd
    return _trial(s, [s.momentum] if _listed(s.momentum) else [])


def _trial_adam(s: Settings) -> Lost:
    s.rule, s.uncounted = _adam, 1
    return _trial(s, [s.exp_avg, s.exp_avg_sq])


def _trial(s: Settings, states: list[Any]) -> Lost:
    for x, z, grad, update, *state in _together(s.x, s.z, s.grad, s.update, *states):
        wide = _wide(grad, x)
        new, _ = s.rule(s, _wide(z, x), wide, [_wide(t, x) for t in state])
        yield _store(s, (x, new), (update, -wide))


def _predict_sgd(s: Settings) -> Lost:
    for out, x, momentum in _together(s.out, s.x, s.momentum):
        yield _store(s, (out, _wide(x, out) - s.scale * _wide(momentum, out)))


def _predict_adam(s: Settings) -> Lost:
    decay = (1.0 - s.lr * s.weight_decay) ** s.updates
    for out, *read in _together(s.out, s.x, s.exp_avg, s.exp_avg_sq):
        x, first, second = (_wide(t, out) for t in read)
        yield _store(s, (out, _adam_moved(s, x, first, second, decay, s.updates)))


def _correct_update(s: Settings) -> Lost:
    gain = 0.0 if s.first and s.momentum == 0 else s.gain
    for x, before, last in _together(s.x, s.before, s.last):
        new, old = _wide(x, x), _wide(last, x)
        step = new - _wide(before, x)
        old = torch.zeros_like(old) if s.first else old
        v = s.momentum * old + (1 - s.momentum) * step
        yield _store(s, (x, new - ((step - v) + gain * (old - v))))
        last.copy_(v)  # last, as `old` may be the same memory


_BODIES: dict[str, Callable[[Settings], Lost]] = {
    "elastic_pull_": _elastic_pull,
    "elastic_step_": _elastic_step,
    "easgd_step_": _easgd_step,
    "elastic_sgd_": _elastic_sgd,
    "elastic_adamw_": _elastic_adamw,
    "elastic_round_": _elastic_round,
    "reference_apply_": _reference_apply,
    "trial_sgd_": _trial_sgd,
    "trial_adam_": _trial_adam,
    "predict_sgd_": _predict_sgd,
    "predict_adam_": _predict_adam,
    "correct_update_": _correct_update,
}


# ---- one buffer for many tensors ---------------------------------------------------------------------------------


@torch.no_grad()
def pack(tensors: Sequence[Tensor], *, dtype: torch.dtype | None = None) -> Tensor:
    if not tensors:
        raise ValueError("avgpipe::pack: there are no tensors; pass at least one")
    if dtype is None and len({t.dtype for t in tensors}) > 1:
        raise ValueError("avgpipe::pack: the tensors have several dtypes; pass dtype=")
    buffer = tensors[0].new_empty([sum(t.numel() for t in tensors)], dtype=dtype or tensors[0].dtype)
    pack_out(tensors, out=buffer)
    return buffer


@torch.no_grad()
def pack_out(tensors: Sequence[Tensor], *, out: Tensor) -> None:
    for part, tensor in _parts(out, tensors):
        part.copy_(tensor)


@torch.no_grad()
def unpack_(buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    for part, tensor in _parts(buffer, tensors):
        tensor.copy_(part)


def _parts(buffer: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    sizes = [t.numel() for t in tensors]
    if buffer.dim() != 1 or buffer.numel() != sum(sizes):
        raise ValueError(
            f"the buffer has {buffer.dim()} dimensions and {buffer.numel()} elements, the tensors together "
            f"{sum(sizes)}; pass one of one dimension and as many elements"
        )
    for part, tensor in zip(torch.split(buffer, sizes), tensors):
        yield part.view(tensor.shape), tensor
