"""Where tensors lie in flat memory: one 1-D buffer per dtype and device, in which each tensor is a view.

The operators know real floating dtypes and equal strides. So a complex tensor is kept as the real tensor with one
more dimension of size 2 (every rule is linear with real coefficients), and a tensor that overlaps itself, has gaps or
is sparse is kept dense.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch

T = TypeVar("T")

_ALIGN_BYTES = 64  # each tensor starts on a cache line, so vector loads never straddle two of them


@dataclass(frozen=True)
class Entry:
    """The place of one tensor: ``offset`` in elements of a buffer, ``shape`` and ``strides`` of its real form."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_complex: bool

    def view(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor's real form."""
        return flats[self.buffer].as_strided(self.shape, self.strides, self.offset)


class Layout:
    """The places of ``parameters``, one entry each and in their order.

    ``keys`` and ``sizes`` are dtype and device, and elements, of the buffers, in order of appearance.

    device: where the buffers are; by default where their parameters are.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], device: torch.device | None = None) -> None:
        self.keys: list[tuple[torch.dtype, torch.device]] = []
        self.sizes: list[int] = []
        self.entries = [self._place(p, device or p.device) for p in parameters]

    def _place(self, p: torch.Tensor, device: torch.device) -> Entry:
        key = (p.dtype.to_real(), device)
        if key not in self.keys:
            self.keys.append(key)
            self.sizes.append(0)
        buffer = self.keys.index(key)
        # of a dense tensor its own strides, in whatever order of dimensions; else dense ones
        shape, strides = tuple(p.shape), torch.empty_like(p, layout=torch.strided, device="meta").stride()
        if p.is_complex():
            shape, strides = (*shape, 2), (*(2 * s for s in strides), 1)
        entry = Entry(buffer, self.sizes[buffer], shape, tuple(strides), p.is_complex())
        step = _ALIGN_BYTES // key[0].itemsize
        self.sizes[buffer] += -(-prod(shape) // step) * step
        return entry

    def zeros(self) -> Buffers:
        return Buffers(self)

    def tensors(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The places in the buffers ``flats``, in the parameters' order, shapes and (complex) dtypes."""
        views = [e.view(flats) for e in self.entries]
        return [torch.view_as_complex(v) if e.is_complex else v for e, v in zip(self.entries, views)]

    def by_buffer(self, items: Iterable[T]) -> list[list[T]]:
        """``items``, one for each entry, in one list per buffer."""
        lists: list[list[T]] = [[] for _ in self.keys]
        for e, item in zip(self.entries, items):
            lists[e.buffer].append(item)
        return lists


class Buffers:
    """One set of values in a layout: ``flats`` are the 1-D buffers, ``views`` the tensors' real forms in each.

    The gaps that alignment leaves stay zero under every rule.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.flats = [
            torch.zeros(size, dtype=dtype, device=device)
            for size, (dtype, device) in zip(layout.sizes, layout.keys)
        ]
        self.views = layout.by_buffer(e.view(self.flats) for e in layout.entries)

    def tensors(self) -> list[torch.Tensor]:
        """The values in the parameters' order, shapes and (complex) dtypes; views of the buffers."""
        return self.layout.tensors(self.flats)

    def zero_(self) -> None:
        for flat in self.flats:
            flat.zero_()


def real(t: torch.Tensor) -> torch.Tensor:
    """The real form of a strided tensor (a view)."""
    return torch.view_as_real(t.detach()) if t.is_complex() else t
