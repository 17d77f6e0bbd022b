"""Checks that the stages of a model compute the same as the model itself, by comparing two runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

# Most elements of a gradient to compare: all of them would take as much memory as the model.
_MOST = 1 << 20

Rounding = tuple[float, float]  # relative to the largest number in a tensor, and in all compared tensors

# More than rounding causes.
_TOLERANCES = {torch.float64: (1e-8, 1e-11), torch.complex128: (1e-8, 1e-11)}
_TOLERANCE = 1e-4, 1e-6
TO_16_BITS = 5e-2, 1e-2
# For sums over samples in another order, in less than float64.
OTHER_SUMS = 1e-3, 1e-5


class Outcome(NamedTuple):
    """The results of one run of a model.

    Attributes:
        outputs: Tensors of its output.
        gradients: Gradients of a number made from the outputs, by name of a parameter; of large ones, some
            elements.
        buffers: Buffers, by name.
    """

    outputs: list[torch.Tensor]
    gradients: Mapping[str, torch.Tensor] = {}
    buffers: Mapping[str, torch.Tensor] = {}


def difference(model: nn.Module, whole: Callable[[], Any], stages: Callable[[], Any]) -> str | None:
    """Compare ``whole()``, the output of ``model``, with the output of its stages; both are pytrees of tensors.

    It compares outputs, and gradients of a number made from them. The caller ensures that no random numbers
    are used.

    Returns:
        None if they are equal up to rounding; else the difference.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        return compared(_outcome(whole(), parameters), _outcome(stages(), parameters))


def compared(expected: Outcome, got: Outcome, rounding: Rounding = (0.0, 0.0)) -> str | None:
    """Describe how the stages' outcome, ``got``, differs from the model's; None if by rounding only.

    ``rounding``: Lower bounds of the tolerance, relative to the largest number in a tensor, and in all.
    """
    counts = len(expected.outputs), len(got.outputs)
    if counts[0] != counts[1]:
        return f"the model returns {counts[0]} tensors and the stages {counts[1]}"
    numbered = {f"output {n}": t for n, t in enumerate(expected.outputs)}
    found = _largest(numbered, dict(zip(numbered, got.outputs)), rounding)
    if found is None and (found := _largest(expected.gradients, got.gradients, rounding)) is not None:
        found = f"gradient of {found}"
    if found is None and (found := _largest(expected.buffers, got.buffers, rounding)) is not None:
        found = f"buffer {found}"
    return found


def some(tensor: torch.Tensor) -> torch.Tensor:
    """Return the compared elements of a tensor: all, or some of a large one, copied."""
    tensor = tensor.detach()
    if tensor.numel() <= _MOST or tensor.layout is not torch.strided:
        return tensor
    flat = tensor.reshape(-1)
    return flat[:: -(-len(flat) // _MOST)].clone()


def number_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Make a number from tensors, with a different weight for each element."""
    terms = [_number(t) for t in tensors]
    return sum(terms[1:], terms[0])


def _outcome(output: Any, parameters: Mapping[str, nn.Parameter]) -> Outcome:
    """Return the tensors of an output, and their gradients."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    learnt = [t for t in tensors if t.requires_grad]
    gradients: tuple[torch.Tensor | None, ...] = ()
    if learnt and parameters:
        gradients = torch.autograd.grad(number_of(learnt), list(parameters.values()), allow_unused=True)
    there = {name: some(grad) for name, grad in zip(parameters, gradients) if grad is not None}
    return Outcome([t.detach() for t in tensors], there)


def _number(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return (flat * torch.linspace(0.5, 1.5, len(flat), device=flat.device, dtype=flat.dtype)).mean()


def _largest(
    expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], rounding: Rounding
) -> str | None:
    """Describe where two sets of tensors differ most; None if nowhere."""
    if lost := sorted(expected.keys() ^ got.keys()):
        return f"{lost[0]}: only the {'model' if lost[0] in expected else 'stages'} has it"
    unlike = [
        name for name, t in expected.items() if t.shape != got[name].shape or t.dtype != got[name].dtype
    ]
    if unlike:
        a, b = (f"{list(t.shape)} {str(t.dtype)[6:]}" for t in (expected[unlike[0]], got[unlike[0]]))
        return f"{unlike[0]} is {a} in the model and {b} in the stages"
    sizes = {name: size_of(t) for name, t in expected.items() if t.numel()}
    largest, worst, found = max(sizes.values(), default=0.0), 0.0, None
    for name, size in sizes.items():
        own, of_all = max(rounding, _tolerance(expected[name].dtype))
        by, limit = distance(expected[name], got[name]), own * size + of_all * largest
        if by > limit and (excess := by / max(limit, 1e-30)) > worst:
            worst, found = excess, f"{name} differs by {by:.2g}, where its numbers are up to {size:.2g}"
    return found


def size_of(tensor: torch.Tensor) -> float:
    """Return the largest size of an element that is finite."""
    return float(_wide(tensor.detach()).abs().nan_to_num(0.0, 0.0).max())


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest distance of two elements, infinite if only one of them is NaN."""
    a, b = _wide(a.detach()), _wide(b.detach())
    same = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).abs().masked_fill(same, 0.0).nan_to_num(math.inf, math.inf).max())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _tolerance(dtype: torch.dtype) -> Rounding:
    narrow = dtype.is_floating_point and dtype.itemsize <= 2
    return _TOLERANCES.get(dtype, TO_16_BITS if narrow else _TOLERANCE)
