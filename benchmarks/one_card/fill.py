"""A model, without a measurement: how far the kernels of one stage fill a GPU, and what two lanes could gain by that.

    python -m benchmarks.one_card.fill

A product of matrices is cut into tiles; each is a block of threads that has a multiprocessor to itself, and the last
wave of blocks may leave some idle. Of the tiles and the splits of the summed dimension that a library has, the fastest
is taken. A kernel takes 2 us at least. ``fill`` is the part of the multiprocessors' time that is used: kernels that
fill f gain at most min(N, 1 / f) by N lanes on the device, and no more than the host issues. Peaks are those of data
sheets; the efficiencies of tiles are guesses. An ideal library is assumed, so real kernels take longer and leave more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from benchmarks.tables.markdown import table

_LEAST_S = 2e-6  # of a kernel, from launch to launch in a graph or on a full queue
_SPLIT_S = 1.5e-6  # to add up the parts of a product whose summed dimension is split
_TILES = (
    (128, 256, 0.80),
    (128, 128, 0.72),
    (128, 64, 0.60),
    (64, 64, 0.50),
    (32, 128, 0.45),
)  # and their efficiency
_SPLITS, _LEAST_DEPTH = (1, 2, 3, 4, 6, 8), 128
_ATTENTION_EFFICIENCY = 0.35
_H100_FLOPS = {"bf16": 990e12, "tf32": 495e12, "fp32": 67e12}
_H100_SMS, _QUARTER_SMS = 132, 32


class Kernel(NamedTuple):
    seconds: float
    fill: float


@dataclass(frozen=True)
class Gpu:
    """Operations, bytes of memory and bytes of the L2 cache per second; ``element``: bytes of a number."""

    name: str
    sms: int
    flops: float
    memory: float
    cache: float
    element: int

    def matrices(self, m: int, n: int, k: int) -> Kernel:
        """Multiply [m, k] by [k, n]."""
        read_s = self.element * (m * k + n * k + m * n) / self.cache
        found = []
        for (tall, wide, efficiency), split in product(_TILES, _SPLITS):
            if k / split < _LEAST_DEPTH:
                continue
            blocks = -(-m // tall) * -(-n // wide) * split
            waves = -(-blocks // self.sms)
            block_s = 2 * tall * wide * (k / split) / (self.flops / self.sms * efficiency)
            seconds = max(waves * block_s + (_SPLIT_S if split > 1 else 0.0), read_s, _LEAST_S)
            compute = blocks / (waves * self.sms) * min(1.0, waves * block_s / seconds)
            found.append(Kernel(seconds, max(compute, read_s / seconds)))
        return min(found, key=lambda kernel: kernel.seconds)

    def elementwise(self, count: int, element: int | None = None) -> Kernel:
        """Read two numbers and write one, ``count`` times."""
        move_s = 3 * count * (element or self.element) / self.memory
        seconds = max(_LEAST_S, _LEAST_S / 2 + move_s)
        return Kernel(seconds, min(1.0, max(move_s / seconds, count / 1024 / (8 * self.sms))))


def encoder(gpu: Gpu, samples: int, length: int = 128, width: int = 1024, heads: int = 16) -> list[Kernel]:
    """Forward and backward of a layer of BERT."""
    tokens = samples * length
    shapes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))  # outputs, inputs
    forward = [gpu.matrices(tokens, out, into) for out, into in shapes]
    inputs = [gpu.matrices(tokens, into, out) for out, into in shapes]
    weights = [gpu.matrices(out, into, tokens) for out, into in shapes]
    attend_s = max(2 * _LEAST_S, 4 * length**2 * width * samples / (gpu.flops * _ATTENTION_EFFICIENCY))
    attend_fill = min(1.0, samples * heads * -(-length // 128) / gpu.sms)
    between = [gpu.elementwise(tokens * width) for _ in range(6)] + [gpu.elementwise(4 * tokens * width)]
    sums = [gpu.elementwise(3 * width**2, 4) for _ in shapes] + [gpu.elementwise(width, 4) for _ in range(12)]
    return [
        *forward,
        Kernel(attend_s, attend_fill),
        *between,
        *inputs,
        *weights,
        Kernel(2.5 * attend_s, attend_fill),
        *between,
        *between[:3],
        *sums,
    ]


def lstm(gpu: Gpu, samples: int, steps: int, width: int) -> list[Kernel]:
    """Forward and backward of an LSTM's layer; at each step its weights are read from the cache."""
    gates = 4 * width
    read_s = gates * width * gpu.element / gpu.cache
    recurrent = gpu.matrices(samples, gates, width)
    recurrent = Kernel(
        max(recurrent.seconds, read_s), max(recurrent.fill, min(1.0, read_s / recurrent.seconds))
    )
    step = [recurrent, gpu.elementwise(samples * gates)]
    forward = [gpu.matrices(samples * steps, gates, width), *step * steps]
    forward += [gpu.elementwise(samples * steps * width)] * 2
    backward = [
        gpu.matrices(samples * steps, width, gates),
        gpu.matrices(gates, width, samples * steps),
        gpu.matrices(gates, width, samples * steps),
        *step * steps,
        gpu.elementwise(2 * gates * width, 4),
        *[gpu.elementwise(width, 4)] * 4,
    ]
    return forward + backward


class Host(NamedTuple):
    """What the host takes to issue a forward and a backward of a stage.

    per_call_s: Of a call from Python, measured with four lanes on a machine with an H100; a kernel within cuDNN takes
    ``_CUDNN_S``. per_pair_s: Of graphs, whatever is in them.
    """

    name: str
    per_call_s: float = 0.0
    per_pair_s: float = 0.0


_CUDNN_S = 5e-6
HOSTS = (
    Host("eager", per_call_s=33e-6),
    Host("a graph for each action", per_pair_s=360e-6),
    Host("a graph for the batch", per_pair_s=16e-6),
)


@dataclass(frozen=True)
class Stage:
    """A stage of four of a model, and its micro-batches.

    Attributes:
        lstms: Layers that cuDNN computes, in a call each for forward and backward and some more; 0: BERT's layers.
        layers: Of the stage.
    """

    model: str
    batch: int
    layers: int
    micro_batches: tuple[int, ...]
    steps: int = 0
    width: int = 1024

    def kernels(self, gpu: Gpu, samples: int) -> list[Kernel]:
        one = lstm(gpu, samples, self.steps, self.width) if self.steps else encoder(gpu, samples)
        return one * self.layers

    def host_s(self, host: Host, kernels: int) -> float:
        if host.per_pair_s:
            return host.per_pair_s
        if self.steps:
            return 12 * self.layers * host.per_call_s + kernels * _CUDNN_S
        return kernels * host.per_call_s


STAGES = (
    Stage("BERT-large", 32, 6, (4, 8)),
    Stage("GNMT-8", 128, 2, (4, 8), steps=25),
    Stage("AWD-LSTM", 40, 1, (2, 4), steps=70, width=1150),
)


def h100(dtype: str, sms: int = _H100_SMS) -> Gpu:
    part = sms / _H100_SMS
    element = 2 if dtype == "bf16" else 4
    name = f"H100, {dtype}" if sms == _H100_SMS else f"a quarter, {dtype}"
    return Gpu(name, sms, _H100_FLOPS[dtype] * part, 3.0e12 * part, 5.5e12 * part, element)


GPUS = (
    *(h100(dtype) for dtype in _H100_FLOPS),
    *(h100(dtype, _QUARTER_SMS) for dtype in ("fp32", "bf16")),
    Gpu("V100, fp32", 80, 15.7e12, 0.9e12, 2.0e12, 4),
)


def total(kernels: Iterable[Kernel]) -> Kernel:
    """Return the seconds of all, one after another, and their mean fill by time."""
    made = list(kernels)
    seconds = sum(kernel.seconds for kernel in made)
    return Kernel(seconds, sum(kernel.seconds * kernel.fill for kernel in made) / seconds)


def gain(lanes: int, stage: Kernel, host_s: float = 0.0) -> float:
    """Return what lanes gain over one: on the device at most min(N, 1 / fill), and no faster than the host issues."""
    alone_s = max(host_s, stage.seconds)
    each_s = stage.seconds / min(lanes, 1 / stage.fill)
    return alone_s / max(host_s, each_s)


def fill_table() -> str:
    """Return the gains of two lanes, of each model, micro-batch and GPU."""
    rows = []
    for stage in STAGES:
        for micro_batches in stage.micro_batches:
            samples = stage.batch // micro_batches
            found = {gpu.name: stage.kernels(gpu, samples) for gpu in GPUS}
            first, *others = found.values()
            one = total(first)
            by_host = " / ".join(f"{gain(2, one, stage.host_s(host, len(first))):.2f}" for host in HOSTS)
            rows.append(
                (
                    *(stage.model, samples, f"{1e3 * one.seconds:.2f}", f"{one.fill:.2f}"),
                    *(f"{gain(2, one):.2f}", by_host),
                    *(f"{gain(2, total(kernels)):.2f}" for kernels in others),
                )
            )
    heads = "model | micro-batch: | F + B, ms: | fill: | N = 2: | issued eagerly / graphs of actions / of the batch:"
    return table(" | ".join([heads, *(f"{gpu.name}:" for gpu in GPUS[1:])]), rows)


def main() -> None:
    print(fill_table())


if __name__ == "__main__":
    main()
