"""Typed wrappers of the operators. What all have in common is said in `avgpipe_ext`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import avgpipe_ext._registration  # noqa: F401 (loads the library; fake kernels and version counters)

_ops = torch.ops.avgpipe


def _call(
    operator: Any, tensors: tuple[Tensor | Sequence[Tensor], ...], *scalars: float, check_finite: bool
) -> Tensor:
    """The operator's overload for single tensors or for lists, without recording gradients."""
    single = isinstance(tensors[0], Tensor)
    if any(isinstance(argument, Tensor) is not single for argument in tensors):
        kinds = ", ".join(type(argument).__name__ for argument in tensors)
        raise TypeError(f"{operator.__name__}: got {kinds}; pass tensors only, or lists of tensors only")
    overload = operator.default if single else operator.list
    with torch.no_grad():
        result: Tensor = overload(*tensors, *scalars, check_finite=check_finite)
    return result


def elastic_pull_(
    x: Tensor | Sequence[Tensor], z: Tensor | Sequence[Tensor], alpha: float, *, check_finite: bool = False
) -> Tensor:
    """Pull the replica x towards the reference z, in place: x += alpha (z - x).

    Args:
        x: replica weights, any shape; written.
        z: reference weights, of x's shape; x's dtype, or float32 beside a 16-bit x.
        alpha: elasticity, finite; 0 does nothing, 1 copies.
        check_finite: count the elements whose new x is not finite.

    Returns: the count, int64 of shape (), or an empty int64 tensor without check_finite.
    """
    return _call(_ops.elastic_pull_, (x, z), alpha, check_finite=check_finite)


def elastic_step_(
    x: Tensor | Sequence[Tensor],
    x_before: Tensor | Sequence[Tensor],
    z: Tensor | Sequence[Tensor],
    update: Tensor | Sequence[Tensor],
    alpha: float,
    staleness: int,
    *,
    check_finite: bool = False,
) -> Tensor:
    """Rule `avgpipe`, after any optimizer's step, in place: collect the step, then apply the elastic force.

    update += x - x_before; then x += alpha (z - x) for staleness 0, with z the reference after the round, or
    x += alpha (z - x_before) for staleness 1, with both from the beginning of the round (Chen et al., PPoPP
    2023, reconstructed; this form of staleness 1 does not lag behind the reference).

    Args:
        x: replica weights after the optimizer's step, any shape; written.
        x_before: replica weights before the step, of x's shape.
        z: reference weights, of x's shape.
        update: sum of the replica's steps so far, of x's shape; written.
        alpha: elasticity, finite.
        staleness: 0 or 1.
        check_finite: count the elements whose new x or new update is not finite.

    x_before, z and update have x's dtype, or float32 beside a 16-bit x.

    Returns: the count, int64 of shape (), or an empty int64 tensor without check_finite.
    """
    return _call(_ops.elastic_step_, (x, x_before, z, update), alpha, staleness, check_finite=check_finite)


def easgd_step_(
    x: Tensor | Sequence[Tensor],
    z: Tensor | Sequence[Tensor],
    update: Tensor | Sequence[Tensor],
    alpha: float,
    *,
    check_finite: bool = False,
) -> Tensor:
    """Rule `easgd`, in place: e = alpha (x - z); x -= e; update += e (Zhang, Choromanska, LeCun 2015).

    Args:
        x: replica weights, any shape; written.
        z: reference weights, of x's shape.
        update: sum of the e so far, of x's shape; written.
        alpha: beta/N with 0 <= beta <= 1 for N replicas; finite.
        check_finite: count the elements whose new x or new update is not finite.

    z and update have x's dtype, or float32 beside a 16-bit x.

    Returns: the count, int64 of shape (), or an empty int64 tensor without check_finite.
    """
    return _call(_ops.easgd_step_, (x, z, update), alpha, check_finite=check_finite)


def reference_apply_(
    z: Tensor | Sequence[Tensor],
    update: Tensor | Sequence[Tensor],
    scale: float,
    *,
    check_finite: bool = False,
) -> Tensor:
    """Move the reference by the collected updates, in place: z += scale * update; update = 0.

    Args:
        z: reference weights, any shape; written.
        update: of z's shape, in z's dtype, or one of both float32 and the other 16-bit; written.
        scale: 1/N for the mean over N replicas, 1 for the sum; finite.
        check_finite: leave z as it is, and count, where the new z would not be finite (it never is where the
            update is not). The update becomes 0 there too.

    Returns: the count, int64 of shape (), or an empty int64 tensor without check_finite.
    """
    return _call(_ops.reference_apply_, (z, update), scale, check_finite=check_finite)
