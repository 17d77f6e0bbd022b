"""Linear layers whose weights' gradients are added up by the products that make them.

    plain   dy, x ── product ──> gradient of a micro-batch ── (under autocast: cast) ── added to the sum of the batch
    here    dy, x ── product, plus the sum of the batch ──> sum of the batch

So no gradient of a micro-batch is written, read again and added, and under autocast none is rounded to 16
bits before that, where the device has such products. A sum that is a product's third operand may be rounded
once where two operators round twice; the first micro-batch's gradient is that of autograd.

Under autocast a batch's first micro-batch casts each weight for all of them: a batch runs on one version of
the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from avgpipe.model.compiled import comes_compiled
from avgpipe.model.context import Position
from avgpipe.runtime.stage import Stage


class SummedProducts:
    """Runs a stage's forwards, with such gradients for its plain linear layers.

    Others train as before: subclasses of ``nn.Linear``, layers with a parametrization, frozen or compiled ones,
    and weights that a module uses without calling the layer.
    """

    def __init__(self, stage: Stage, autocast: torch.dtype | None) -> None:
        self._stage, modules = stage, list(stage.modules())
        # A captured batch has an object of its own, for the same layers.
        known = next((module.products for module in modules if isinstance(module, FusedLinear)), None)
        self.products = known or Products(stage.device, autocast)
        for module in [] if comes_compiled(modules) else modules:
            if type(module) is nn.Linear and module.weight.requires_grad:
                # The object stays: its tensors, flags and hooks, and every place that holds it.
                module.__class__ = FusedLinear
                module.__dict__["products"] = self.products

    def __call__(self, value: Any, place: Position) -> Any:
        self.products.begin(place)
        try:
            return self._stage(value, place)
        finally:
            self.products.train = False


class Products:
    """What the linear layers of a stage share.

    Attributes:
        train: Whether a forward runs that the pipeline trains by; others, such as evaluation's, are plain.
        narrow: Parameters as autocast casts them, by id, for the batch whose forwards run.
    """

    def __init__(self, device: torch.device, autocast: torch.dtype | None) -> None:
        self.train, self._last = False, Position()
        self.narrow: dict[int, torch.Tensor] = {}
        self.widens = autocast is not None and _adds_wide(device, autocast)

    def begin(self, place: Position) -> None:
        """Begin a forward that the pipeline trains by."""
        last, self._last = self._last, place
        # A batch begins, perhaps once more, on weights that were loaded.
        if place[:2] != last[:2] or place.micro_batch <= last.micro_batch:
            self.narrow.clear()
        self.train = True

    def cast(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        found = self.narrow.get(id(p))
        if found is None or found.dtype is not dtype:
            found = self.narrow[id(p)] = p.detach().to(dtype)
        return found

    def add(self, p: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add the product of two matrices to a parameter's gradient, in the gradient's dtype."""
        total = p.grad
        if total is not None and total.layout is torch.strided and total.dtype is left.dtype:
            total.addmm_(left, right)
        elif self.widens:
            wide = p.dtype
            if total is None:
                p.grad = torch.mm(left, right, out_dtype=wide)
            else:
                torch.ops.aten.addmm.dtype_out(total, left, right, wide, out=total)
        else:
            _put(p, left.mm(right))


def _put(p: torch.Tensor, more: torch.Tensor) -> None:
    """Add to a parameter's gradient, which may be sparse."""
    if p.grad is None:
        p.grad = more.to(p.dtype)
    elif p.grad.layout is torch.strided:
        p.grad.add_(more)
    else:
        p.grad = more.to(p.dtype) + p.grad


def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device adds products of 16-bit matrices to a float32 one. It is asked, as torch's versions differ."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    left = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.ones(16, 16, device=device)
    try:
        torch.mm(left, left, out_dtype=torch.float32)
        torch.ops.aten.addmm.dtype_out(total, left, left, torch.float32, out=total)
    except (RuntimeError, TypeError, AttributeError):  # torch raises them before it issues anything
        return False
    return True


class FusedLinear(nn.Linear):
    """A linear layer of a stage; plain outside of the forwards that the pipeline trains by."""

    products: Products

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        products, weight, bias = self.products, self.weight, self.bias
        is_plain = type(input) is torch.Tensor and input.layout is torch.strided and input.dim() > 0
        if not (products.train and is_plain and weight.requires_grad and torch.is_grad_enabled()):
            return super().forward(input)
        used: Sequence[torch.Tensor | None] = weight, bias
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            if torch.float64 in (input.dtype, weight.dtype):  # which autocast leaves alone
                return super().forward(input)
            dtype = torch.get_autocast_dtype(kind)
            input = input.to(dtype)
            used = [None if p is None else products.cast(p, dtype) for p in (weight, bias)]
        elif input.dtype != weight.dtype:
            return super().forward(input)  # raises as always
        made = _Linear.apply(products, input, weight, bias, *used)  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, made)


class _Linear(torch.autograd.Function):
    """A product whose backward adds to its parameters' gradients itself."""

    @staticmethod
    def forward(
        ctx: Any,
        products: Products,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        used: torch.Tensor,
        used_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.products, ctx.weight = products, weight
        ctx.bias = bias if bias is not None and bias.requires_grad else None
        ctx.save_for_backward(input, used)
        return functional.linear(input, used, used_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, used = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        below = rows.mm(used).view(input.shape) if ctx.needs_input_grad[1] else None
        ctx.products.add(ctx.weight, rows.t(), input.reshape(-1, input.shape[-1]))
        if ctx.bias is not None:
            _put(ctx.bias, rows.sum(0, dtype=ctx.bias.dtype))
        return None, below, None, None, None, None
