"""Where the tensors of a reference lie: one flat buffer per dtype and device, in which each tensor is a view.

The operators know real floating dtypes and equal strides. So a complex tensor is kept as the real tensor with
one more dimension of size 2 (every rule is linear with real coefficients), and a tensor that overlaps itself,
has gaps or is sparse is kept dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ALIGN_BYTES = 64  # each tensor starts on a cache line, so vector loads never straddle two of them
_REAL = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Entry:
    """The place of one tensor: ``offset`` in elements, ``shape`` and ``strides`` of its real form."""

    index: int  # position in the reference's list of parameters
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_complex: bool

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.shape, self.strides, self.offset)


class Layout:
    """The places of those of ``parameters`` that take part in the averaging.

    Frozen ``nn.Parameter``s and integer tensors take no part. A plain tensor does: it is a flat buffer whose
    views are the parameters, or a weight of functional code.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.keys: list[tuple[torch.dtype, torch.device]] = []
        self.entries: list[list[Entry]] = []  # one list per buffer
        self.sizes: list[int] = []
        for index, p in enumerate(parameters):
            if takes_part(p):
                self._add(index, p)
        self.indices = sorted(e.index for entries in self.entries for e in entries)

    def _add(self, index: int, p: torch.Tensor) -> None:
        if p.layout not in (torch.strided, torch.sparse_coo):
            raise ValueError(
                f"parameters[{index}] has layout {p.layout}; use torch.strided or torch.sparse_coo"
            )
        dtype = _REAL.get(p.dtype, p.dtype)
        if dtype not in DTYPES:
            raise TypeError(
                f"parameters[{index}] has dtype {p.dtype}; cast it to float32, float64, bfloat16 or float16"
            )
        key = (dtype, p.device)
        if key not in self.keys:
            self.keys.append(key)
            self.entries.append([])
            self.sizes.append(0)
        buffer = self.keys.index(key)
        shape, strides = tuple(p.shape), _dense_strides(p)
        if p.is_complex():
            shape, strides = (*shape, 2), (*(2 * s for s in strides), 1)
        self.entries[buffer].append(Entry(index, self.sizes[buffer], shape, strides, p.is_complex()))
        step = ALIGN_BYTES // dtype.itemsize
        numel = p.numel() * (2 if p.is_complex() else 1)
        self.sizes[buffer] += -(-numel // step) * step

    def zeros(self) -> Buffers:
        return Buffers(self)


class Buffers:
    """One set of values in a layout: ``flats`` are the 1-D buffers, ``views`` the tensors' real forms there.

    The gaps that alignment leaves stay zero under every rule.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.flats = [
            torch.zeros(size, dtype=dtype, device=device)
            for size, (dtype, device) in zip(layout.sizes, layout.keys)
        ]
        self.views = [[e.view(flat) for e in entries] for flat, entries in zip(self.flats, layout.entries)]

    def tensors(self) -> list[torch.Tensor]:
        """The values in the parameters' order, shapes and (complex) dtypes; views of the buffers."""
        by_index: dict[int, torch.Tensor] = {}
        for entries, views in zip(self.layout.entries, self.views):
            for e, view in zip(entries, views):
                by_index[e.index] = torch.view_as_complex(view) if e.is_complex else view
        return [by_index[i] for i in self.layout.indices]

    def zero_(self) -> None:
        for flat in self.flats:
            flat.zero_()


def takes_part(p: torch.Tensor) -> bool:
    """Whether a tensor given to a Reference is averaged, or only held."""
    frozen = isinstance(p, torch.nn.Parameter) and not p.requires_grad
    return not frozen and (p.is_floating_point() or p.is_complex())


def is_dense(t: torch.Tensor) -> bool:
    """No gaps and no overlaps: the elements fill one piece of memory, in whatever order of dimensions."""
    if t.layout != torch.strided:
        return False
    expected = 1
    for stride, size in sorted((st, s) for s, st in zip(t.shape, t.stride()) if s != 1):
        if stride != expected:
            return t.numel() == 0
        expected *= size
    return True


def real(t: torch.Tensor) -> torch.Tensor:
    """The real form of a strided tensor (a view)."""
    return torch.view_as_real(t.detach()) if t.is_complex() else t


def _dense_strides(p: torch.Tensor) -> tuple[int, ...]:
    if is_dense(p):
        return tuple(p.stride())
    return tuple(torch.empty(p.shape, device="meta").stride())
