"""Slow twins of the operators: the same names and arguments, in plain torch and float64.

They round once, when the result is stored, and check nothing: made for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _tuples(*arguments: Tensor | Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """The arguments' tensors, tuple by tuple."""
    lists = [[argument] if isinstance(argument, Tensor) else list(argument) for argument in arguments]
    return list(zip(*lists))


def _result(lost: list[Tensor], like: Tensor | Sequence[Tensor], check_finite: bool) -> Tensor:
    tensors = [like] if isinstance(like, Tensor) else like
    device = tensors[0].device if tensors else torch.device("cpu")
    if not check_finite:
        return torch.empty(0, dtype=torch.int64, device=device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for mask in lost:
        total += mask.sum()
    return total


def elastic_pull_(
    x: Tensor | Sequence[Tensor], z: Tensor | Sequence[Tensor], alpha: float, *, check_finite: bool = False
) -> Tensor:
    """x += alpha (z - x). See `avgpipe_ext.elastic_pull_`."""
    lost = []
    with torch.no_grad():
        for xt, zt in _tuples(x, z):
            x64, z64 = xt.double(), zt.double()
            xt.copy_(x64 + alpha * (z64 - x64))
            lost.append(~xt.isfinite())
    return _result(lost, x, check_finite)


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
    """update += x - x_before, then the elastic force. See `avgpipe_ext.elastic_step_`."""
    lost = []
    with torch.no_grad():
        for xt, bt, zt, ut in _tuples(x, x_before, z, update):
            x64, b64, z64, u64 = xt.double(), bt.double(), zt.double(), ut.double()
            ut.copy_(u64 + (x64 - b64))
            xt.copy_(x64 + alpha * (z64 - (b64 if staleness == 1 else x64)))
            lost.append(~(xt.isfinite() & ut.isfinite()))
    return _result(lost, x, check_finite)


def easgd_step_(
    x: Tensor | Sequence[Tensor],
    z: Tensor | Sequence[Tensor],
    update: Tensor | Sequence[Tensor],
    alpha: float,
    *,
    check_finite: bool = False,
) -> Tensor:
    """e = alpha (x - z); x -= e; update += e. See `avgpipe_ext.easgd_step_`."""
    lost = []
    with torch.no_grad():
        for xt, zt, ut in _tuples(x, z, update):
            x64, z64, u64 = xt.double(), zt.double(), ut.double()
            pull = alpha * (x64 - z64)
            xt.copy_(x64 - pull)
            ut.copy_(u64 + pull)
            lost.append(~(xt.isfinite() & ut.isfinite()))
    return _result(lost, x, check_finite)


def reference_apply_(
    z: Tensor | Sequence[Tensor],
    update: Tensor | Sequence[Tensor],
    scale: float,
    *,
    check_finite: bool = False,
) -> Tensor:
    """z += scale * update; update = 0. See `avgpipe_ext.reference_apply_`."""
    lost = []
    with torch.no_grad():
        for zt, ut in _tuples(z, update):
            new = (zt.double() + scale * ut.double()).to(zt.dtype)
            bad = ~new.isfinite()
            zt.copy_(torch.where(bad, zt, new) if check_finite else new)
            ut.zero_()
            lost.append(bad)
    return _result(lost, z, check_finite)
