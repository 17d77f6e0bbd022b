"""Loads the compiled library and asks it what it is."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

PATH = Path(__file__).parent / "libavgpipe.so"

if not PATH.exists():
    raise ImportError(
        f"{PATH} is missing: build it with `pip install --no-build-isolation -e .` in the folder of setup.py"
    )
try:
    torch.ops.load_library(PATH)  # type: ignore[no-untyped-call]  # torch leaves it untyped
except OSError as error:
    reason = error.__cause__ or error
    raise ImportError(
        f"torch {torch.__version__} cannot load {PATH} ({reason}): install torch>=2.11, or rebuild with "
        "`pip install --no-build-isolation -e .`"
    ) from None


def _ask(function: str) -> str:
    """The text that a function of the library returns."""
    entry = getattr(ctypes.CDLL(str(PATH)), function)
    entry.restype = ctypes.c_char_p
    text: bytes = entry()
    return text.decode()


def _entries(text: str) -> list[str]:
    return [entry for entry in text.split(",") if entry]


def build_info() -> dict[str, str | bool | list[str]]:
    """What was built, and what this processor offers to it.

    Returns a dict with the keys `version` (of avgpipe), `torch` (the version built against; others from 2.11
    load the library too), `cpu_features` (instruction sets this processor has among those that kernels are
    built for), `cuda` (whether CUDA kernels are built in) and `cuda_arch_list` (as in TORCH_CUDA_ARCH_LIST).
    """
    facts = dict(line.split("=", 1) for line in _ask("avgpipe_build_info").splitlines())
    architectures = _entries(facts["cuda_arch_list"])
    return {
        "version": facts["version"],
        "torch": facts["torch"],
        "cpu_features": _entries(_ask("avgpipe_cpu_features")),
        "cuda": bool(architectures),
        "cuda_arch_list": architectures,
    }


def cpu_path() -> str:
    """The instruction set of the CPU kernels in use: "avx512", "avx2" or "baseline"."""
    return _ask("avgpipe_cpu_path")
