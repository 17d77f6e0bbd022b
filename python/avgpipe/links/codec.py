"""The layout of messages in memory.

A message's *format* (structure, shapes, dtypes) is sent as text once per channel and then named by a number,
so a message costs only a few integers beside its tensors. The tensors lie one after another, each at a
multiple of 64 bytes.
"""

from __future__ import annotations

import ctypes
import json
import sys
import zlib
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from avgpipe.device import (
    copy_stream,
    current_stream,
    has_streams,
    on_accelerator,
    ready_on_event,
    used_on,
)
from avgpipe.errors import PipelineError
from avgpipe.links.link import OF_MICRO_BATCHES, Key, Message, TensorInfo, described
from avgpipe_ext import pack, unpack_
from avgpipe_ext.ring import copy

_KNOWN = 64  # formats that a channel keeps


_ALIGNMENT = 64  # bytes: a cache line, and more than any vector instruction needs


_TENSOR = pytree.tree_flatten(0)[1]


_LISTS = [pytree.tree_flatten([0] * n)[1] for n in range(17)]


def padded(size: int) -> int:
    """Round a number of bytes up to the alignment."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Format:
    """The layout of messages of one structure, shapes and dtypes.

    Args:
        structure: The pytree around the leaves.
        leaves: A TensorInfo for a tensor; a plain value itself.
        wire_dtype: The dtype in which float32 and float64 are sent; None keeps theirs.

    Attributes:
        bytes: Of the tensors, with their padding.
        end: Of the last tensor, without.
    """

    def __init__(
        self, structure: pytree.TreeSpec, leaves: tuple[Any, ...], wire_dtype: torch.dtype | None
    ) -> None:
        self._structure, self._leaves = structure, leaves
        self.slices: list[_Slice] = []
        self.bytes = self.end = 0
        for leaf in leaves:
            if isinstance(leaf, TensorInfo):
                self.slices.append(_Slice(leaf, wire_dtype, self.bytes))
                self.end = self.bytes + self.slices[-1].bytes
                self.bytes += padded(self.slices[-1].bytes)
        # The commonest message by far is one tensor, or a list of them: rebuilt without walking a tree.
        self._alone = structure == _TENSOR and len(self.slices) == 1
        self._flat = len(leaves) < len(_LISTS) and structure == _LISTS[len(leaves)]

    def to_bytes(self) -> bytes:
        """Encode structure and leaves as text."""
        structure = pytree.treespec_dumps(self._structure)
        _check_node(json.loads(structure)[1])
        return json.dumps([structure, [_leaf_to_json(x) for x in self._leaves]]).encode()

    @classmethod
    def from_bytes(cls, data: bytes, wire_dtype: torch.dtype | None = None) -> Format:
        """Decode what ``to_bytes`` made. TypeError for types that this process has not loaded."""
        structure, leaves = json.loads(data)
        _check_node(json.loads(structure)[1])
        return cls(pytree.treespec_loads(structure), tuple(_leaf_from_json(x) for x in leaves), wire_dtype)

    def write(self, tensors: list[torch.Tensor], target: int | torch.Tensor, pinned: bool = False) -> None:
        """Copy a message's tensors to ``target``: an address of the host's memory, or a flat tensor of bytes.

        A copy from an accelerator to the host blocks the host until it is done, except to ``pinned`` memory.
        """
        for tensor, place in zip(tensors, self.slices):
            if not place.bytes:
                continue
            if place.cast is None and isinstance(target, int) and not pinned and _is_plain(tensor):
                copy(target + place.offset, tensor.data_ptr(), place.bytes)
                continue
            flat = place.of(view(target, self.bytes) if isinstance(target, int) else target, 0)
            if place.cast is None:
                flat.view(place.shape).copy_(tensor, non_blocking=pinned or on_accelerator(flat))
            elif tensor.device == flat.device:
                pack([tensor.resolve_neg()], out=flat)
            else:  # rounded on its own device
                flat.copy_(pack([tensor.resolve_neg()], dtype=place.cast), non_blocking=pinned)

    def write_all(self, text: bytes, tensors: list[torch.Tensor], address: int, pinned: bool = False) -> None:
        """Write the format's text, if the other end lacks it, and after it the tensors, like ``write``."""
        if text:
            ctypes.memmove(address, text, len(text))
        self.write(tensors, address + padded(len(text)), pinned)

    def is_memory_of(self, tensors: list[torch.Tensor]) -> bool:
        """Whether a message is exactly the memory of its only tensor."""
        return len(self.slices) == 1 and self.slices[0].cast is None and _is_in_order(tensors[0])

    def read(self, memory: Any, offset: int, device: torch.device) -> Any:
        """Return the message whose tensors begin at ``offset`` of ``memory``, a buffer or a flat tensor of bytes.

        Tensors that were sent unchanged, and are on ``device`` already, are views, which keep the memory.
        """
        tensors = [place.read(memory, offset, device) for place in self.slices]
        if self._alone:
            return tensors[0]
        leaves = tensors
        if len(tensors) < len(self._leaves):
            rest = iter(tensors)
            leaves = [next(rest) if isinstance(x, TensorInfo) else x for x in self._leaves]
        return leaves if self._flat else pytree.tree_unflatten(leaves, self._structure)


class _Slice:
    """The place of one tensor in a message. ``cast``: the dtype in which it is sent, if not its own."""

    def __init__(self, info: TensorInfo, wire_dtype: torch.dtype | None, offset: int) -> None:
        self.dtype: torch.dtype = getattr(torch, info.dtype)
        # Not single numbers: that saves nothing, and one of them is the batch's loss.
        is_wide = self.dtype in (torch.float32, torch.float64)
        self.cast = wire_dtype if info.shape and is_wide else None
        self.shape, self.requires_grad, self.offset = info.shape, info.requires_grad, offset
        self.count = torch.Size(info.shape).numel()
        self._on_wire = self.cast or self.dtype
        self.bytes = self.count * self._on_wire.itemsize

    def of(self, memory: Any, offset: int) -> torch.Tensor:
        """Return the tensor as it is sent, flat, in a message that begins at ``offset`` of ``memory``."""
        begin = offset + self.offset
        if isinstance(memory, torch.Tensor):
            return memory[begin : begin + self.bytes].view(self._on_wire)
        return torch.frombuffer(memory, dtype=self._on_wire, count=self.count, offset=begin)

    def read(self, memory: Any, offset: int, device: torch.device) -> torch.Tensor:
        if self.count == 0 or self.cast is not None:
            value = torch.empty(self.shape, dtype=self.dtype, device=device)
            if self.count:
                unpack_(_on(device, self.of(memory, offset)), [value])
        else:
            value = self.of(memory, offset).view(self.shape)
            if value.device != device:
                value = _on(device, value)
        return value.requires_grad_() if self.requires_grad else value


def _on(device: torch.device, value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` on a device; its copy is not awaited if torch keeps the memory until it has been read."""
    return value.to(device, non_blocking=value.is_pinned())


class Encoder:
    """The sending end of a channel: the formats that the other end knows."""

    def __init__(self, wire_dtype: torch.dtype | None) -> None:
        self._wire_dtype = wire_dtype
        self._known: dict[Any, tuple[int, Format]] = {}  # by signature, the oldest first

    def encode(self, value: Any) -> tuple[int, Format, bytes, list[torch.Tensor]]:
        """Return the number of the value's format, the format, its text if it is new, and the tensors."""
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
            number, format = self._known[key]
        except (KeyError, TypeError):  # an unhashable value cannot be sent either; described() raises for it
            format = Format(structure, tuple(map(described, leaves)), self._wire_dtype)
            text = format.to_bytes()
            number = len(self._known)
            if number == _KNOWN:
                number, _ = self._known.pop(next(iter(self._known)))
            self._known[key] = number, format
            return number, format, text, tensors
        return number, format, b"", tensors


class Decoder:
    """The receiving end of a channel: the formats that it has received."""

    def __init__(self, wire_dtype: torch.dtype | None, device: torch.device, stream: Any = None) -> None:
        """``stream``: of ``device``, for copies to it and unpacking; by default the current one."""
        self._wire_dtype, self._device, self._stream = wire_dtype, device, stream
        self._has_streams = has_streams(device)
        self._formats: list[Format | None] = [None] * _KNOWN

    def decode(self, number: int, text_bytes: int, memory: Any, offset: int = 0) -> Any:
        """Return the value at ``offset`` of ``memory``: the text of its format, if it is new, then the tensors."""
        text = b""
        if text_bytes:
            data: Any = memory.numpy() if isinstance(memory, torch.Tensor) else memory
            text = bytes(memoryview(data).cast("B")[offset : offset + text_bytes])
        format, begin = self.format(number, text), offset + padded(text_bytes)
        if not self._has_streams:
            return format.read(memory, begin, self._device)
        # The caller's stream may hold work of lanes, for which a message need not wait.
        with self._stream or current_stream(self._device):
            return ready_on_event(format.read(memory, begin, self._device), self._device)

    def format(self, number: int, text: bytes) -> Format:
        """Return the format with that number, which is ``text`` if that is given."""
        if text:
            self._formats[number] = Format.from_bytes(text, self._wire_dtype)
        known = self._formats[number] if 0 <= number < _KNOWN else None
        if known is None:
            raise RuntimeError(f"a message names format {number}, which never arrived")
        return known


def _flatten(value: Any) -> tuple[Any, pytree.TreeSpec, list[Any]]:
    """Return a name for the structure that is faster to hash than it, the structure, and the leaves."""
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
    """Whether the host's memory holds its values in order."""
    return tensor.is_cpu and _is_in_order(tensor)


def _is_in_order(tensor: torch.Tensor) -> bool:
    """Whether its memory holds its values in order: conjugation and negation may be lazy."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def view(address: int, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Return ``size`` bytes of memory as a buffer, which must not outlive the memory."""
    return (ctypes.c_ubyte * size).from_address(address)


# The default factories that a defaultdict in a message may have; as torch names them.
_FACTORIES = {("builtins", kind.__name__) for kind in (dict, list, set, tuple, int, float, bool, str)}


def _leaf_to_json(leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, TensorInfo):
        return {"tensor": [list(leaf.shape), leaf.dtype, leaf.requires_grad]}
    return {"size": list(leaf)} if isinstance(leaf, torch.Size) else {"value": leaf}


def _leaf_from_json(leaf: dict[str, Any]) -> Any:
    if "tensor" in leaf:
        shape, dtype, requires_grad = leaf["tensor"]
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise TypeError(f"a message has a tensor of {dtype!r}, which is no dtype of torch")
        return TensorInfo(tuple(shape), dtype, requires_grad)
    return torch.Size(leaf["size"]) if "size" in leaf else leaf["value"]


def _check_node(node: dict[str, Any]) -> None:
    """Refuse, with TypeError, names in the text that ``treespec_loads`` would import or look up.

    Enumerations are accepted if their classes are loaded already.
    """
    context = node["context"]
    if isinstance(context, str):
        try:
            json.loads(context, object_hook=_check_enumeration)
        except json.JSONDecodeError:
            pass  # the registered name of a named tuple
    elif node["type"] == "collections.defaultdict":
        factory = context["default_factory_module"], context["default_factory_name"]
        if factory not in _FACTORIES:
            raise TypeError(
                f"a defaultdict of {'.'.join(map(str, factory))} cannot be sent between stages; use one of "
                f"{', '.join(sorted(name for _, name in _FACTORIES))}, or a dict"
            )
    for child in node["children_spec"]:
        _check_node(child)


def _check_enumeration(found: dict[str, Any]) -> dict[str, Any]:
    if "__enum__" in found:
        module, _, name = found["fqn"].partition(":")
        place: Any = sys.modules.get(module)
        for part in name.split("."):
            place = getattr(place, part, None)
        if not (isinstance(place, type) and issubclass(place, Enum)):
            raise TypeError(f"{found['fqn']} in a message is no enumeration that this process has loaded")
    return found


# ---- checksums -------------------------------------------------------------------------------------------------------


_ROW_BYTES = 512


def checksum(data: Any, start: int = 0) -> int:
    """Return 32 bits computed from a buffer, and from the checksum ``start`` of earlier data.

    The CRC-32 of a table's column sums: the buffer's 64-bit words form rows of 64. It is several times as
    fast as a CRC-32 of all bytes, and detects a single flipped bit as surely (except in one of 2^32 cases).
    """
    whole = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    end = whole.size // _ROW_BYTES * _ROW_BYTES
    if end > _ROW_BYTES:
        table = whole[:end].view(np.uint64).reshape(-1, _ROW_BYTES // 8)
        start, whole = zlib.crc32(np.add.reduce(table, axis=0).data, start), whole[end:]
    return zlib.crc32(whole.data, start)


class Verifier(NamedTuple):
    """The names, in messages, of the ends of a link that verifies its messages."""

    sender: str
    receiver: str

    def damaged(self, key: Key | None) -> PipelineError:
        """Return the error for a message that changed in transit; ``key`` is None if it is unreadable."""
        what = "a message that cannot be read" if key is None else f"{key} (pipeline {key.pipeline})"
        return PipelineError(
            f"{self.receiver} received {what} from {self.sender}, and not as it was sent: a bit was flipped in "
            "transit, in the memory of either or between them. Resume from the last checkpoint, and without that host "
            "or line if it happens again"
        )


# ---- copies from an accelerator --------------------------------------------------------------------------------------


class ToHost:
    """The copies of one channel's messages, which the host does not wait for.

    Activations and gradients are copied on a stream of the channel: nothing writes to them, so the lane goes
    on without waiting for the line to the host. Other messages are copied on the lane's stream, whose next
    step may write to their tensors.

    Args:
        kind: Of the messages.
        device: Where their tensors are.
    """

    def __init__(self, kind: Message, device: torch.device) -> None:
        self._device = device
        self._beside = copy_stream(device) if kind in OF_MICRO_BATCHES else None

    def write(self, format: Format, text: bytes, tensors: list[torch.Tensor], address: int) -> Any:
        """Write a message to pinned memory; return the event at which it is there."""
        copies = current_stream(self._device)
        if self._beside is not None:
            self._beside.wait_stream(copies)
            copies = self._beside
        with copies:
            format.write_all(text, tensors, address, pinned=True)
        if self._beside is not None:
            used_on(copies, tensors)  # the lane continues and may free them
        return copies.record_event()
