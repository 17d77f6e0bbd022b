"""What a micro-batch holds between its forward and its backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class SavedBytes:
    """Counts what autograd saves for a backward; memory that several tensors share counts once.

    ``known``: addresses of memory that is there anyway, such as weights.
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
        return tensor.detach()  # the tensor itself may own the graph that would own it then
