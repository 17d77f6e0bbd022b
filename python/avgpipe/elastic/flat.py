"""Flat memory: one 1-D buffer per dtype and device, in which each tensor is a view.

So an averaging step is one pass over flat memory, and weights are exchanged by moving a pointer. The
operators support real floating dtypes and equal strides: a complex tensor is kept as the real tensor with one
more dimension of size 2 (every rule is linear with real coefficients), and a tensor that overlaps itself, has
gaps is kept dense. Gradients stay where autograd allocates them: our own buffer would have to be
zeroed, and read and written once more, in every batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

ALIGN_BYTES = 64  # each tensor starts on a cache line, so vector loads never straddle two of them


class Region(NamedTuple):
    """One tensor's part of flat memory: offset in elements of a buffer, shape and strides of its real form."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_complex: bool = False

    @property
    def stop(self) -> int:
        return self.offset + prod(self.shape)

    def view(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor."""
        flat = flats[self.buffer]
        real = flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.offset)
        return torch.view_as_complex(real) if self.is_complex else real


class Layout:
    """The places of ``parameters`` in flat memory, in their order.

    Attributes:
        keys: Dtype and device of each buffer, in order of appearance.
        sizes: Elements of each buffer.
        regions: One for each parameter.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], device: torch.device | None = None) -> None:
        """``device``: of the buffers; by default that of their parameters."""
        self.keys: list[tuple[torch.dtype, torch.device]] = []
        self.sizes: list[int] = []
        self.regions = [self._place(p, device or p.device) for p in parameters]

    def _place(self, p: torch.Tensor, device: torch.device) -> Region:
        key = (p.dtype.to_real(), device)
        if key not in self.keys:
            self.keys.append(key)
            self.sizes.append(0)
        buffer = self.keys.index(key)
        shape, strides = tuple(p.shape), dense_strides(p)
        if p.is_complex():
            shape, strides = (*shape, 2), (*(2 * s for s in strides), 1)
        region = Region(buffer, self.sizes[buffer], shape, strides, p.is_complex())
        step = ALIGN_BYTES // key[0].itemsize
        self.sizes[buffer] += -(-prod(shape) // step) * step
        return region

    def zeros(self, dtypes: Sequence[torch.dtype] | None = None) -> FlatBuffers:
        """Return new buffers, of other ``dtypes`` if given."""
        kinds = zip(dtypes or [dtype for dtype, _ in self.keys], self.sizes, self.keys)
        return FlatBuffers(
            self, [torch.zeros(size, dtype=d, device=device) for d, size, (_, device) in kinds]
        )

    def tensors(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return views of the buffers ``flats`` in the parameters' order, shapes and (complex) dtypes."""
        return [region.view(flats) for region in self.regions]


@dataclass(frozen=True)
class FlatBuffers:
    """One set of values in a layout. The gaps that alignment leaves stay zero under every rule."""

    layout: Layout
    flats: list[torch.Tensor]

    def tensors(self) -> list[torch.Tensor]:
        """Return the values in the parameters' order, shapes and (complex) dtypes; views of the buffers."""
        return self.layout.tensors(self.flats)

    def zero_(self) -> None:
        for flat in self.flats:
            flat.zero_()


class Arena:
    """Moves ``parameters`` (of one device) into flat buffers: ``weights``, laid out by ``layout``.

    Parameters that are already in such buffers stay there.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.layout = Layout(self.parameters)
        there = _buffers_of(self.layout, self.parameters)
        self.weights = there or move_into(self.layout.zeros(), self.parameters).flats

    @property
    def grads(self) -> list[torch.Tensor]:
        """The gradients that parameters have received since :meth:`drop_grads`."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def drop_grads(self) -> None:
        for p in self.parameters:
            p.grad = None

    def settle_grads(self) -> None:
        """Give all gradients, which are complete, the form of their parameters."""

    def local_grads(self) -> list[torch.Tensor | None]:
        """Return this process's part of each parameter's gradient, in the same memory."""
        return [p.grad for p in self.parameters]

    def put_local_grad(self, number: int, grad: torch.Tensor) -> None:
        """Give a parameter a gradient of which ``grad`` is this process's part."""
        self.parameters[number].grad = grad

    def squared_norm(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the square of the norm of some parameters or gradients together, float64 []."""
        norms = torch._foreach_norm(list(tensors))
        if any(norm.dtype != norms[0].dtype for norm in norms):
            norms = tuple(norm.double() for norm in norms)
        return torch.stack(norms).double().square().sum()

    def tensors(self) -> list[torch.Tensor]:
        """Return the weights in training, by parameter; parameters may show others at the moment."""
        return self.layout.tensors(self.weights)

    def local_tensors(self) -> list[torch.Tensor]:
        """Return this process's part of each parameter's weights, in the same memory."""
        return self.tensors()

    def gathered(self, layout: Layout) -> list[torch.Tensor]:
        """Return the whole weights, laid out by ``layout``, which is for the whole shapes."""
        return self.weights

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole of a tensor of the stage."""
        return tensor.detach()

    def fill(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Copy a whole tensor, which all processes have, into one of the stage's."""
        target.copy_(value)

    def point_at(self, buffers: Sequence[torch.Tensor]) -> None:
        """Make the parameters views of ``buffers``, laid out like ``weights``, without copying."""
        for p, view in zip(self.parameters, self.layout.tensors(buffers)):
            p.data = view

    @contextmanager
    def reading(self, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        """Make the parameters views of ``buffers`` inside the block, without copying."""
        own = [p.data for p in self.parameters]
        self.point_at(buffers)
        try:
            yield
        finally:
            for p, data in zip(self.parameters, own):
                p.data = data


def move_into(buffers: FlatBuffers, tensors: Iterable[torch.Tensor]) -> FlatBuffers:
    """Copy the tensors' values into the buffers, make the tensors views of them, and return the buffers."""
    for t, view in zip(tensors, buffers.tensors()):
        view.copy_(t.data)
        t.data = view
    return buffers


def rehome(
    layout: Layout, tensors: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer
) -> FlatBuffers | str:
    """Move ``tensors`` into flat buffers like ``layout``'s, of their own dtypes, or return the obstacle.

    Tensors that are already in such buffers stay there.

    Args:
        layout: That of the reference, with a region for each tensor.
        tensors: Those of a replica.
        optimizer: Its optimizer, whose parameters may be views of tensors that are not moved.
    """
    found: list[set[torch.dtype]] = [set() for _ in layout.keys]
    for t, region in zip(tensors, layout.regions):
        dtype, device = layout.keys[region.buffer]
        narrow = dtype == torch.float32 and t.dtype in (torch.bfloat16, torch.float16)
        if t.is_complex() or t.stride() != region.strides:
            return "a parameter is complex, or its strides leave gaps or are not those of the reference"
        if t.device != device or not (t.dtype == dtype or narrow):
            return "a parameter has another dtype or device than the reference's"
        found[region.buffer].add(t.dtype)
    if any(len(dtypes) != 1 for dtypes in found):
        return "parameters of several dtypes belong to one buffer of the reference"
    if (flats := _buffers_of(layout, tensors)) is not None:
        return FlatBuffers(layout, flats)
    places = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
    if len(set(places)) < len(places) or not all(map(_owns_its_memory, tensors)):
        return "parameters share memory with each other or with another tensor"
    if (name := hidden_view(optimizer, tensors, tensors)) is not None:
        return f"the optimizer keeps weights by their memory, in its attribute {name}"
    return move_into(layout.zeros([dtypes.pop() for dtypes in found]), tensors)


def _buffers_of(layout: Layout, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return the buffers that have the tensors at the layout's places; None unless they exist."""
    flats: dict[int, torch.Tensor] = {}
    for t, region in zip(tensors, layout.regions):
        size, storage = layout.sizes[region.buffer], t.untyped_storage()
        if t.storage_offset() != region.offset or storage.nbytes() != size * t.element_size():
            return None
        # not detach(), which shares the parameter's version counter: versions of weights copy into these buffers
        flat = flats.setdefault(region.buffer, t.data.as_strided((size,), (1,), 0))
        if flat.untyped_storage().data_ptr() != storage.data_ptr():
            return None
    return [flats[b] for b in range(len(layout.keys))]


def hidden_view(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> str | None:
    """Return the attribute in which an optimizer holds ``weights`` by tensors other than ``parameters``."""
    memory = {_address(t) for t in weights if t.numel()}
    own = {id(p) for p in parameters}
    held = _held("", vars(optimizer), set())
    return next((name for name, t in held if id(t) not in own and _address(t) in memory), None)


def _held(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a value, with their names."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = enumerate(value)
    elif isinstance(value, torch.optim.Optimizer):
        parts = vars(value).items()
    for key, part in parts:
        yield from _held(f"{name}.{key}" if name else str(key), part, seen)


def _address(t: torch.Tensor) -> int | None:
    return t.untyped_storage().data_ptr() if t.layout == torch.strided else None


def _owns_its_memory(t: torch.Tensor) -> bool:
    whole = t.untyped_storage().nbytes() == t.numel() * t.element_size()
    return whole and type(t.data) is torch.Tensor and not (t.is_cpu and t.untyped_storage().is_shared())


def dense_strides(p: torch.Tensor) -> tuple[int, ...]:
    """Return a dense tensor's own strides, in any order of dimensions; else dense ones."""
    return torch.empty_like(p, device="meta").stride()


# ---- subclasses of tensors -------------------------------------------------------------------------------------------


def is_made_of_others(value: Any) -> bool:
    """Whether a tensor wraps others and lists them: a traceable wrapper subclass, in torch's terms."""
    return isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__")


def copied(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, also if its class, or a wrapped one's, has no clone()."""
    if not is_made_of_others(local_part(value)):
        return value.clone()
    kind: Any = type(value)
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(value, name) for name in names}
    own = {name: copied(part) if isinstance(part, torch.Tensor) else part for name, part in parts.items()}
    made: torch.Tensor = kind.__tensor_unflatten__(own, context, value.shape, value.stride())
    return made


def local_part(value: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor; any other tensor unchanged."""
    part: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return part
