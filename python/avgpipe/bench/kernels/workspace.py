"""The operands of a section, shared by its variants so that all touch the same memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from avgpipe.bench.kernels.settings import KernelSettings
from avgpipe.bench.section import Section, Skipped, Variant

Shapes = tuple[tuple[int, ...], ...]

_LIMIT_ARRAYS = {"cpu": 1, "cuda": 2}  # of the limit that every section has, see `limits`
_BLOCK = 1 << 20  # random values that an array repeats: drawing 100 million takes longer than measuring


@dataclass
class Workspace:
    """Operands by name, made at first use: flat arrays of `elements`, and tensors of `shapes`.

    Values lie between 0.005 and 0.015: far from subnormal numbers, which processors compute slowly, for every
    dtype and however often a variant runs.
    """

    elements: int
    shapes: Shapes
    settings: KernelSettings
    _arrays: dict[str, Tensor] = field(default_factory=dict)
    _lists: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.settings.dtype)
        return dtype

    @property
    def device(self) -> str:
        return self.settings.device

    def bytes_of(self, values: float) -> float:
        """Bytes of so many values of the workspace's dtype."""
        return values * self.dtype.itemsize

    def flat(self, name: str) -> Tensor:
        """The array, of shape (elements,)."""
        if name not in self._arrays:
            self._arrays[name] = _fill(torch.empty(self.elements, dtype=self.dtype, device=self.device))
        return self._arrays[name]

    def tensors(self, name: str) -> list[Tensor]:
        """Operands in `shapes`, the same objects at every call: the array itself where there is one shape, else
        tensors of allocations of their own, as a model has them.
        """
        if self.shapes == one_tensor(self.elements):
            return [self.flat(name)]
        if name not in self._lists:
            empties = [torch.empty(shape, dtype=self.dtype, device=self.device) for shape in self.shapes]
            self._lists[name] = [_fill(tensor) for tensor in empties]
        return self._lists[name]

    def operands(self, *names: str) -> list[Any]:
        """What an operator takes for each name: the one tensor of `shapes`, or the list of them."""
        lists = [self.tensors(name) for name in names]
        return lists if len(self.shapes) > 1 else [tensors[0] for tensors in lists]

    @property
    def held_bytes(self) -> int:
        """Bytes of all operands made so far."""
        tensors = [*self._arrays.values(), *(t for made in self._lists.values() for t in made)]
        return sum(tensor.nbytes for tensor in tensors)


def _fill(tensor: Tensor) -> Tensor:
    flat = tensor.view(-1)
    block = torch.rand(min(_BLOCK, flat.numel()), generator=torch.Generator().manual_seed(0))
    block = (block * 0.01 + 0.005).to(tensor)
    whole = flat.numel() // block.numel() * block.numel()
    flat[:whole].view(-1, block.numel()).copy_(block)
    flat[whole:].copy_(block[: flat.numel() - whole])
    return tensor


def one_tensor(elements: int) -> Shapes:
    return ((elements,),)


def model_shapes(elements: int) -> Shapes:
    """61 tensors like those of a transformer of five blocks: 12 tensors each, and an embedding of what remains."""
    width = max(4, int(math.sqrt(elements / 100)) // 16 * 16)
    block = (
        *((width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)),
        *((width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)),
    )
    blocks = 5 * block
    return (*blocks, (elements - sum(math.prod(shape) for shape in blocks),))


def equal_shapes(count: int, each: int) -> Shapes:
    return ((each,),) * count


def make_section(
    settings: KernelSettings,
    shapes: Shapes,
    names: tuple[str, str, str],
    arrays: int,
    make: Callable[[Workspace], Sequence[Variant | Skipped]],
) -> Section:
    """A section over a workspace of `shapes`.

    names: question, case, and the question in words. arrays: how many operands of all elements the workspace makes,
        and baselines for a moment, besides the arrays of the limit.
    """
    elements = sum(math.prod(shape) for shape in shapes)
    itemsize = getattr(torch, settings.dtype).itemsize
    return Section(
        *names,
        elements,
        memory_bytes=(arrays + _LIMIT_ARRAYS[settings.device]) * elements * itemsize,
        prepare=lambda: make(Workspace(elements, shapes, settings)),
    )
