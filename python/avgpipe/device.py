"""Accelerators: a process's own device, and the streams, events, generators and memory of devices.

An accelerator runs work later, in the order of each stream; the CPU runs it at once, and has no streams: none
are made or called for it. Accelerators are identified by what they can do (``torch.accelerator``), never by
name.

Each thread has a current device, at first device 0. Switching to another device for a moment and back creates
a CUDA context of some hundred MB on device 0; so a process selects its device in every thread
that uses it.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils import _pytree as pytree


class _Torch:
    """Streams of torch. Tests replace them by streams that record what waits for what."""

    Stream: Any = torch.Stream
    current_stream: Any = staticmethod(torch.accelerator.current_stream)
    record_stream: Any = staticmethod(torch.Tensor.record_stream)

    def __init__(self) -> None:
        self.idle: dict[torch.device, list[Any]] = defaultdict(list)  # streams of lanes that have ended

    def Event(self, device: torch.device, enable_timing: bool = False) -> Any:
        return torch.Event(device, enable_timing=enable_timing)

    def enqueues(self, device: torch.device) -> bool:
        return device.type != "cpu"

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "cpu"

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_pinned() else tensor.pin_memory()

    def pinned_bytes(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def has_graphs(self, device: torch.device) -> bool:
        return hasattr(torch.get_device_module(device), "CUDAGraph")

    def graph(self, device: torch.device) -> Any:
        return torch.get_device_module(device).CUDAGraph()

    def free_cached(self, device: torch.device) -> None:
        torch.get_device_module(device).empty_cache()

    def random_state(self, device: torch.device) -> Any:
        return torch.Generator(device)

    def draw_from(self, device: torch.device, state: Any) -> Any:
        generator: Any = generator_of(device)
        before = generator.graphsafe_get_state()
        generator.graphsafe_set_state(state)
        return before


backend: Any = _Torch()

# Owners of memory outside of the allocator, by address; ``used_on`` calls them when a stream reads it.
foreign_memory: WeakValueDictionary[int, Any] = WeakValueDictionary()


def has_streams(device: torch.device) -> bool:
    """Whether a device runs work later, in the order of streams."""
    return bool(backend.enqueues(device))


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values may still be pending, so that reading them waits for a device."""
    return bool(backend.holds(tensor))


def current_stream(device: torch.device) -> Any:
    """Return the calling thread's current stream of an accelerator."""
    return backend.current_stream(device)


def pinned_bytes(size: int) -> torch.Tensor:
    """Return pinned host memory, as bytes, to which an accelerator copies while the host continues."""
    found: torch.Tensor = backend.pinned_bytes(size)
    return found


def copy_stream(device: torch.device) -> Any:
    """Return a new stream of an accelerator for copies: of high priority, of which no lane's stream is one.

    torch has 32 streams of each priority and deals them out in turn.
    """
    return backend.Stream(device, priority=-1)


def own_stream(device: torch.device) -> Any:
    """Return a new stream of an accelerator."""
    return backend.Stream(device)


def timed_event(device: torch.device) -> Any:
    """Return an event recorded on the current stream that measures time."""
    event = backend.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event


def used_on(stream: Any, tensors: Iterable[Any]) -> None:
    """Keep the memory of tensors, which another stream has allocated, until ``stream`` is done with them.

    Without this the allocator would give it to that stream's next tensor while this one still reads. Leaves that are no
    tensors of an accelerator are left alone.
    """
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and backend.holds(tensor):
            owner = foreign_memory.get(tensor.untyped_storage().data_ptr()) if foreign_memory else None
            if owner is None:
                backend.record_stream(tensor, stream)
            else:
                owner.used_on(stream)


def own_device(device: torch.device | str) -> torch.device:
    """Return ``device``, with its number if it is an accelerator.

    If a launcher has numbered the processes of this host, each takes its own device as long as there are
    enough; else it is the current one.

    Raises:
        ValueError: torch finds no such device here.
    """
    here = torch.accelerator.current_accelerator(check_available=True)
    try:
        found = torch.device(device)
    except RuntimeError:  # torch has no such type
        found = torch.device("meta")
    if found.type == "cpu":
        return found
    if here is None or found.type != here.type:
        kinds = "'cpu'" if here is None else f"'cpu' or {here.type!r}"
        raise ValueError(
            f"device {str(device)!r}: torch {torch.__version__} sees no such device here; use {kinds}"
        )
    if found.index is not None:
        return found
    place = os.environ.get("LOCAL_RANK")
    count = torch.accelerator.device_count()
    index = torch.accelerator.current_device_index() if place is None else int(place) % count
    return torch.device(found.type, index)


def select(device: torch.device) -> None:
    """Make an accelerator the calling thread's current one."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def free_bytes(device: torch.device) -> float:
    """Return the free bytes of a device, without swapping; infinite if it does not report them."""
    if device.type != "cpu":
        try:
            return int(torch.accelerator.get_memory_info(device)[0])
        except NotImplementedError:
            return math.inf
    facts = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable: *(\d+)", facts.read_text() if facts.exists() else "", re.MULTILINE)
    return 1024.0 * int(found[1]) if found else math.inf


def device_name(device: torch.device) -> str:
    """Return the name of an accelerator, such as "NVIDIA H200"."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name is None else str(name(device))


@cache
def generator_of(device: torch.device) -> torch.Generator:
    """Return the default generator of a device, from which layers on it draw."""
    if device.type == "cpu":
        return torch.default_generator
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    found: torch.Generator = torch.get_device_module(device).default_generators[index]
    return found


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return the default generators that a layer on ``device`` may draw from: the host's, and the device's."""
    return [torch.default_generator] + ([generator_of(device)] if device.type != "cpu" else [])


def has_graphs(device: torch.device) -> bool:
    """Whether work on a device can be captured once, and launched as one graph."""
    return bool(backend.has_graphs(device))


def free_cached(device: torch.device) -> None:
    """Return the allocator's cached memory to the device. Waits for the device."""
    backend.free_cached(device)


class ReadyOnEvent:
    """A value whose tensors are ready when an event has happened. The stream that needs it calls ``received``."""

    __slots__ = ("_device", "_ready", "value")

    def __init__(self, value: Any, ready: Any, device: torch.device) -> None:
        self.value, self._ready, self._device = value, ready, device

    @property
    def has_happened(self) -> bool:
        """Whether the event has happened, so that the device has the value."""
        return bool(self._ready.query())

    def received(self) -> Any:
        """Return the value, for use on the current stream."""
        stream = current_stream(self._device)
        stream.wait_event(self._ready)
        # Allocated on the stream that recorded ``ready``, read on this one. Its sender cannot keep it instead
        # until the gradient is there: where backwards are split, the weights' half reads it after that.
        used_on(stream, pytree.tree_leaves(self.value))
        return self.value


def ready_on_event(value: Any, device: torch.device) -> ReadyOnEvent:
    """Return ``value``, which the current stream computes, for another stream."""
    return ReadyOnEvent(value, current_stream(device).record_event(), device)
