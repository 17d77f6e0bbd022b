"""Typed wrappers of the operators, and what torch needs besides their kernels.

The module docstring of `avgpipe_ext` describes what all operators have in common.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

import avgpipe_ext._library  # noqa: F401 (loads the library)
from avgpipe_ext import arrays, plain

_ops = torch.ops.avgpipe
_P = ParamSpec("_P")
Result = TypeVar("Result")
_BOUND = torch.empty(0)  # returned by the body of an operator's wrapper if its arguments are valid

Tensors: TypeAlias = "Tensor | Sequence[Tensor]"


def _operator(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """Make a function the wrapper of the operator of its name, which has the same arguments and defaults.

    Called with tensors it runs the overload for single tensors, with lists that for lists, without recording
    gradients.
    """
    packet = getattr(_ops, function.__name__)
    names = [argument.name for argument in packet.default._schema.arguments]
    tensors = [a.name for a in packet.list._schema.arguments if str(a.type) == "List[Tensor]"]
    singles = [a.name for a in packet.default._schema.arguments if "List" not in str(a.type)]
    leading = next(name for name in tensors if name in singles)

    def run(*args: _P.args, **options: _P.kwargs) -> Tensor:
        function(*args, **options)  # a TypeError for arguments that are not in its signature
        given: dict[str, Any] = {**dict(zip(names, args)), **options}
        single = isinstance(given[leading], Tensor)
        if not single:
            _refuse_arrays(given[leading])
        if single and packet is _ops.reference_apply_ and not isinstance(given["update"], Tensor):
            given["z"], single = [given["z"]], False
        for name in tensors:
            if given[name] is None and name == "momentum":
                given[name] = None if single else []
            elif name not in singles:
                _require_lists(function.__name__, given[name])
            elif isinstance(given[name], Tensor) is not single:
                kinds = ", ".join(type(given[name]).__name__ for name in tensors)
                raise TypeError(
                    f"{function.__name__}: got {kinds}; pass tensors only, or lists of tensors only"
                )
        if "step" in names:
            step = given.get("step", 1.0)
            given["step"] = step if isinstance(step, Tensor) else torch.tensor(float(step))
        result: Tensor = _run(packet.default if single else packet.list, **given)
        return result

    return _or_of_arrays(wraps(function)(run))


def _or_of_arrays(function: Callable[_P, Result]) -> Callable[_P, Result]:
    """Make a function of tensors one of arrays of other libraries too, which it raises a TypeError for."""

    @wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> Result:
        try:
            return function(*args, **options)
        except TypeError as error:
            shared_args, shared_options = arrays.shared(function, args, options, error)
        return function(*shared_args, **shared_options)

    return call


def _refuse_arrays(value: Any) -> None:
    """Raise TypeError for an array, or a list that begins with one: in its own error torch would print the values."""
    first = value[0] if type(value) is list and value else value
    if not isinstance(first, Tensor) and arrays.is_array(first):
        raise TypeError(f"got an array of type {type(first).__name__} instead of a tensor")


def _run(overload: Any, *arguments: Any, **options: Any) -> Any:
    """Call the overload without recording gradients. TypeError for arguments that do not match its schema."""
    with torch.no_grad():
        try:
            return overload(*arguments, **options)
        except RuntimeError as error:
            _check_types(overload, arguments, options, error)
            raise


_REJECTED = re.compile(r"Expected a value of type '(.+?)' for argument '(\w+)'")
_WANTED = {
    "Tensor": "a tensor",
    "Optional[Tensor]": "a tensor or None",
    "List[Tensor]": "a list of tensors",
    "float": "a float",
    "int": "an int of at most 64 bits",
    "bool": "True or False",
    "str": "a str",
    "Optional[int]": "a torch.dtype",
}


def _check_types(
    overload: Any, arguments: tuple[Any, ...], options: dict[str, Any], error: RuntimeError
) -> None:
    """Raise TypeError if torch's dispatcher raised the error, which checks types before it calls a kernel."""
    rejected = _REJECTED.search(str(error))
    if rejected is None:
        return
    wanted, label = rejected.groups()
    names = [argument.name for argument in overload._schema.arguments]
    value = {**dict(zip(names, arguments)), **options}.get(label)
    if isinstance(value, list | tuple) and wanted == "List[Tensor]":
        i = next((i for i, item in enumerate(value) if not isinstance(item, Tensor)), 0)
        label, value = f"{label}[{i}]", value[i]
    raise TypeError(
        f"{overload._schema.name}: {label} is of type {type(value).__name__}; pass {_WANTED.get(wanted, wanted)}"
    ) from None


def _require_lists(operator: str, *arguments: Sequence[Tensor]) -> None:
    for argument in arguments:
        if isinstance(argument, Tensor):
            raise TypeError(f"{operator}: got a Tensor instead of a list of tensors; pass [tensor]")
        _refuse_arrays(argument)


@_operator
def elastic_pull_(x: Tensors, z: Tensors, alpha: float, *, check_finite: bool = False) -> Tensor:
    """Pull the replica x towards the reference z, in place: x += alpha (z - x).

    Args:
        x: replica weights, any shape; written.
        z: reference weights, of x's shape; x's dtype, or float32 with a 16-bit x.
        alpha: elasticity, finite; with a finite z, 0 does nothing and 1 copies.
        check_finite: count the elements whose new x is not finite.

    Returns: the count, int64 of shape (), or an empty int64 tensor without check_finite.
    """
    return _BOUND


@_operator
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
    """Apply a linear averaging rule after any optimizer's step d = x - x_before, in place.

    The force is f = alpha (x - z) for staleness 0, alpha (x_before - z) for staleness 1; then x -= f and
    update += from_step d + from_force f. The default is rule `avgpipe` (Chen et al., PPoPP 2023,
    reconstructed; this form of staleness 1, with x and z from the beginning of the round, does not lag behind
    the reference).

    Args:
        x: replica weights after the optimizer's step, any shape; written.
        x_before: replica weights before the step, of x's shape.
        z: reference weights, of x's shape.
        update: sum of the replica's steps so far, of x's shape; written.
        alpha: elasticity, finite.
        staleness: 0 or 1.
        from_step, from_force: factors of the step and of the force in `update`, finite.
        accumulate: add to `update`; else overwrite it, without reading it.
        check_finite: count the elements whose new x or new update is not finite.

    x_before, z and update have x's dtype, or float32 with a 16-bit x.

    Returns: the count, int64 of shape (), or an empty int64 tensor without check_finite.
    """
    return _BOUND


@_operator
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
    """Apply rule `easgd`, in place: e = alpha (x - z); x -= e; update += e (Zhang, Choromanska, LeCun 2015).

    This is `elastic_step_` without a step; from_force is the factor of e in `update`.

    Args:
        x: replica weights, any shape; written.
        z: reference weights, of x's shape.
        update: sum of the e so far, of x's shape; written.
        alpha: beta/N with 0 <= beta <= 1 for N replicas; finite.
        from_force: factor of e in `update`, finite.
        accumulate: add to `update`; else overwrite it, without reading it.
        check_finite: count the elements whose new x or new update is not finite.

    z and update have x's dtype, or float32 with a 16-bit x.

    Returns: the count, int64 of shape (), or an empty int64 tensor without check_finite.
    """
    return _BOUND


@_operator
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
    """Run `torch.optim.SGD`'s step and then the averaging rule, in place and in one pass.

    Equals SGD's step from x_before to x, then `elastic_step_`; with a 16-bit x, intermediate values are not
    rounded to 16 bits. Rule `easgd` is staleness 0, from_step 0 and from_force 1.

    Args:
        x: replica weights, any shape; written.
        grad: gradients, of x's shape; read only, also with grad_scale.
        momentum: SGD's momentum buffer, of x's shape; written. None if and only if mu is 0.
        z, update, alpha, staleness, from_step, from_force, accumulate: see `elastic_step_`.
        lr: learning rate.
        mu: momentum factor.
        dampening, weight_decay, nesterov, maximize: see `torch.optim.SGD`.
        first_step: the momentum buffer is not initialized and becomes the gradient, as in SGD's first step.
        grad_scale: float32 of one element: the factor of the loss. Gradients are multiplied by its
            reciprocal, as `torch.amp.GradScaler.unscale_` does.
        found_inf: float32 of one element: unless it is 0 the optimizer's step is skipped, and only the
            averaging rule is applied.
        check_finite: count the elements whose new x or new update is not finite.

    grad, momentum, z and update have x's dtype, or float32 with a 16-bit x. grad_scale and found_inf are on
    x's device.

    Returns: the count, int64 of shape (), or an empty int64 tensor without check_finite.
    """
    return _BOUND


@_operator
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
    """Run `torch.optim.AdamW`'s step (Adam's, unless `decoupled`) and then the averaging rule, in place, in one pass.

    Equals the optimizer's step from x_before to x, then `elastic_step_`; with a 16-bit x, intermediate values
    are not rounded to 16 bits. Without amsgrad.

    Args:
        x: replica weights, any shape; written.
        grad: gradients, of x's shape; read only, also with grad_scale.
        exp_avg, exp_avg_sq: the optimizer's state, of x's shape; written.
        z, update, alpha, staleness, from_step, from_force, accumulate: see `elastic_step_`.
        step: the number of this step, from 1: a number, or a float32 or float64 tensor of one element, on
            the CPU or on x's device. The caller counts.
        lr, beta1, beta2, eps, weight_decay, maximize: see `torch.optim.AdamW`.
        decoupled: decay weights as AdamW does, else through the gradient, as Adam does.
        grad_scale, found_inf, check_finite: see `elastic_sgd_`.

    grad, exp_avg, exp_avg_sq, z and update have x's dtype, or float32 with a 16-bit x.

    Returns: the count, int64 of shape (), or an empty int64 tensor without check_finite.
    """
    return _BOUND


@_operator
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
    """Run a whole round of rule `avgpipe` with staleness 0, for N replicas, in one pass over all tensors.

    Equals, for each replica in turn, the optimizer's step d_i from x_i to x_i + d_i, and z += d_i / N; then
    x_i += alpha (z - x_i) for all replicas. z is read and written once, and the d_i are never stored.

    Args:
        xs: weights of N replicas of T tensors: those of the first replica, then those of the second, ...;
            written.
        grads: gradients, as xs.
        states: "adamw" and "adam": all exp_avg as xs, then all exp_avg_sq; "sgd" with mu: momentum buffers as
            xs; "sgd" without: empty. Written.
        z: reference weights: T tensors, or one; written.
        alpha: elasticity, finite.
        optimizer: "sgd", "adam" or "adamw"; for the other options see `elastic_sgd_` and `elastic_adamw_`,
            the same for all replicas.
        check_finite: leave out of z each element of a d_i that would make it infinite or NaN, and count those
            and the elements of xs that are not finite before the pull.

    grads, states and z have the dtype of xs, or float32 with 16-bit xs.

    Returns: the count, int64 of shape (), or an empty int64 tensor without check_finite.
    """
    return _BOUND


@_operator
def reference_apply_(
    z: Tensors, update: Tensors, scale: float, *, zero: bool = True, check_finite: bool = False
) -> Tensor:
    """Move the reference by the collected updates, in place: z += scale * update; update = 0.

    Args:
        z: reference weights, any shape; written. Or T of them.
        update: of z's shape, in z's dtype, or one of both float32 and the other 16-bit; written. For updates
            of N replicas, which are added in order in one pass over z, a list of N, or of N T (those of the
            first replica, then those of the second, ...).
        scale: 1/N for the mean over N replicas, 1 for the sum; finite.
        zero: set the updates to 0; else leave them.
        check_finite: leave out, and count, values that would make z not finite (any update that is not
            finite).

    Returns: the count, int64 of shape (), or an empty int64 tensor without check_finite.
    """
    return _BOUND


@_operator
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
    """Set x to where one step of `torch.optim.SGD` with this gradient alone would move the reference z.

    z and the momentum buffer are unchanged, and update = -grad is the replica's update. x equals, bit for
    bit, the result of `elastic_sgd_` with alpha 0 on clones of z and of the buffer.

    Args:
        x: replica weights, any shape; written, without being read.
        z: reference weights, of x's shape.
        grad: gradients, of x's shape.
        momentum: SGD's momentum buffer, of x's shape. None if and only if mu is 0.
        update: of x's shape; written, without being read.
        lr, mu, dampening, nesterov, weight_decay, maximize: see `torch.optim.SGD`, with mu for its momentum.
        first_step: the momentum buffer is not initialized and counts as the gradient, as in SGD's first step.
            It is not read: pass any tensor of its shape, such as grad.
        check_finite: count the elements whose new x or new update is not finite.

    z, grad, momentum and update have x's dtype, or float32 with a 16-bit x.

    Returns: the count, int64 of shape (), or an empty int64 tensor without check_finite.
    """
    return _BOUND


@_operator
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
    """Set x to where one step of `torch.optim.AdamW` with this gradient alone would move the reference z.

    z and the moments are unchanged, and update = -grad is the replica's update. x equals, bit for bit, the
    result of `elastic_adamw_` with alpha 0 and the next step's number on clones of z and of the moments.

    Args:
        x: replica weights, any shape; written, without being read.
        z: reference weights, of x's shape.
        grad: gradients, of x's shape.
        exp_avg, exp_avg_sq: the optimizer's state, of x's shape.
        update: of x's shape; written, without being read.
        step: the number of steps in this state, from 0, as in torch's state: a number, or a float32 or
            float64 tensor of one element, on the CPU or on x's device.
        lr, beta1, beta2, eps, weight_decay, maximize: see `torch.optim.AdamW`.
        decoupled: decay weights as AdamW does, else through the gradient, as Adam does.
        check_finite: count the elements whose new x or new update is not finite.

    z, grad, exp_avg, exp_avg_sq and update have x's dtype, or float32 with a 16-bit x.

    Returns: the count, int64 of shape (), or an empty int64 tensor without check_finite.
    """
    return _BOUND


@_operator
def predict_sgd_(
    out: Tensors, x: Tensors, momentum: Tensors, scale: float, *, check_finite: bool = False
) -> Tensor:
    """Predict weights from the momentum of SGD: out = x - scale * momentum.

    The prediction of SpecTrain (Chen, Yang, Cheng 2018) for s further updates has scale s lr: each update is
    as large as the last one. If gradients count as 0 from now on, it is lr mu (1 - mu^s) / (1 - mu).

    Args:
        out: predicted weights, any shape; written, without being read.
        x: weights, of out's shape.
        momentum: `torch.optim.SGD`'s momentum buffer, of out's shape.
        scale: factor of the momentum, finite.
        check_finite: count the elements of out that are not finite.

    x and momentum have out's dtype, or float32 with a 16-bit out.

    Returns: the count, int64 of shape (), or an empty int64 tensor without check_finite.
    """
    return _BOUND


@_operator
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
    """Predict weights from the moments of Adam or AdamW.

    out = (1 - lr weight_decay)^updates x - updates lr m / (sqrt(v) + eps), with m = exp_avg / (1 -
    beta1^step) and v = exp_avg_sq / (1 - beta2^step): `updates` steps of the optimizer with an unchanged
    state (XPipe, Guan et al. 2019).

    Args:
        out: predicted weights, any shape; written, without being read.
        x: weights, of out's shape.
        exp_avg, exp_avg_sq: the optimizer's state, of out's shape.
        updates: the number of updates ahead, at least 0.
        step: the number of steps in this state, from 1: a number, or a float32 or float64 tensor of one
            element, on the CPU or on out's device.
        lr, beta1, beta2, eps: see `torch.optim.AdamW`.
        weight_decay: AdamW's; 0 for Adam, whose state has it.
        check_finite: count the elements of out that are not finite.

    x, exp_avg and exp_avg_sq have out's dtype, or float32 with a 16-bit out.

    Returns: the count, int64 of shape (), or an empty int64 tensor without check_finite.
    """
    return _BOUND


@_operator
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
    """Correct any optimizer's step d = x - before from a late gradient, in place.

    v = momentum last + (1 - momentum) d; x = before + v + gain (v - last); last = v. With momentum 0 this is
    error feedback (after Zmushko et al., arXiv 2606.30634, 2026), with momentum = gain Nesterov's look-ahead
    over the optimizer's steps (after Ajanthan et al., ICML 2025). Without both, x is unchanged, bit for bit.

    Args:
        x: weights after the optimizer's step, any shape; written.
        before: weights before the step, of x's shape.
        last: v of the step before, of x's shape; written.
        momentum: from 0 to below 1.
        gain: factor of the difference from the last v, finite.
        first: there was no step before: last is not read and counts as 0, and x = before + d if momentum is
            0.
        check_finite: count the elements whose new x is not finite.

    before and last have x's dtype, or float32 with a 16-bit x.

    Returns: the count, int64 of shape (), or an empty int64 tensor without check_finite.
    """
    return _BOUND


@_or_of_arrays
def pack(tensors: Sequence[Tensor], dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """Copy the tensors' elements, one after another, into one buffer, to send them at once.

    Args:
        tensors: any shapes and strides (each is packed in the order of its indices); float32, float64, bfloat16 or
            float16; all on one device.
        dtype: dtype of a new buffer; by default the tensors' own, which must then be the same for all.
        out: the buffer to write to, instead of a new one: 1-D, contiguous, of any of these dtypes. Reusing a
            buffer saves the allocation of fresh memory, which takes longer than the copy if buffers are
            large.

    Returns: a tensor of shape (sum of numel,), on the tensors' device: `out`, if given. Values round to nearest.
    """
    _require_lists("pack", tensors)
    if out is None:
        buffer: Tensor = _run(_ops.pack.default, tensors, dtype=dtype)
        return buffer
    if dtype is not None and dtype != out.dtype:
        raise ValueError(f"pack: dtype is {dtype} but out has {out.dtype}; leave dtype out")
    _run(_ops.pack.out, tensors, out=out)
    return out


@_or_of_arrays
def unpack_(buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy `buffer`, as `pack` made it, back into `tensors`, in place, with conversion to their dtypes.

    ValueError unless buffer is 1-D, contiguous and has as many elements as the tensors together.
    """
    _require_lists("unpack_", tensors)
    if not isinstance(buffer, Tensor):  # the dispatcher would take None
        raise TypeError(f"avgpipe::unpack_: buffer is of type {type(buffer).__name__}; pass a tensor")
    _run(_ops.unpack_.default, buffer, tensors)


# ---- fake kernels, version counters, refusals ---------------------------------------------------------------------
OPERATORS = (
    "elastic_pull_", "elastic_step_", "easgd_step_", "elastic_sgd_", "elastic_adamw_", "elastic_round_",
    "reference_apply_", "trial_sgd_", "trial_adam_", "predict_sgd_", "predict_adam_", "correct_update_",
)  # fmt: skip


def _fake(name: str, overload: Any) -> Callable[..., Tensor]:
    """Check shapes and devices and return the result's shape, dtype and device; write nothing."""
    types = [str(argument.type) for argument in overload._schema.arguments]
    count = next(i for i, kind in enumerate(types) if "Tensor" not in kind)
    leading = 1 if name == "reference_apply_" else 0  # the index of the argument with the most tensors

    def fake(*values: Any, check_finite: bool = False, **options: Any) -> Tensor:
        lists = [[v] if isinstance(v, Tensor) else v or [] for v in values[:count]]
        whole = lists[leading]
        for tensors in lists if whole else ():
            for i, tensor in enumerate(tensors):
                shape = whole[i % len(whole)].shape
                if tensor.shape != shape:
                    raise ValueError(
                        f"got shapes {tuple(shape)} and {tuple(tensor.shape)}; pass tensors of one shape"
                    )
                _check_device(whole[0], tensor, "a tensor")
        for label, option in options.items() if whole else ():
            may_differ = label == "step" and isinstance(option, Tensor) and option.device.type == "cpu"
            if isinstance(option, Tensor) and not may_differ:
                _check_device(whole[0], option, label)
        shape, device = () if check_finite else (0,), whole[0].device if whole else torch.device("cpu")
        return torch.empty(shape, dtype=torch.int64, device=device)

    return fake


def _check_device(tensor: Tensor, other: Tensor, name: str) -> None:
    """Raise for mixed devices: one meta tensor is enough to call the fake, which would silently do nothing."""
    if tensor.device != other.device:
        raise ValueError(
            f"{name} is on {other.device} but another tensor is on {tensor.device}; move all to one device"
        )


def _fake_pack(tensors: Sequence[Tensor], *, dtype: torch.dtype | None = None) -> Tensor:
    if not tensors:
        raise ValueError("there are no tensors; pass at least one")
    for t in tensors:
        _check_device(tensors[0], t, "a tensor")
    return tensors[0].new_empty([sum(t.numel() for t in tensors)], dtype=dtype or tensors[0].dtype)


def _fake_pack_out(tensors: Sequence[Tensor], *, out: Tensor) -> None:
    _fake_unpack(out, tensors)


def _fake_unpack(buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    for t in tensors:
        _check_device(buffer, t, "a tensor")
    total = sum(t.numel() for t in tensors)
    if buffer.dim() != 1 or buffer.numel() != total:
        raise ValueError(f"buffer has {buffer.numel()} elements, the tensors together {total}")


# Keys of tensors whose memory is not their value: torch would call the operator with copies of them, and
# would negate, or conjugate, written tensors for the time of the call. For each key: a test for such a
# tensor, its name, and the remedy.
_LAZY = {
    "Negative": (torch.Tensor.is_neg, "the negative bit", "resolve_neg"),
    "Conjugate": (torch.Tensor.is_conj, "the conjugate bit", "resolve_conj"),
    "ZeroTensor": (torch.Tensor._is_zerotensor, "no memory, being zero throughout", "clone"),
}


def _refuse_lazy(name: str, overload: Any, key: str) -> Callable[..., Any]:
    """Make a kernel for tensors with this key that raises ValueError before anything is written."""
    is_lazy, what, way_out = _LAZY[key]
    names = [argument.name for argument in overload._schema.arguments]

    def kernel(*arguments: Any, **options: Any) -> Any:
        for label, value in (*zip(names, arguments), *options.items()):
            is_list = isinstance(value, list | tuple)
            for i, tensor in enumerate(value if is_list else [value]):
                if isinstance(tensor, Tensor) and is_lazy(tensor):
                    place = f"{label}[{i}]" if is_list else label
                    raise ValueError(
                        f"avgpipe::{name}: {place} has {what}: its memory is not its value; pass a .{way_out}()"
                    )
        raise AssertionError(f"{name} was called for {key} without such a tensor")

    return kernel


def _move_versions(overload: Any) -> Callable[..., Any]:
    """Make a kernel that runs the operator and then increments the version counters of the written tensors.

    Without it, autograd would not notice that a tensor saved for a backward pass has changed.
    """
    arguments = overload._schema.arguments
    written = [
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def kernel(keys: torch._C.DispatchKeySet, *arguments: Any, **options: Any) -> Any:
        result = overload.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *arguments, **options)
        for key in written:
            value = options[key] if isinstance(key, str) else arguments[key]
            if value is not None:
                increment_version(value)
        return result

    return kernel


_library = torch.library.Library("avgpipe", "IMPL")  # type: ignore[no-untyped-call]


def _register(name: str, fake: Callable[..., Any] | None = None) -> None:
    operator, _, overload_name = name.partition(".")
    overload = getattr(getattr(_ops, operator), overload_name or "default")
    torch.library.register_fake(f"avgpipe::{name}", fake or _fake(operator, overload), lib=_library)
    for key in _LAZY:
        _library.impl(name, _refuse_lazy(operator, overload, key), key)  # type: ignore[no-untyped-call]
    if overload._schema.is_mutable:
        kernel = _move_versions(overload)
        _library.impl(name, kernel, "ADInplaceOrView", with_keyset=True)  # type: ignore[no-untyped-call]


def register_plain(key: str) -> None:
    """Use plain torch for the devices of a dispatch key."""
    kernels: dict[str, Any] = {"pack": plain.pack, "pack.out": plain.pack_out, "unpack_": plain.unpack_}
    for name in OPERATORS:
        for overload in (getattr(_ops, name).default, getattr(_ops, name).list):
            full = name if overload._overloadname == "default" else f"{name}.{overload._overloadname}"
            kernels[full] = plain.plain_kernel(name, overload, _fake(name, overload))
    for name, kernel in kernels.items():
        _library.impl(name, kernel, key)  # type: ignore[no-untyped-call]


for _name in OPERATORS:
    _register(_name)
    _register(f"{_name}.list")
_register("pack", _fake_pack)
_register("pack.out", _fake_pack_out)
_register("unpack_", _fake_unpack)
for _key in plain.KEYS:
    register_plain(_key)
