"""The machine's own limit: the least work that moves memory, in torch's own fastest kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from avgpipe.bench.kernels.settings import KernelSettings
from avgpipe.bench.kernels.workspace import Workspace, make_section, one_tensor
from avgpipe.bench.section import Section, Variant


def limit(space: Workspace) -> Variant:
    """What fractions are of: on the CPU multiplying an array in place, which no copy comes near, since every line of
    memory is written where it was read; on CUDA a copy.
    """
    return copy(space) if space.device == "cuda" else multiply(space)


def multiply(space: Workspace) -> Variant:
    (array,) = _arrays(space, 1)
    return Variant("mul_ in place", "limit", space.bytes_of(2), lambda: array.mul_(1.0))


def copy(space: Workspace) -> Variant:
    target, source = _arrays(space, 2)
    return Variant("copy_", "limit", space.bytes_of(2), lambda: target.copy_(source))


def triad(space: Workspace) -> Variant:
    """a = b + s c: McCalpin's STREAM triad."""
    a, b, c = _arrays(space, 3)
    return Variant("triad", "limit", space.bytes_of(3), lambda: torch.add(b, c, alpha=0.5, out=a))


def sections(settings: KernelSettings, elements: int) -> list[Section]:
    def make(space: Workspace) -> list[Variant]:
        other = multiply(space) if space.device == "cuda" else copy(space)
        return [limit(space), other, triad(space)]

    names = ("limit", "one tensor", "How fast does this memory move?")
    return [make_section(settings, one_tensor(elements), names, 2, make)] if settings.asks("limit") else []


def _arrays(space: Workspace, count: int) -> list[Tensor]:
    """Arrays of the limit's own, as float32: arithmetic in 16 bits is no measure of memory."""
    flats = [space.flat(f"limit {i}") for i in range(count)]
    values = max(1, 4 // space.dtype.itemsize)
    return [flat[: flat.numel() // values * values].view(torch.float32) for flat in flats]
