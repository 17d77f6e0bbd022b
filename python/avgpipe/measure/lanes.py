"""How much more two pipelines that share a CUDA device do than one, by two replicas of the model on streams of their
own, as a worker runs its lanes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from avgpipe.measure.clock import Clock, repeat
from avgpipe.measure.examples import Example
from avgpipe.measure.sweep import Sweep

_TURNS = 4  # micro-batches of each replica in a sample


def lane_gain(sweeps: Sequence[Sweep], example: Example, budget_s: float) -> float:
    """Of two ``sweeps`` over replicas on one CUDA device: time on one stream by time on two, from 1 to 2."""
    device = sweeps[0].stage.device
    streams: list[Any] = [torch.cuda.Stream(device) for _ in sweeps]  # type: ignore[no-untyped-call]
    clock = Clock(device)
    alone, together = list[float](), list[float]()

    def once(number: int) -> None:
        alone.append(_seconds(clock, lambda: _alternate(sweeps, [streams[0]] * len(sweeps), example)))
        together.append(_seconds(clock, lambda: _alternate(sweeps, streams, example)))

    once(0)  # fills the allocator's pools of both streams
    alone.clear()
    together.clear()
    repeat(once, budget_s)
    return min(2.0, max(1.0, statistics.median(alone) / statistics.median(together)))


def _alternate(sweeps: Sequence[Sweep], streams: Sequence[Any], example: Example) -> None:
    """The replicas' forwards and backwards in turn; the current stream waits for all of them."""
    current = torch.cuda.current_stream(sweeps[0].stage.device)
    for stream in streams:
        stream.wait_stream(current)
    for _ in range(_TURNS):
        losses = []
        for sweep, stream in zip(sweeps, streams):
            with torch.cuda.stream(stream):
                losses.append(sweep.uncut(example))
        for loss, stream in zip(losses, streams):
            with torch.cuda.stream(stream):
                loss.backward()  # type: ignore[no-untyped-call]
    for stream in streams:
        current.wait_stream(stream)


def _seconds(clock: Clock, act: Callable[[], None]) -> float:
    begin = clock.mark()
    act()
    end = clock.mark()
    clock.settle()
    return clock.seconds(begin, end)
