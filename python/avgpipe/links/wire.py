"""How a message lies in memory: the tensors one after another, each at a multiple of 64 bytes.

The structure around them, a header, is sent once and named by a number from then on, so what a message costs beside its
tensors is four integers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from avgpipe.device import handed
from avgpipe.links.message import Channel, Header, TensorInfo, leaf_info
from avgpipe_ext import pack, unpack_

_KNOWN = 64  # headers that a channel remembers
_ALIGNMENT = 64  # bytes: a cache line, and more than any vector instruction wants

Copy = Callable[[int, int, int], object]  # destination, source, bytes

_TENSOR = pytree.tree_flatten(0)[1]
_LISTS = [pytree.tree_flatten([0] * n)[1] for n in range(17)]


def padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Format:
    """The layout of all messages that have one header. ``bytes``: of the tensors, with their padding."""

    def __init__(self, header: Header, wire_dtype: torch.dtype | None) -> None:
        self.header = header
        self.places: list[_Place] = []
        end = 0
        for leaf in header.leaves:
            if isinstance(leaf, TensorInfo):
                place = _Place(leaf, wire_dtype, end)
                self.places.append(place)
                end += padded(place.bytes)
        self.bytes = end
        infos = [x for x in header.leaves if isinstance(x, TensorInfo)]
        # The commonest message by far is one tensor, or a list of them: rebuilt without walking a tree.
        self._alone = header.structure == _TENSOR and len(infos) == 1
        self._flat = len(header.leaves) < len(_LISTS) and header.structure == _LISTS[len(header.leaves)]

    def write(self, tensors: list[torch.Tensor], address: int, buffer: Any, offset: int, copy: Copy) -> None:
        """Put ``tensors`` at ``address``; ``buffer`` and ``offset`` say the same for what ``copy`` cannot do."""
        for tensor, place in zip(tensors, self.places):
            if place.cast is None and _is_plain(tensor):
                copy(address + place.offset, tensor.data_ptr(), place.bytes)
            elif place.cast is not None and place.bytes:
                if tensor.is_cpu:
                    pack([tensor.resolve_neg()], out=place.flat(buffer(), offset))
                else:  # rounded over there; the copy keeps the host until it is done, as the one below does
                    place.flat(buffer(), offset).copy_(pack([tensor.resolve_neg()], dtype=place.cast))
            elif place.bytes:
                place.flat(buffer(), offset).view(place.shape).copy_(tensor)

    def read(self, buffer: Any, offset: int, device: torch.device) -> Any:
        """The message whose tensors begin at ``offset`` of ``buffer``. On the CPU they are views, which keep it."""
        return self.build([place.read(buffer, offset, device) for place in self.places])

    def build(self, tensors: list[torch.Tensor]) -> Any:
        """The message with these tensors."""
        if self._alone:
            return tensors[0]
        if self._flat and len(tensors) == len(self.header.leaves):
            return tensors
        stream = iter(tensors)
        leaves = [next(stream) if isinstance(x, TensorInfo) else x for x in self.header.leaves]
        return leaves if self._flat else pytree.tree_unflatten(leaves, self.header.structure)


class _Place:
    """Where one tensor of a message lies. ``cast``: the dtype in which it travels, if that is not its own."""

    def __init__(self, info: TensorInfo, wire_dtype: torch.dtype | None, offset: int) -> None:
        self.dtype: torch.dtype = getattr(torch, info.dtype)
        # Not single numbers: that saves nothing, and one of them is the batch's loss.
        narrower = (
            bool(info.shape) and wire_dtype is not None and self.dtype in (torch.float32, torch.float64)
        )
        self.cast = wire_dtype if narrower else None
        self.shape, self.requires_grad, self.offset = info.shape, info.requires_grad, offset
        self.count = torch.Size(info.shape).numel()
        self._on_wire = self.cast or self.dtype
        self.bytes = self.count * self._on_wire.itemsize

    def flat(self, buffer: Any, offset: int) -> torch.Tensor:
        return torch.frombuffer(buffer, dtype=self._on_wire, count=self.count, offset=offset + self.offset)

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """Where it lies in a message that is in ``memory``, a flat tensor of bytes."""
        return memory[self.offset : self.offset + self.bytes].view(self._on_wire)

    def read(self, buffer: Any, offset: int, device: torch.device) -> torch.Tensor:
        if self.count == 0 or self.cast is not None:
            value = torch.empty(self.shape, dtype=self.dtype, device=device)
            if self.count:
                unpack_(self.flat(buffer, offset).to(device), [value])
        else:
            value = self.flat(buffer, offset).view(self.shape)
            if device.type != "cpu":
                value = value.to(device)
        return value.requires_grad_() if self.requires_grad else value


class Encoder:
    """The sending end's memory of a channel: which headers the other end knows."""

    def __init__(self, wire_dtype: torch.dtype | None) -> None:
        self._wire_dtype = wire_dtype
        self._formats: dict[Any, tuple[int, Format]] = {}
        self._signatures: list[Any] = [None] * _KNOWN
        self._sent = 0

    def encode(self, value: Any) -> tuple[int, Format, bytes, list[torch.Tensor]]:
        """The number of the value's header, its format, the header's text if it is new, and the tensors."""
        name, structure, leaves = _flatten(value)
        tensors = []
        signature: list[Any] = [name]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                signature.append((leaf.shape, leaf.dtype, leaf.requires_grad))
                tensors.append(leaf.detach())
            else:
                signature.append((type(leaf), leaf or str(leaf)))  # for 0.0 == -0.0
        key = tuple(signature)
        try:
            known = self._formats.get(key)
        except TypeError:  # a leaf that cannot be hashed cannot travel either: learn says so
            known = None
        text = b""
        if known is None:
            known, text = self._learn(key, structure, leaves)
        return known[0], known[1], text, tensors

    def _learn(
        self, key: Any, structure: pytree.TreeSpec, leaves: list[Any]
    ) -> tuple[tuple[int, Format], bytes]:
        header = Header(structure, tuple(leaf_info(leaf) for leaf in leaves))
        text = header.to_bytes()
        number = self._sent % _KNOWN
        self._formats.pop(self._signatures[number], None)
        self._signatures[number] = key
        self._sent += 1
        self._formats[key] = number, Format(header, self._wire_dtype)
        return self._formats[key], text


class Decoder:
    """The receiving end's."""

    def __init__(self, wire_dtype: torch.dtype | None, device: torch.device) -> None:
        self._wire_dtype, self._device = wire_dtype, device
        self._has_streams = device.type == "cuda"
        self._formats: list[Format | None] = [None] * _KNOWN

    def decode(self, number: int, text_bytes: int, buffer: Any, offset: int = 0) -> Any:
        """The value in ``buffer``, from ``offset`` on: the header's text, if there is any, and the tensors."""
        text = bytes(memoryview(buffer).cast("B")[offset : offset + text_bytes]) if text_bytes else b""
        value = self.format(number, text).read(buffer, offset + padded(text_bytes), self._device)
        # On CUDA copied, or unpacked, by this thread's current stream, which need not be the lane's.
        return handed(value, self._device) if self._has_streams else value

    def format(self, number: int, text: bytes) -> Format:
        """The format of messages with header ``number``, which is ``text`` if it comes along."""
        if text:
            self._formats[number] = Format(Header.from_bytes(text), self._wire_dtype)
        known = self._formats[number] if 0 <= number < _KNOWN else None
        if known is None:
            raise RuntimeError(f"a message names header {number}, which never came")
        return known


def _flatten(value: Any) -> tuple[Any, pytree.TreeSpec, list[Any]]:
    """A name for the structure that is quicker to hash than the structure, which comes next; and the leaves."""
    if isinstance(value, torch.Tensor):
        return None, _TENSOR, [value]
    if type(value) is list and len(value) < len(_LISTS):
        for leaf in value:
            if leaf is not None and not isinstance(leaf, torch.Tensor):
                break
        else:
            return len(value), _LISTS[len(value)], value
    leaves, structure = pytree.tree_flatten(value)
    return structure, structure, leaves


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory holds its values in order: conjugates and imaginary parts of them may be lazy."""
    return (
        tensor.is_contiguous()
        and tensor.device.type == "cpu"
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def narrowed(channel: Channel, wire_dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype in which a channel's tensors travel: only activations and gradients of training may lose bits."""
    return wire_dtype if channel.kind in "FBXY" else None


def view(address: int, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    """``size`` bytes of memory as a buffer, which must not outlive the memory."""
    return (ctypes.c_ubyte * size).from_address(address)
