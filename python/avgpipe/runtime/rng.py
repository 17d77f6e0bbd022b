"""Random numbers keyed by place: what a layer draws depends on (seed, pipeline, batch, micro-batch, layer) alone.

So dropout depends neither on timing nor on the number of stages, recomputation repeats it, and a run can be replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1


def mix(*words: int) -> int:
    """A 64-bit key of integers (the finaliser of SplitMix64, Steele, Lea and Flood 2014, over each word)."""
    return mix_more(0, *words)


def mix_more(key: int, *words: int) -> int:
    """The key of more words after those that made ``key``."""
    for word in words:
        key = (key + word + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key


def seed_generators(device: torch.device, key: int) -> None:
    """Seed the default generators that a layer on ``device`` draws from."""
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        torch.cuda.default_generators[index].manual_seed(key)


class CallerGenerators:
    """Keeps the caller's generators, as they were, while layers seed the default ones inside the ``with`` block."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> CallerGenerators:
        self._cpu = torch.default_generator.get_state()
        self._cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return self

    def __exit__(self, *_: object) -> None:
        torch.default_generator.set_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """The caller's own code runs inside this block, and draws as if no layer had run."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
