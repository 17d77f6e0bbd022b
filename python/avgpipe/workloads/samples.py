"""Batches of independent samples: the same for every number of stages and pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from avgpipe.runtime.context import mix

MakeBatch = Callable[[Tensor, torch.Generator], tuple[Any, Any]]

_ORDER, _DRAW = 1, 2  # what a generator is for
_POOL_BATCHES = 50


class SampleBatches(Dataset[tuple[Any, Any]]):
    """Batch j holds the samples ``order[j * batch_size : (j + 1) * batch_size]``; the last may be shorter.

    Args:
        order: int64 [samples], the indices of an epoch in their order; see :func:`in_order`, :func:`shuffled` and
            :func:`by_length`.
        batch_size: samples of a batch.
        make: of indices, int64 [n], and a generator for what is drawn, makes ``(inputs, targets)``. The
            generator follows from seed, epoch and batch alone. With workers it must be picklable.
        seed, epoch: of what ``make`` draws.
        start: the first batch to yield, for going on in the middle of an epoch.
        workers: processes that make batches ahead; 0: they are made when they are asked for.
    """

    def __init__(
        self,
        order: Tensor,
        batch_size: int,
        make: MakeBatch,
        *,
        seed: int = 0,
        epoch: int = 0,
        start: int = 0,
        workers: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if order.numel() == 0:
            raise ValueError("there are no samples to make batches of")
        self.total = -(-order.numel() // batch_size)
        if not 0 <= start <= self.total:
            raise ValueError(f"start must be a batch of the epoch, 0 to {self.total}, got {start}")
        self.start = start
        self._order, self._batch_size, self._make = order, batch_size, make
        self._seed, self._epoch, self._workers = seed, epoch, workers

    def __len__(self) -> int:
        return self.total - self.start

    def __getitem__(self, batch: int) -> tuple[Any, Any]:
        """Batch ``batch`` of the epoch, whatever ``start`` is."""
        if not 0 <= batch < self.total:
            raise IndexError(f"batch {batch} of {self.total}")
        indices = self._order[batch * self._batch_size : (batch + 1) * self._batch_size]
        return self._make(indices, generator(_DRAW, self._seed, self._epoch, batch))

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        wanted = range(self.start, self.total)
        if not self._workers:
            return map(self.__getitem__, wanted)
        # A batch here is what the loader calls a sample, so its workers make whole batches, in order.
        return iter(
            DataLoader(
                self,
                batch_size=None,
                sampler=wanted,
                num_workers=min(self._workers, max(1, len(wanted))),
                generator=generator(_DRAW, self._seed, self._epoch, -1),
            )
        )


def generator(*words: int) -> torch.Generator:
    """A generator of these numbers alone."""
    return torch.Generator().manual_seed(mix(*words))


def in_order(samples: int) -> Tensor:
    return torch.arange(samples)


def shuffled(samples: int, seed: int, epoch: int) -> Tensor:
    """A permutation of ``range(samples)``, another one in each epoch."""
    return torch.randperm(samples, generator=generator(_ORDER, seed, epoch))


def by_length(lengths: Tensor, batch_size: int, seed: int, epoch: int) -> Tensor:
    """A permutation in which a batch's samples are of similar length, so that little of it is padding.

    Samples are shuffled, those of 50 batches at a time are sorted by length, and then the batches are shuffled;
    what does not fill a batch comes last.
    """
    draw = generator(_ORDER, seed, epoch)
    order = torch.randperm(lengths.numel(), generator=draw)
    pools = [
        pool[lengths[pool].argsort(stable=True)] for pool in torch.split(order, _POOL_BATCHES * batch_size)
    ]
    order = torch.cat(pools)
    whole = order.numel() // batch_size * batch_size
    batches = order[:whole].view(-1, batch_size)
    shuffle = torch.randperm(batches.shape[0], generator=draw)
    return torch.cat([batches[shuffle].reshape(-1), order[whole:]])
