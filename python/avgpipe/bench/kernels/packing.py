"""Many tensors into one buffer for sending and back, against torch.cat and a plain copy."""

from __future__ import annotations

from collections.abc import Callable

import torch

import avgpipe_ext
from avgpipe.bench.kernels.limits import copy, limit
from avgpipe.bench.kernels.settings import KernelSettings
from avgpipe.bench.kernels.workspace import Workspace, make_section, model_shapes
from avgpipe.bench.section import Section, Variant


def sections(settings: KernelSettings, elements: int) -> list[Section]:
    """As they are, and narrowed to bfloat16 on the wire."""
    asks = "How near to a plain copy are tensors packed for sending, and unpacked?"
    made = []
    for question, make in (("pack", pack), ("unpack", unpack)):
        for wire in dict.fromkeys((settings.dtype, "bfloat16")):
            names = (question, f"61 tensors of {settings.dtype}, buffer of {wire}", asks)
            # Tensors, the limits' arrays, the buffer, and a new one with its temporary.
            if settings.asks(question):
                shapes, run = model_shapes(elements), make(getattr(torch, wire))
                made.append(make_section(settings, shapes, names, 5, run))
    return made


def _moved(space: Workspace, wire: torch.dtype) -> float:
    return space.dtype.itemsize + wire.itemsize


def _limits(space: Workspace) -> list[Variant]:
    """The one that fractions are of, and a copy, which is what packing is."""
    return [limit(space)] if space.device == "cuda" else [limit(space), copy(space)]


def pack(wire: torch.dtype) -> Callable[[Workspace], list[Variant]]:
    def make(space: Workspace) -> list[Variant]:
        tensors, buffer = space.tensors("x"), torch.empty(space.elements, dtype=wire, device=space.device)
        flats = [tensor.view(-1) for tensor in tensors]
        moved = _moved(space, wire)

        def cat() -> torch.Tensor:
            return torch.cat([tensor.reshape(-1) for tensor in tensors]).to(wire)

        def into_buffer() -> None:
            torch._foreach_copy_(list(torch.split(buffer, [flat.numel() for flat in flats])), flats)

        new = "torch.cat" if wire == space.dtype else "torch.cat + to"
        kept = "_foreach_copy_ into a kept buffer"
        return [
            *_limits(space),
            Variant("pack", "ours", moved, lambda: avgpipe_ext.pack(tensors, wire), (new,)),
            Variant(new, "baseline", moved, cat),
            Variant(
                "pack, a kept buffer", "ours", moved, lambda: avgpipe_ext.pack(tensors, out=buffer), (kept,)
            ),
            Variant(kept, "baseline", moved, into_buffer),
        ]

    return make


def unpack(wire: torch.dtype) -> Callable[[Workspace], list[Variant]]:
    def make(space: Workspace) -> list[Variant]:
        tensors, buffer = space.tensors("x"), space.flat("z").to(wire)
        flats = [tensor.view(-1) for tensor in tensors]
        parts = list(torch.split(buffer, [flat.numel() for flat in flats]))
        moved = _moved(space, wire)

        def one_by_one() -> None:
            for tensor, part in zip(flats, parts):
                tensor.copy_(part)

        return [
            *_limits(space),
            Variant("unpack_", "ours", moved, lambda: avgpipe_ext.unpack_(buffer, tensors)),
            Variant("_foreach_copy_", "baseline", moved, lambda: torch._foreach_copy_(flats, parts)),
            Variant("copy_, one by one", "baseline", moved, one_by_one),
        ]

    return make
