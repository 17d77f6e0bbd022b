"""The updates as CuPy elementwise kernels, a baseline on CUDA: one pass over flat arrays, written by hand."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from avgpipe.bench.kernels.baselines import ADAMW, ALPHA, LR, MU, STEP
from avgpipe.bench.kernels.workspace import Workspace
from avgpipe.bench.section import Skipped, Variant

NAME = "CuPy ElementwiseKernel"


def _t(value: float) -> str:
    """The number in the kernel's type."""
    return f"(T)({value!r})"


_RULE = f"T force = {_t(ALPHA)} * (z - before); update += x - before; x += force;"
_BETA1, _BETA2 = ADAMW["betas"]
_UNBIAS2 = (1 - _BETA2**STEP) ** -0.5
# By name: operands that are read, operands that are read and written, and the code for one element.
_KERNELS = {
    "pull": (("z",), ("x",), f"x += {_t(ALPHA)} * (z - x);"),
    "sgd": (
        ("grad", "z"),
        ("x", "first", "update"),
        f"T before = x; first = {_t(MU)} * first + grad; x -= {_t(LR)} * first; {_RULE}",
    ),
    "adamw": (
        ("grad", "z"),
        ("x", "first", "second", "update"),
        f"T before = x; first += {_t(1 - _BETA1)} * (grad - first);"
        f"second = {_t(_BETA2)} * second + {_t(1 - _BETA2)} * grad * grad;"
        f"x = {_t(1 - LR * ADAMW['weight_decay'])} * x - {_t(LR / (1 - _BETA1**STEP))} * first"
        f" / (sqrt(second) * {_t(_UNBIAS2)} + {_t(ADAMW['eps'])}); {_RULE}",
    ),
}


def cupy_variants(space: Workspace, name: str, bytes_per_element: float) -> list[Variant | Skipped]:
    """The update `name` in CuPy, on CUDA, over one tensor; nothing elsewhere."""
    if space.device != "cuda" or len(space.shapes) > 1:
        return []
    try:
        cupy = import_module("cupy")
    except ImportError as error:
        return [Skipped(NAME, str(error))]
    try:
        return [Variant(NAME, "baseline", bytes_per_element, _launcher(cupy, space, name))]
    except Exception as error:  # a dtype or a driver that this CuPy does not know; the reason is shown
        return [Skipped(NAME, " ".join(str(error).split())[:200] or type(error).__name__)]


def _launcher(cupy: Any, space: Workspace, name: str) -> Any:
    reads, writes, code = _KERNELS[name]
    kernel = cupy.ElementwiseKernel(
        ", ".join(f"T {operand}" for operand in reads),
        ", ".join(f"T {operand}" for operand in writes),
        code,
        f"avgpipe_bench_{name}",
    )
    operands = [cupy.from_dlpack(space.flat(operand)) for operand in (*reads, *writes)]
    # Timing events are recorded on torch's stream, so the kernel goes there.
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)

    def run() -> None:
        with stream:
            kernel(*operands)

    run()
    torch.cuda.synchronize()
    return run
