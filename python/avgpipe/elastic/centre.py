"""The reference's weights z, and how updates move them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import avgpipe_ext
from avgpipe.elastic import Buffers, Layout
from avgpipe.elastic.replica import Weights
from avgpipe.rules import Elasticity


class Centre:
    """z in flat buffers, moved by the mean (rule avgpipe) or the sum (rule easgd) of updates.

    With an outer optimizer, minus that mean or sum is the gradient with which it steps z (Douillard et al.
    2023).
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[torch.Tensor],
        elasticity: Elasticity,
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None,
    ) -> None:
        self.z = layout.zeros()
        self.tensors = self.z.tensors()
        for z, p in zip(self.tensors, parameters):
            z.copy_(p.to_dense() if p.is_sparse else p)
        self.scale = elasticity.scale
        self.on_cpu = all(device.type == "cpu" for _, device in layout.keys)
        self.outer: torch.optim.Optimizer | None = None
        if outer is not None:
            self.outer = _make_outer(outer, self.tensors)
            self._grads = layout.zeros()

    def absorb(self, updates: Iterable[Buffers]) -> None:
        """Move z by ``updates``, in the order given. They stay as they are: the next round overwrites them."""
        target, scale = (self.z, self.scale) if self.outer is None else (self._grads, -self.scale)
        for flat, us in zip(target.flats, zip(*(update.flats for update in updates))):
            # Leaves out each element that would make z not finite; on an accelerator the only check there is.
            avgpipe_ext.reference_apply_(flat, list(us), scale, zero=False, check_finite=True)
        if self.outer is not None:
            self._outer_step(self.outer)

    def _outer_step(self, outer: torch.optim.Optimizer) -> None:
        for z, grad in zip(self.tensors, self._grads.tensors()):
            z.grad = grad
        try:
            outer.step()
        finally:
            for z in self.tensors:
                z.grad = None
            self._grads.zero_()

    def follow(self, x: Weights) -> list[torch.Tensor]:
        """z = x, the rule of one replica without elasticity; z stays as it was if x is not finite.

        On an accelerator, which is not waited for, only the bad elements of x are left out. Returns counts of
        what was not finite, all zero if nothing.
        """
        loaded = x.load()
        if not self.on_cpu:
            return [_copy_finite(z, v) for zs, xs in zip(self.z.views, loaded) for z, v in zip(zs, xs)]
        filled = [v for xs in loaded for v in xs if v.numel()]
        bad = [~norm.isfinite() for norm in torch._foreach_norm(filled, float("inf"))] if filled else []
        if not any(map(bool, bad)):
            for zs, xs in zip(self.z.views, loaded):
                torch._foreach_copy_(zs, xs)
        return bad


def _copy_finite(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    finite = x.isfinite()
    z.copy_(torch.where(finite, x, z))
    return finite.logical_not().sum()


def _make_outer(
    outer: Callable[[list[torch.Tensor]], Any], tensors: list[torch.Tensor]
) -> torch.optim.Optimizer:
    if isinstance(outer, torch.optim.Optimizer) or not callable(outer):
        raise TypeError(
            f"outer must be a function from parameters to an optimizer, such as "
            f"lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True), "
            f"not {type(outer).__name__}"
        )
    made = outer(tensors)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"outer must return a torch.optim.Optimizer, not {type(made).__name__}")
    if {id(p) for group in made.param_groups for p in group["params"]} - {id(t) for t in tensors}:
        raise ValueError("outer must build its optimizer over the tensors it is called with, not over others")
    return made
