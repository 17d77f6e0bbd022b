"""Emulated compute: a stage that occupies its device for given times without using a processor."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import Any

import torch
from torch import nn

WEIGHTS = 16  # parameters of an emulated stage; their mean is added to every value of its activation
_PR_SET_TIMERSLACK = 29
_device = threading.Lock()  # a device does one thing at a time, whichever thread asks
_MOST_LATE_S = 1e-3  # later ones were kept from the processor, which says nothing of the next


class Occupied:
    """The device is occupied inside, for `seconds` in all; what is done there takes part of them.

    A sleep ends some 0.1 ms late, which no device would: it is asked to end as much earlier as others were late before,
    and what is then left is waited for.
    """

    _late_s = 0.0  # of sleeps in this process, a running mean; changed with the device occupied

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        _device.acquire()
        self._end = time.perf_counter() + self._seconds

    def __exit__(self, *_: object) -> None:
        wake = self._end - Occupied._late_s
        if (left := wake - time.perf_counter()) > 0:
            time.sleep(left)
            late = min(time.perf_counter() - wake, _MOST_LATE_S)
            Occupied._late_s += (late - Occupied._late_s) / 16
        while time.perf_counter() < self._end:
            pass
        _device.release()


def precise_sleeps() -> None:
    """Have the kernel wake this thread on time: by default it may be 50 microseconds late."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class EmulatedStage(nn.Module):
    """(samples, values) -> the same shape, in `forward_s`; backward in `backward_s`, half of it for each gradient.

    A schedule that splits the backward can run the halves apart: they are different nodes of the graph, which meet in
    an addition, whose own gradients are free. The first stage, whose input needs no gradient, spends all of it on its
    weights.
    """

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.weight = nn.Parameter(torch.zeros(WEIGHTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with Occupied(self.forward_s):
            half = self.backward_s / 2
            offset = _apply(_WeightsTake, self.weight, x.shape, half if x.requires_grad else self.backward_s)
            # Torch's own addition, no Function: whoever splits a graph can run that one for one of its gradients alone.
            return _apply(_GradientTakes, x, half) + offset


class MeanLoss(nn.Module):
    """(output, target) -> the mean of the output; its gradient is spread out without writing it."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return _apply(_Mean, output)


class _GradientTakes(torch.autograd.Function):
    """The identity, whose gradient occupies the device and comes in fresh memory as a real one would."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with Occupied(ctx.seconds):
            return grad.clone(memory_format=torch.contiguous_format), None


class _WeightsTake(torch.autograd.Function):
    """The mean of the weights, spread out without writing it, whose gradient occupies the device."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, shape: torch.Size, seconds: float) -> torch.Tensor:
        ctx.count, ctx.seconds = weight.numel(), seconds
        return weight.mean().expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with Occupied(ctx.seconds):
            return (grad.sum() / ctx.count).repeat(ctx.count), None, None


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.count = x.shape, x.numel()
        return x.mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (grad / ctx.count).expand(ctx.shape)


def _apply(function: type[torch.autograd.Function], *values: Any) -> torch.Tensor:
    made: torch.Tensor = function.apply(*values)  # type: ignore[no-untyped-call]
    return made
