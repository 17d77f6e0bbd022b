"""Whether the stages of a model compute what the model itself does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

# Elements of a parameter whose gradient is looked at: those of a large model would be as large as itself.
_MOST = 1 << 20
_TOLERANCE, _TOLERANCE_16 = 1e-5, 2e-2  # of the largest number in what is compared; of 16 bits


def difference(model: nn.Module, whole: Callable[[], Any], stages: Callable[[], Any]) -> str | None:
    """Compare what ``model`` returns, ``whole()``, and what its stages return; both are pytrees of tensors.

    Compared are outputs, and gradients of a number made of them, by all parameters but the largest. The caller has seen
    to it that nothing is drawn at random.

    Returns:
        None if they are equal but for rounding; else how they differ.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel() <= _MOST}
    with torch.enable_grad():
        expected, gradients = _outcome(whole(), parameters)
        output, others = _outcome(stages(), parameters)
    if len(output) != len(expected):
        return f"the model returns {len(expected)} tensors and the stages {len(output)}"
    numbered = {f"output {n}": t for n, t in enumerate(expected)}
    found = _largest(numbered, dict(zip(numbered, output)))
    if found is None and (found := _largest(gradients, others)) is not None:
        found = f"gradient of {found}"
    return found


def _outcome(
    output: Any, parameters: Mapping[str, nn.Parameter]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors of an output, and the gradients that there are."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    terms = [_number(t) for t in tensors if t.requires_grad]
    gradients: tuple[torch.Tensor | None, ...] = ()
    if terms and parameters:
        gradients = torch.autograd.grad(
            sum(terms[1:], terms[0]), list(parameters.values()), allow_unused=True
        )
    there = {name: grad for name, grad in zip(parameters, gradients) if grad is not None}
    return [t.detach() for t in tensors], there


def _number(tensor: torch.Tensor) -> torch.Tensor:
    """Make a number of a tensor to which its elements count differently."""
    flat = tensor.flatten().to(torch.promote_types(tensor.dtype, torch.float32))
    return (flat * torch.linspace(0.5, 1.5, len(flat), device=flat.device, dtype=flat.dtype)).mean()


def _largest(expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]) -> str | None:
    """Say where two sets of tensors differ most; None if nowhere."""
    if lost := sorted(expected.keys() ^ got.keys()):
        return f"{lost[0]}: only one of the two has it"
    unlike = [
        name for name, t in expected.items() if t.shape != got[name].shape or t.dtype != got[name].dtype
    ]
    if unlike:
        a, b = (f"{list(t.shape)} {str(t.dtype)[6:]}" for t in (expected[unlike[0]], got[unlike[0]]))
        return f"{unlike[0]} is {a} of the model and {b} of the stages"
    differences = {
        name: float((t.double() - got[name].double()).abs().max())
        for name, t in expected.items()
        if t.numel()
    }
    sizes = {name: float(t.double().abs().max()) for name, t in expected.items() if t.numel()}
    largest = max(sizes.values(), default=0.0)
    for name, by in sorted(differences.items(), key=lambda pair: -pair[1]):
        narrow = expected[name].dtype in (torch.float16, torch.bfloat16)
        # NaN on both sides is refused too: it would hide all else.
        if not by <= (_TOLERANCE_16 if narrow else _TOLERANCE) * max(largest, 1e-30):
            return f"{name} differs by {by:.2g}, where numbers are up to {largest:.2g}"
    return None
