"""Forwards that run twice, for recomputation: the second starts from the same state, and leaves no trace.

Layers may change state when they run: a codebook, running statistics, the vectors of a spectral norm, numbers
drawn from Python's or NumPy's generator. On one device a forward changes it once, and so it does here: the
second one reads the state before the first, from its own memory, and what it writes there is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from avgpipe.errors import StageError
from avgpipe.model.context import callers_generators, moved, set_generators


class Repeated:
    """Tracks the state that the layers of a stage change."""

    def __init__(self, layers: nn.Module) -> None:
        self._layers = layers
        # Names of buffers that forwards write to; None before the first forward.
        self._moving: set[str] | None = None

    def forward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``run``, and in later calls repeats the first from the same state."""
        began: dict[str, torch.Tensor] = {}
        drew: dict[str, Any] = {}
        has_run = False

        def twice(*args: Any) -> Any:
            nonlocal has_run
            if has_run:
                with self._as_it_was(began), _drawing(drew):
                    return run(*args)
            has_run, buffers, before = True, dict(self._layers.named_buffers()), callers_generators()
            kept = buffers if self._moving is None else self._moving & buffers.keys()
            began.update({name: buffers[name].clone() for name in kept})
            versions = {name: t._version for name, t in buffers.items()}
            result = run(*args)
            after = callers_generators()
            drew.update({name: before[name] for name in moved(before, after)})
            self._note(buffers, versions, began)
            return result

        return twice

    def _note(
        self, buffers: dict[str, torch.Tensor], versions: dict[str, int], began: dict[str, torch.Tensor]
    ) -> None:
        """Record the buffers that have changed; drop the copies of the others."""
        here = dict(self._layers.named_buffers())
        found = {
            name for name, t in buffers.items() if t._version != versions[name] or here.get(name) is not t
        }
        if self._moving is None:  # some operators, such as BatchNorm's, do not raise the version
            found |= {name for name, t in buffers.items() if not torch.equal(t, began[name])}
        late = found - began.keys()
        if late:
            raise StageError(
                f"buffer {min(late)!r} was written to in a forward, and in none before: recomputation would change it "
                "twice. Have the layer write to it in its first forward, too, or leave recompute out"
            )
        self._moving = found if self._moving is None else self._moving | found
        for name in began.keys() - self._moving:
            del began[name]

    @contextmanager
    def _as_it_was(self, began: dict[str, torch.Tensor]) -> Iterator[None]:
        """Replace the buffers that have changed by their earlier values inside."""
        if not began:
            yield
            return
        buffers = dict(self._layers.named_buffers())
        instead = {id(buffers[name]): value for name, value in began.items()}
        places = [
            (module, name, t)
            for module in self._layers.modules()
            for name, t in module._buffers.items()
            if t is not None and id(t) in instead
        ]
        for module, name, t in places:
            module._buffers[name] = instead[id(t)]
        try:
            yield
        finally:
            for module, name, t in places:
                module._buffers[name] = t


@contextmanager
def _drawing(from_: dict[str, Any]) -> Iterator[None]:
    """Draw from these states of Python's and NumPy's generators inside; restore the present ones after."""
    if not from_:
        yield
        return
    before = callers_generators()
    set_generators(from_)
    try:
        yield
    finally:
        set_generators({name: before[name] for name in from_})
