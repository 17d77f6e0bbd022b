"""What a capture forbids, and what it makes of a forward: a stand-in for CUDA graphs that needs no GPU.

A capture here runs its operators, and keeps them with the tensors that they were given and have made. A replay runs
them again, and writes what they make to the memory that the capture had: so it reads what lies in that memory now,
and knows nothing of Python. It raises where a device would go wrong without a word, or with one:

- an operator whose result the host must know, or that draws random numbers, inside a capture
- a capture inside of another one, one that another thread ends, or one that would disturb other threads
- an operator that another thread issues on the stream of a capture
- a tensor from outside of the capture whose memory is another one since, as of weights in several versions
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from avgpipe import device as devices
from tests.happens_before.operators import HOST_WAITS, DeviceAccount


class CaptureError(RuntimeError):
    pass


class RecordedGraph(TorchDispatchMode):
    """As ``torch.cuda.CUDAGraph``: what is captured, to be replayed."""

    current: RecordedGraph | None = None

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._made: set[int] = set()  # identities of tensors, which the calls keep
        self._outside: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._pool: object = object()
        self.replays = 0

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        if RecordedGraph.current is not None:
            raise CaptureError("a capture begins inside of another one")
        if capture_error_mode != "thread_local":
            raise CaptureError(f"a capture in mode {capture_error_mode!r} forbids what other threads do")
        RecordedGraph.current, self.thread = self, threading.get_ident()
        self._pool = pool or self._pool
        self.__enter__()

    def capture_end(self) -> None:
        if RecordedGraph.current is not self or self.thread != threading.get_ident():
            raise CaptureError("a capture ends that has not begun in this thread")
        self.__exit__(None, None, None)
        RecordedGraph.current = None

    def pool(self) -> object:
        return self._pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name in HOST_WAITS:
            raise CaptureError(f"{name} waits for the device during a capture")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureError(f"{name} draws random numbers during a capture")
        for tensor in _tensors((args, kwargs)):
            if id(tensor) not in self._made and id(tensor) not in self._outside:
                self._outside[id(tensor)] = weakref.ref(tensor), tensor.data_ptr()
        result = func(*args, **kwargs)
        made = _tensors(result)
        self._made.update(map(id, made))
        # Detached: what autograd has saved must be free to go, and what is outside to move or die.
        frozen = pytree.tree_map_only(torch.Tensor, _alias, (args, kwargs))
        self._calls.append((func, *frozen, made))
        return result

    def replay(self) -> None:
        if RecordedGraph.current is not None:
            raise CaptureError("a graph is launched inside of a capture")
        self.replays += 1
        for reference, address in self._outside.values():
            tensor = reference()
            if tensor is not None and tensor.data_ptr() != address:
                raise CaptureError(f"memory of shape {tuple(tensor.shape)} has moved since it was captured")
        with torch.no_grad():
            for func, args, kwargs, made in self._calls:
                if _is_view(func):
                    continue
                for tensor, value in zip(made, _tensors(func(*args, **kwargs))):
                    if tensor.data_ptr() != value.data_ptr():
                        tensor.detach().copy_(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, whatever becomes of the tensor."""
    with torch._C._AutoDispatchBelowAutograd(), torch.utils._python_dispatch._disable_current_modes():
        return tensor.detach()


def _is_view(func: Any) -> bool:
    infos = [r.alias_info for r in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


class _Graphs:
    """What a device with graphs has beside streams."""

    graphs: list[RecordedGraph]
    emptied = 0

    def has_graphs(self, device: torch.device) -> bool:
        return True

    def graph(self, device: torch.device) -> RecordedGraph:
        self.graphs.append(RecordedGraph())
        return self.graphs[-1]

    def free_cached(self, device: torch.device) -> None:
        self.emptied += 1


class _WithGraphs(_Graphs, devices._Torch):
    """A device with graphs, and nothing else that the CPU has not."""

    def __init__(self) -> None:
        self.graphs = []


class GraphsAndStreams(_Graphs, DeviceAccount):
    """A device with both, on which account is kept of what graphs read and write whenever they are launched.

    What one thread issues on a stream that another one captures would be a part of the graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graphs = []
        self._captured: tuple[RecordedGraph, Any] | None = None

    def enqueue(self, what: str, *arguments: Any, **more: Any) -> None:
        graph = RecordedGraph.current
        if graph is not None:
            if self._captured is None or self._captured[0] is not graph:
                self._captured = graph, self.current_stream()
            elif graph.thread != threading.get_ident() and self.current_stream() is self._captured[1]:
                raise CaptureError(f"another thread issues {what} on the stream that is captured")
        super().enqueue(what, *arguments, **more)


@contextmanager
def capture_rules() -> Iterator[_WithGraphs]:
    """Inside, the CPU has graphs. Yields an object that has them all, in ``graphs``."""
    backend = _WithGraphs()
    with mock.patch.object(devices, "backend", backend):
        try:
            yield backend
        finally:
            RecordedGraph.current = None
