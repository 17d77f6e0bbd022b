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
    key = 0
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


@contextmanager
def caller_generators(device: torch.device) -> Iterator[None]:
    """Give the caller's generators back, as they were, at the end of the block."""
    cpu = torch.default_generator.get_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
