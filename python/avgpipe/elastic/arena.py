"""Parameters of one replica's stage as views of one contiguous buffer per dtype.

So an averaging step is one kernel over flat memory, and weights are exchanged by moving a pointer. Gradients stay where
autograd makes them: a buffer of ours would have to be zeroed, and then read and written once more by every batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from avgpipe.elastic.layout import Layout


class Arena:
    """Moves ``parameters`` (of one device) into flat buffers: ``weights``, laid out by ``layout``."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.layout = Layout(self.parameters)
        self.weights = self.layout.zeros().flats
        for p, view in zip(self.parameters, self.layout.tensors(self.weights)):
            view.copy_(p.data)
            p.data = view

    @property
    def grads(self) -> list[torch.Tensor]:
        """Of the parameters that have received one since :meth:`drop_grads`."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def drop_grads(self) -> None:
        for p in self.parameters:
            p.grad = None

    def point_at(self, buffers: Sequence[torch.Tensor]) -> None:
        """The parameters become those of ``buffers``, laid out as ``weights`` are; no bytes are moved."""
        for p, view in zip(self.parameters, self.layout.tensors(buffers)):
            p.data = view

    @contextmanager
    def reading(self, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        """The parameters are those of ``buffers`` inside the block; no bytes are moved."""
        own = [p.data for p in self.parameters]
        self.point_at(buffers)
        try:
            yield
        finally:
            for p, data in zip(self.parameters, own):
                p.data = data
