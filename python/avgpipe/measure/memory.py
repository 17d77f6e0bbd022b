"""Bytes of a micro-batch, layer by layer: bytes held and sent, and the temporary bytes of a layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from avgpipe.links.link import tensors_of
from avgpipe.measure.sweep import Example, Sweep
from avgpipe.model.parts import PartLayer, Skips


class LayerBytes(NamedTuple):
    """Bytes of each layer; see ``LayerProfile``."""

    held_bytes: list[int]
    handed_bytes: list[int]
    output_bytes: list[int]
    working_bytes: list[int]


class SavedBytes:
    """Counts what autograd saves for a backward; memory that several tensors share counts once.

    ``known``: addresses of memory that exists anyway, such as weights.
    """

    def __init__(self, known: Iterable[int]) -> None:
        self._seen = set(known)
        self.bytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept):
            yield

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count(tensor)
        return tensor.detach()  # the tensor itself may own its graph, and the graph would own it in turn


class _Keepers(SavedBytes):
    """Counts the bytes that autograd saves, once, for the layer that made them. ``layer``: the running layer.

    An output that only later layers save counts for the layer that returned it first, as handed on by it.
    """

    def __init__(self, known: Iterable[int], layers: int) -> None:
        super().__init__(known)
        self.held, self.handed = [0] * layers, [0] * layers
        self.layer = 0
        self._makers: dict[int, int] = {}  # makers of the outputs so far, by address

    def returned(self, output: Any) -> None:
        for tensor in tensors_of(output):
            self._makers.setdefault(tensor.untyped_storage().data_ptr(), self.layer)

    def count(self, tensor: torch.Tensor) -> None:
        before = self.bytes
        super().count(tensor)
        new = self.bytes - before
        maker = self._makers.get(tensor.untyped_storage().data_ptr(), self.layer)
        self.held[maker] += new
        if maker != self.layer:
            self.handed[maker] += new


def measure_bytes(
    sweep: Sweep, example: Example, skips: Sequence[Skips]
) -> tuple[LayerBytes, dict[tuple[int, int], int]]:
    """Measure with one forward in which layers are not detached, and one sweep; needs a sweep before it.

    Returns the bytes of the layers, and of each skip by its ends. skips: skips of the model with a stage for
    each layer.
    """
    stage = sweep.stage
    layers = len(stage.layers)
    weights = [*stage.parameters(), *stage.buffers()]
    keepers = _Keepers((t.untyped_storage().data_ptr() for t in weights), layers)
    outputs, routed = [0] * layers, dict[tuple[int, int], int]()
    value = example.inputs
    alive = []  # keeps addresses from being reused
    with sweep.in_batch(example):
        for n in range(layers):
            keepers.layer = n
            with keepers.counting():
                value = sweep.call(n, value, example)
            keepers.returned(value)
            alive.append(value)
            if n < layers - 1:  # the model's output is not sent
                outputs[n] = _output_bytes(stage.layers[n], stage.layers[n + 1], value, skips[n + 1])
                for route in skips[n].departures:
                    routed[n, route.stage] = sum(_bytes(value[place]) for place in route.places)
    del alive, value
    working = _working_bytes(sweep, example, outputs)
    return LayerBytes(keepers.held, keepers.handed, outputs, working), routed


def _output_bytes(layer: Any, following: Any, output: Any, skips: Skips) -> int:
    """Return the bytes sent to the next layer, without those that skip it. skips: skips that arrive there."""
    if not (isinstance(layer, PartLayer) and isinstance(following, PartLayer)):
        return _bytes(output)
    uses, takes = following.values.uses, following.values.takes
    elsewhere = {takes[place] for route in skips.arrivals for place in route.places}
    return sum(_bytes(value) for name, value in zip(layer.values.gives, output) if name in uses - elsewhere)


def _bytes(value: Any) -> int:
    return sum(t.nbytes for t in tensors_of(value))


_reference: Any = StorageWeakRef  # torch leaves it untyped


class _Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the memory of every tensor that an operator returns inside, as long as it lives.

    Temporary memory within an operator is not tracked.
    """

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {_reference(t.untyped_storage()) for t in known}
        self._alive: dict[Any, int] = {}
        self._peak = 0

    def mark(self) -> tuple[int, int]:
        """Return the bytes allocated now, and the most since the mark before."""
        now = self._now()
        peak, self._peak = max(self._peak, now), now
        return now, peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                reference = _reference(storage)
                if reference not in self._known:
                    self._alive[reference] = storage.nbytes()
        self._peak = max(self._peak, self._now())
        return result

    def _now(self) -> int:
        for reference in [r for r in self._alive if r.expired()]:
            del self._alive[reference]
        return sum(self._alive.values())


def _working_bytes(sweep: Sweep, example: Example, output_bytes: list[int]) -> list[int]:
    """Return the workspace of each layer: the greater of its forward's and its backward's.

    Gradients of outputs have ``output_bytes`` like the outputs, and exist while a backward runs.
    """
    parameters = list(sweep.stage.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    inputs = [x for x in pytree.tree_leaves((example.inputs, example.target)) if isinstance(x, torch.Tensor)]
    with _Memory([*parameters, *sweep.stage.buffers(), *gradients, *inputs]) as memory:
        marks = sweep.marked(example, memory.mark)
    layers = len(output_bytes)
    forwards = [peak - now for _, (now, peak) in marks[:layers]]
    backwards = [peak - before for (before, _), (_, peak) in marks[layers:]][::-1]
    return [max(f, b + size) for f, b, size in zip(forwards, backwards, output_bytes)]
