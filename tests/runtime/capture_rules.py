"""What a capture forbids, and what it makes of a forward: a stand-in for CUDA graphs that needs no GPU.

A capture here runs its operators, and keeps them with the tensors that they were given and have made; what they have
changed in other memory is changed back, as a capture computes nothing. A replay runs them again, and writes what they
make to the memory that the capture had: so it reads what lies in that memory now, and knows nothing of Python. It
raises where a device would go wrong without a word, or with one:

- an operator whose result the host must know inside a capture, or that draws random numbers from a generator's state
  that the graph does not know
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
from tests.happens_before.memory import has_storage
from tests.happens_before.operators import HOST_WAITS, DeviceAccount, tensors_of


class CaptureError(RuntimeError):
    pass


class RandomState:
    """The state of a generator, that a graph draws from."""

    def __init__(self) -> None:
        self.seed = 0

    def manual_seed(self, seed: int) -> None:
        self.seed = seed

    def get_offset(self) -> int:
        return 0


class RecordedGraph(TorchDispatchMode):
    """As ``torch.cuda.CUDAGraph``: what is captured, to be replayed."""

    current: RecordedGraph | None = None
    drawn_from: RandomState | None = None  # None: the device's default one

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[torch.Tensor]] | RandomState] = []
        self._states: list[RandomState] = []
        self._changed: dict[
            int, tuple[torch.UntypedStorage, torch.UntypedStorage]
        ] = {}  # and as it was before
        self._own: set[int] = set()  # addresses of storages that the capture has made
        self._made: set[int] = set()  # identities of tensors, which the calls keep
        self._outside: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._pool: object = object()
        # Libraries ask, and leave out what a capture forbids.
        self._asked = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
        self.replays = 0

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        if RecordedGraph.current is not None:
            raise CaptureError("a capture begins inside of another one")
        if capture_error_mode != "thread_local":
            raise CaptureError(f"a capture in mode {capture_error_mode!r} forbids what other threads do")
        RecordedGraph.current, self.thread = self, threading.get_ident()
        self._pool = pool or self._pool
        self._asked.start()
        self.__enter__()

    def register_generator_state(self, state: RandomState) -> None:
        self._states.append(state)

    def draw_from(self, state: RandomState | None) -> None:
        """Draw from another state in what is captured next."""
        if state in self._states:
            assert state is not None
            torch.default_generator.manual_seed(state.seed)
            self._calls.append(state)

    def capture_end(self) -> None:
        if RecordedGraph.current is not self or self.thread != threading.get_ident():
            raise CaptureError("a capture ends that has not begun in this thread")
        self.__exit__(None, None, None)
        self._asked.stop()
        RecordedGraph.current = None
        for storage, before in self._changed.values():
            storage.copy_(before)
        self._changed.clear()

    def pool(self) -> object:
        return self._pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name in HOST_WAITS:
            raise CaptureError(f"{name} waits for the device during a capture")
        before = torch.default_generator.get_state()
        for tensor in _tensors((args, kwargs)):
            if id(tensor) not in self._made and id(tensor) not in self._outside:
                self._outside[id(tensor)] = weakref.ref(tensor), tensor.data_ptr()
        self._keep_outside(func, args, kwargs)
        result = func(*args, **kwargs)
        # As a device would: some operators draw only if asked to, such as attention with dropout.
        draws = not torch.equal(before, torch.default_generator.get_state())
        if kwargs.get("generator") is not None or (draws and RecordedGraph.drawn_from not in self._states):
            raise CaptureError(f"{name} draws random numbers during a capture")
        made = _tensors(result)
        self._made.update(map(id, made))
        self._own |= set(map(_address, made)) - set(map(_address, _tensors((args, kwargs))))
        # Detached: what autograd has saved must be free to go, and what is outside to move or die.
        frozen = pytree.tree_map_only(torch.Tensor, _alias, (args, kwargs))
        self._calls.append((func, *frozen, made))
        return result

    def _keep_outside(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep what lies in memory from outside that an operator writes to."""
        for tensor in tensors_of(func, args, kwargs)[1]:
            address, storage = _address(tensor), tensor.untyped_storage()
            if address and address not in self._own and address not in self._changed:
                self._changed[address] = storage, storage.clone()

    def replay(self) -> None:
        if RecordedGraph.current is not None:
            raise CaptureError("a graph is launched inside of a capture")
        self.replays += 1
        for reference, address in self._outside.values():
            tensor = reference()
            if tensor is not None and tensor.data_ptr() != address:
                raise CaptureError(f"memory of shape {tuple(tensor.shape)} has moved since it was captured")
        with torch.no_grad():
            for call in self._calls:
                if isinstance(call, RandomState):
                    torch.default_generator.manual_seed(call.seed)
                    continue
                func, args, kwargs, made = call
                if _is_view(func):
                    continue
                for tensor, value in zip(made, _tensors(func(*args, **kwargs))):
                    if tensor.data_ptr() != value.data_ptr():
                        tensor.data.copy_(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, whatever becomes of the tensor; autograd does not notice a launch that writes there."""
    with torch._C._AutoDispatchBelowAutograd(), torch.utils._python_dispatch._disable_current_modes():
        return tensor.data


def _address(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; 0 if it has none of its own, such as one that wraps others."""
    try:
        return tensor.untyped_storage().data_ptr() if has_storage(tensor) else 0
    except RuntimeError:
        return 0


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

    def random_state(self, device: torch.device) -> RandomState:
        return RandomState()

    def draw_from(self, device: torch.device, state: RandomState | None) -> RandomState | None:
        before, RecordedGraph.drawn_from = RecordedGraph.drawn_from, state
        if RecordedGraph.current is not None:
            RecordedGraph.current.draw_from(state)
        return before


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
