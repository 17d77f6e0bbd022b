"""The operators' formulas in float64, independent of the library, and arguments to try them on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import avgpipe_ext
from avgpipe_ext import reference

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def pull(x, z, alpha):
    return x + alpha * (z - x), z


def step(x, x_before, z, update, alpha, staleness):
    force = z - x_before if staleness else z - x
    return x + alpha * force, x_before, z, update + (x - x_before)


def easgd(x, z, update, alpha):
    pulled = alpha * (x - z)
    return x - pulled, z, update + pulled


def apply(z, update, scale):
    return z + scale * update, torch.zeros_like(update)


@dataclass(frozen=True)
class Case:
    """An operator with its scalar arguments."""

    name: str
    tensors: tuple[str, ...]  # names of its tensor arguments
    scalars: tuple[float, ...]
    formula: Callable[..., tuple[torch.Tensor, ...]]

    @property
    def operator(self):
        return getattr(avgpipe_ext, self.name)

    @property
    def twin(self):
        return getattr(reference, self.name)

    @property
    def packet(self):
        return getattr(torch.ops.avgpipe, self.name)

    def __str__(self) -> str:
        return self.name + ("" if len(self.scalars) == 1 else f"-staleness{self.scalars[1]}")


CASES = (
    Case("elastic_pull_", ("x", "z"), (0.3,), pull),
    Case("elastic_step_", ("x", "x_before", "z", "update"), (0.3, 0), step),
    Case("elastic_step_", ("x", "x_before", "z", "update"), (0.3, 1), step),
    Case("easgd_step_", ("x", "z", "update"), (0.3,), easgd),
    Case("reference_apply_", ("z", "update"), (0.3,), apply),
)


def arguments(case, shape, dtypes, seed=0, device="cpu"):
    """One tensor per argument of the case; dtypes is one dtype or one per argument."""
    if isinstance(dtypes, torch.dtype):
        dtypes = (dtypes,) * len(case.tensors)
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for dtype in dtypes]


def exact(case, tensors):
    """What the case makes of its arguments, in float64."""
    return case.formula(*(t.double() for t in tensors), *case.scalars)


def assert_near(results, expected, before):
    """One rounding of the stored dtype, and four of the arithmetic's on operands of the case's size."""
    size = torch.stack([t.double().abs() for t in before]).sum(0)
    for result, value in zip(results, expected):
        arithmetic = torch.float64 if result.dtype == torch.float64 else torch.float32
        bound = torch.finfo(result.dtype).eps / 2 * value.abs() + 4 * torch.finfo(arithmetic).eps * size
        bound = bound + torch.finfo(result.dtype).smallest_normal * torch.finfo(result.dtype).eps
        error = (result.double() - value).abs()
        assert bool((error <= bound).all()), f"error {error.max()} in {result.dtype}"
