"""Measuring variants in turn: A B C A B C ..., so that whatever slows the machine down slows all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from avgpipe.bench.section import Variant

Clock = Callable[[Callable[[], object], int], float]

_WARM_UPS = 2
# A sample is at least this long, of several calls where one is short: beyond the clock's grain, and on CUDA long
# enough that launches run ahead of the device, as they do in training.
_SAMPLE_S = {"cpu": 2e-3, "cuda": 1e-2}
_MAX_CALLS = 1000


def measure(variants: Sequence[Variant], rounds: int, device: str) -> list[list[float]]:
    """Seconds per call, `rounds` samples for each variant. Every round goes through all variants in order."""
    clock = cuda_clock if device == "cuda" else cpu_clock
    calls = [_calls(variant, clock, _SAMPLE_S[device]) for variant in variants]
    samples: list[list[float]] = [[] for _ in variants]
    for _ in range(rounds):
        for variant, count, seconds in zip(variants, calls, samples):
            seconds.append(clock(variant.run, count))
    return samples


def cpu_clock(run: Callable[[], object], calls: int) -> float:
    """Mean seconds of `calls` calls."""
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begin) / calls


def cuda_clock(run: Callable[[], object], calls: int) -> float:
    """Mean seconds of `calls` calls on the current stream, by the device's own clock."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls


def _calls(variant: Variant, clock: Clock, sample_s: float) -> int:
    """Warm the variant up; how many calls make a sample."""
    call_s = min(clock(variant.run, 1) for _ in range(_WARM_UPS))
    return min(_MAX_CALLS, max(1, math.ceil(sample_s / max(call_s, 1e-9))))
