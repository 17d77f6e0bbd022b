"""The batches of a user's loader, epoch by epoch: the same on every rank, and again when a run is resumed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import length_hint
from typing import Any

import torch

from avgpipe.model.batch import pair
from avgpipe.model.context import generators, mix, set_generators

# Batches that can be iterated once an epoch, or a function that makes those of an epoch (from 0).
Loader = Iterable[Any] | Callable[[int], Iterable[Any]]

_MAKING, _TRAINING, HELD_OUT = 1, 2, 3  # purposes of random numbers


def training_batches(
    loader: Loader, seed: int, most: int | None, epoch: int, start: int = 0
) -> LoaderBatches:
    """Return the batches of an epoch from batch ``start`` on.

    ``most``: the most batches of an epoch, if the loader has no length.
    """
    if not isinstance(loader, Iterable):
        with Draws(mix(seed, _MAKING, epoch)):
            loader = loader(epoch)
    return LoaderBatches(loader, mix(seed, _TRAINING, epoch), start, most)


def first_batch(loader: Loader, seed: int) -> tuple[Any, Any]:
    """Return the first inputs and targets of training, without an effect on it."""
    for batch in training_batches(loader, seed, None, 0):
        return pair(batch)
    raise ValueError("the loader has no batches: it must have at least one")


class LoaderBatches:
    """The batches of a loader; all random numbers for them follow from ``seed``, whatever else draws meanwhile.

    Args:
        loader: The batches.
        seed: Seed of the generators that the loader draws from.
        start: The first batch to yield.
        most: The most batches, if the loader has no length.
    """

    def __init__(self, loader: Iterable[Any], seed: int, start: int = 0, most: int | None = None) -> None:
        self._loader, self._seed, self._start, self._most = loader, seed, start, most

    @property
    def are_counted(self) -> bool:
        """Return whether the loader knows how many batches it has."""
        return length_hint(self._loader, -1) >= 0  # also a DataLoader may have none

    def __len__(self) -> int:
        known = length_hint(self._loader, -1 if self._most is None else self._most)
        if known < 0:
            raise TypeError("the loader has no length: give the number of batches to train (max_batches)")
        return max(0, known - self._start)

    def __iter__(self) -> Iterator[Any]:
        draws, end = Draws(self._seed), object()
        with draws:
            source = islice(self._loader, self._start, None)
        while True:
            with draws:
                batch = next(source, end)
            if batch is end:
                return
            yield batch


class Draws:
    """Random numbers that follow from a seed only, continuing from one ``with`` block to the next.

    They are those of torch on the CPU, of Python's ``random`` and, if it is loaded, of NumPy. Outside of the
    blocks all three continue as if nothing had been drawn inside.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: dict[str, Any] = {}
        self._outside: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._outside = generators()
        if self._inside:
            set_generators(self._inside)
        else:
            torch.default_generator.manual_seed(self._seed)
            random.seed(self._seed)
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed(self._seed % 2**32)

    def __exit__(self, *_: object) -> None:
        self._inside = generators()
        set_generators(self._outside)
