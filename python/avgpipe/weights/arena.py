"""Parameters of one replica's stage as views of one contiguous buffer per dtype, and their gradients likewise.

So an averaging step is one kernel over flat memory, and weights are exchanged by moving a pointer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from avgpipe.weights.layout import Layout


class Arena:
    """Moves ``parameters`` (of one device) into flat buffers.

    ``weights`` and ``grads`` are the buffers of ``layout``. Every parameter's ``grad`` is a view into ``grads``
    for good; :meth:`step_grads` hides those that received no gradient.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.layout = Layout(self.parameters)
        self.weights = self.layout.zeros().flats
        self.grads = self.layout.zeros().flats
        for p, view in zip(self.parameters, self.layout.tensors(self.weights)):
            view.copy_(p.data)
            p.data = view
        # .data gives each view its own version counter: it tells whether autograd has added to this gradient
        self._grad_views = [g.data for g in self.layout.tensors(self.grads)]
        self.zero_grads()

    @contextmanager
    def reading(self, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        """The parameters are those of ``buffers`` inside the block; no bytes are moved."""
        own = [p.data for p in self.parameters]
        for p, view in zip(self.parameters, self.layout.tensors(buffers)):
            p.data = view
        try:
            yield
        finally:
            for p, data in zip(self.parameters, own):
                p.data = data

    def zero_grads(self) -> None:
        for g in self.grads:
            g.zero_()
        for p, view in zip(self.parameters, self._grad_views):
            p.grad = view
        self._versions = [view._version for view in self._grad_views]

    def collect_grads(self) -> list[bool]:
        """Bring every gradient into the arena; tell which parameters have received one since ``zero_grads``."""
        touched = []
        for p, view, version in zip(self.parameters, self._grad_views, self._versions):
            if p.grad is not None and p.grad is not view:  # autograd replaced it (another layout)
                view.copy_(p.grad)
            touched.append(p.grad is not None and (p.grad is not view or view._version != version))
            p.grad = view
        return touched

    @contextmanager
    def step_grads(self, touched: Sequence[bool]) -> Iterator[None]:
        """Inside the block a parameter without gradient has ``grad None``, so that optimizers skip it."""
        for p, has_grad in zip(self.parameters, touched):
            if not has_grad:
                p.grad = None
        try:
            yield
        finally:
            for p, view in zip(self.parameters, self._grad_views):
                p.grad = view
