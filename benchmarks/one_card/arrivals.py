"""Emulated neighbours of a lane: it waits for messages as long as it would, and nothing is computed for them.

On a GPU a message is a kernel of one thread that lasts so long, on a stream of its own, after the event that causes it.
Several messages travel at once, on as many streams, and arrive at the neighbours' pace:

    lane        F0 ── record ── F1 ── record ──────────── wait ── B0 ───── wait ── B1
    messages         └ wait ─ travels ──────── arrives ──┘               │
                               └ wait ─ travels ── wait for that ─ pace ─┘

On the CPU, where an operator ends before the host goes on, the host waits.
"""

from __future__ import annotations

import math
import time
from typing import Any, Protocol

import torch

from benchmarks.one_card.neighbours import Act, Arrivals, Worker


class Waits(Protocol):
    """What a lane calls in each batch, on its own stream."""

    def begin(self) -> None: ...

    def before(self, act: Act) -> None: ...

    def after(self, act: Act) -> None: ...


class DeviceWaits:
    """Of a lane on ``stream``. cycles_per_s: of ``torch.cuda._sleep``."""

    def __init__(self, worker: Worker, stream: torch.cuda.Stream, cycles_per_s: float) -> None:
        self._worker, self._stream, self._cycles_per_s = worker, stream, cycles_per_s
        self._inputs = torch.cuda.Stream(stream.device)
        self._travelling = [torch.cuda.Stream(stream.device) for _ in range(_at_once(worker.gradients))]
        self._arrived: dict[Act, Any] = {}  # of this batch: the event before an action

    def begin(self) -> None:
        self._arrived = {}
        if self._worker.inputs is None:
            return
        self._inputs.wait_event(self._stream.record_event())
        latency_s, pace_s = self._worker.inputs
        for m in range(self._worker.micro_batches):
            self._arrived[Act("F", m)] = self._delay(self._inputs, pace_s if m else latency_s)

    def before(self, act: Act) -> None:
        if act in self._arrived:
            self._stream.wait_event(self._arrived[act])

    def after(self, act: Act) -> None:
        arrivals = self._worker.gradients
        if act.kind != "F" or arrivals is None:
            return
        m, previous = act.micro_batch, self._arrived.get(Act("B", act.micro_batch - 1))
        stream = self._travelling[m % len(self._travelling)]
        stream.wait_event(self._stream.record_event())
        self._delay(stream, arrivals.latency_s - arrivals.pace_s)
        if previous is not None:
            stream.wait_event(previous)
        self._arrived[Act("B", m)] = self._delay(stream, min(arrivals.pace_s, arrivals.latency_s))

    def _delay(self, stream: torch.cuda.Stream, seconds: float) -> Any:
        if seconds > 0:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(seconds * self._cycles_per_s))
        return stream.record_event()


def _at_once(arrivals: Arrivals | None) -> int:
    """How many messages travel at once at most."""
    return math.ceil(arrivals.latency_s / arrivals.pace_s - 1e-9) if arrivals and arrivals.pace_s else 1


class HostWaits:
    """On the CPU: of one lane of several in turn, whose waits the others use."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._inputs: list[float] = []
        self._left: list[float] = []

    def begin(self) -> None:
        now, arrivals = time.perf_counter(), self._worker.inputs
        self._inputs = arrivals.times([now] * self._worker.micro_batches) if arrivals else []
        self._left = []

    def before(self, act: Act) -> None:
        if act.kind == "F":
            until = self._inputs[act.micro_batch] if self._inputs else 0.0
        else:
            arrivals = self._worker.gradients
            until = arrivals.times(self._left)[act.micro_batch] if arrivals else 0.0
        time.sleep(max(0.0, until - time.perf_counter()))

    def after(self, act: Act) -> None:
        if act.kind == "F":
            self._left.append(time.perf_counter())


def cycles_per_s() -> float:
    """Measure how many cycles ``torch.cuda._sleep`` waits for in a second."""
    cycles = 10_000_000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return cycles / (begin.elapsed_time(end) / 1e3)
