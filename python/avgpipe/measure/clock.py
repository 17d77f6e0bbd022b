"""Times of what a device does, and what is measured in turn within a time."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_ROUNDS = 3, 25  # at least and at most


class Clock:
    """Marks on the device's own course: on CUDA events of its current stream, else the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._has_streams = device, device.type == "cuda"

    def mark(self) -> Any:
        if not self._has_streams:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait for all that was begun; ``seconds`` may then be asked."""
        if self._has_streams:
            torch.cuda.synchronize(self._device)

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3 if self._has_streams else float(end - begin)


def repeat(one_round: Callable[[int], None], budget_s: float) -> int:
    """Call with 0, 1, 2, ... until about ``budget_s`` seconds are spent, but at least 3 times and at most 25."""
    fewest, most = _ROUNDS
    begin = time.perf_counter()
    for done in range(most):
        spent_s = time.perf_counter() - begin
        if done >= fewest and spent_s + spent_s / done > budget_s:
            return done
        one_round(done)
        gc.collect(0)  # what the round has left, while nothing is timed
    return most


def typical(samples: Sequence[float]) -> float:
    """The mean, without a tenth of the samples at either end.

    Batches are sums of many times, and sums of medians are below them where long times are longer than short ones are
    short.
    """
    left_out = len(samples) // 10
    return statistics.fmean(sorted(samples)[left_out : len(samples) - left_out])


@contextmanager
def undisturbed(threads: int) -> Iterator[None]:
    """Inside, torch computes with so many threads and the collector waits."""
    before, collects = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(threads)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        torch.set_num_threads(before)
