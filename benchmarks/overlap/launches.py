"""Question: what does a batch cost the host of a device, without graphs and with a graph for each batch?

    OMP_NUM_THREADS=1 python -m benchmarks.overlap.launches [--rounds 7]

There is no device: streams, events and graphs do nothing, and tensors are tiny ones of the CPU. So what is left is the
host's time to issue a batch, in which operators of the CPU stand for launches of kernels; a launched graph computes
nothing. One process has all stages. Both ways run in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

import avgpipe
from avgpipe import device as devices
from benchmarks.common.record import say, write_record
from benchmarks.overlap import models

STAGES, MICRO_BATCHES, SAMPLES, LENGTH, WIDTH, BATCHES = 4, 4, 32, 4, 8, 12
OWN = {"batch": "per-pipeline"}


class _Event:
    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Stream:
    current: Any = None

    def __init__(self, device: Any = None) -> None:
        self._before: list[Any] = []

    def __enter__(self) -> _Stream:
        self._before.append(_Stream.current)
        _Stream.current = self
        return self

    def __exit__(self, *_: object) -> None:
        _Stream.current = self._before.pop()

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()


class _Graph:
    """What is captured runs once, on the CPU; a launch is counted."""

    def __init__(self, count: Callable[[], None]) -> None:
        self.replay = count

    def capture_begin(self, **_: Any) -> None: ...

    def capture_end(self) -> None: ...

    def pool(self) -> int:
        return 1

    def register_generator_state(self, state: Any) -> None: ...


class _State:
    def manual_seed(self, seed: int) -> None: ...

    def get_offset(self) -> int:
        return 0


class IdleDevice:
    """Takes the place of torch's streams, events and graphs, and does nothing. ``launches``: of graphs."""

    Stream = _Stream

    def __init__(self) -> None:
        self.idle: Any = defaultdict(list)
        self.launches = 0
        _Stream.current = _Stream()

    def Event(self, device: Any, enable_timing: bool = False) -> _Event:
        return _Event()

    def current_stream(self, device: Any) -> Any:
        return _Stream.current

    def record_stream(self, tensor: Any, stream: Any) -> None: ...

    def enqueues(self, device: Any) -> bool:
        return True

    def holds(self, tensor: Any) -> bool:
        return True

    def pinned(self, tensor: Any) -> Any:
        return tensor

    def pinned_bytes(self, size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8)

    def has_graphs(self, device: Any) -> bool:
        return True

    def free_cached(self, device: Any) -> None: ...

    def random_state(self, device: Any) -> _State:
        return _State()

    def draw_from(self, device: Any, state: Any) -> None: ...

    def graph(self, device: Any) -> _Graph:
        return _Graph(self._launched)

    def _launched(self) -> None:
        self.launches += 1


@contextmanager
def idle_device() -> Iterator[IdleDevice]:
    """Have pipelines of the CPU run as on a device, which does nothing but what its operators cost the host."""
    device = IdleDevice()
    with mock.patch.object(devices, "backend", device):
        yield device


def batches(count: int) -> list[Any]:
    tokens = torch.randint(models.VOCABULARY, (count, SAMPLES, LENGTH + 1))
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in tokens]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def layers_of(model: str) -> list[nn.Module]:
    if model == "transformer":
        return models.transformer(WIDTH, 8, heads=2, length=LENGTH)
    return models.lstm(WIDTH, 4)


def seconds(pipeline: Any, data: list[Any], device: IdleDevice) -> tuple[float, float]:
    """Return the host's seconds of a batch, and its launches of graphs."""
    device.launches, begin = 0, time.perf_counter()
    for result in pipeline.train(data):
        assert result.samples == SAMPLES
    return (time.perf_counter() - begin) / len(data), device.launches / len(data)


def plain(model: str, data: list[Any]) -> float:
    """Return the seconds of a batch without any pipeline, in the same micro-batches."""
    module = nn.Sequential(*layers_of(model))
    optimizer = adamw(module.parameters())
    begin = time.perf_counter()
    for x, y in data:
        for inputs, targets in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES)):
            (models.loss(module(inputs), targets) / MICRO_BATCHES).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - begin) / len(data)


def row_of(model: str, pipelines: int, rounds: int) -> dict[str, Any]:
    data = batches(BATCHES * pipelines)
    own = {"pipelines": pipelines, **OWN} if pipelines > 1 else {}
    plan = avgpipe.Plan(stages=STAGES, micro_batches=MICRO_BATCHES, **own)
    make = partial(avgpipe.Pipeline, loss_fn=models.loss, optimizer=adamw)
    found: dict[str, list[float]] = defaultdict(list)
    launches = 0.0
    with (
        idle_device() as device,
        make(layers_of(model), plan) as eager,
        make(layers_of(model), plan, extensions=[avgpipe.CudaGraphs()]) as graphs,
    ):
        for pipeline in (eager, graphs):
            seconds(pipeline, data, device)  # the first batches, with their checks and captures
        for _ in range(rounds):
            found["plain"].append(plain(model, data))
            found["eager"].append(seconds(eager, data, device)[0])
            taken, launches = seconds(graphs, data, device)
            found["graphs"].append(taken)
    ms = {name: 1e3 * statistics.median(of) for name, of in found.items()}
    say(f"{model}, N = {pipelines}: {ms}, {launches:g} launches")
    return {"model": model, "pipelines": pipelines, "ms": ms, "launches": launches}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row_of(model, n, args.rounds) for model in ("transformer", "lstm") for n in (1, 2, 4)]
    write_record("overlap-launches", __doc__.split("\n")[0], {"stages": STAGES, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
