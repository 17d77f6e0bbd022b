"""What a layer's forward or backward needs for a moment, beyond what it takes and leaves."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from avgpipe.measure.examples import Example
from avgpipe.measure.sweep import Sweep

_reference: Any = StorageWeakRef  # torch leaves it untyped


class _Mark(NamedTuple):
    """Bytes that are there now, and the most since the mark before."""

    now: int
    peak: int


class _Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, follows the memory of every tensor that an operator returns, as long as it lives.

    What an operator uses within itself is not seen.
    """

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {_reference(t.untyped_storage()) for t in known}
        self._alive: dict[Any, int] = {}
        self._peak = 0

    def mark(self) -> _Mark:
        now = self._now()
        peak, self._peak = max(self._peak, now), now
        return _Mark(now, peak)

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


def measure_working(sweep: Sweep, example: Example, output_bytes: list[int]) -> list[int]:
    """Of each layer, the greater of its forward's and its backward's. output_bytes: gradients of outputs have as many,
    and are there while a backward runs.
    """
    weights = [*sweep.stage.parameters(), *sweep.stage.buffers()]
    gradients = [p.grad for p in sweep.stage.parameters() if p.grad is not None]
    inputs = [x for x in pytree.tree_leaves((example.inputs, example.target)) if isinstance(x, torch.Tensor)]
    memory = _Memory([*weights, *gradients, *inputs])
    with memory:
        marks = sweep.marked(example, memory.mark)
    layers = len(sweep.stage.layers)
    forwards = [end.peak - end.now for _, end in marks[:layers]]
    backwards = [end.peak - begin.now for begin, end in marks[layers:]][::-1]
    return [max(f, b + size) for f, b, size in zip(forwards, backwards, output_bytes)]
