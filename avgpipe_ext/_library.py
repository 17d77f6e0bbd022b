"""Loads the compiled libraries and reads their build information."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

PATH = Path(__file__).parent / "libavgpipe.so"
_BUILD = "`pip install --no-build-isolation -e .` in the folder of setup.py"

if not PATH.exists():
    raise ImportError(f"{PATH} is missing: build it with {_BUILD}")
try:
    from avgpipe_ext import _native
except ImportError as error:
    raise ImportError(
        f"{PATH.parent} has no _native module for this Python ({error}): build it with {_BUILD}"
    ) from None
try:
    torch.ops.load_library(PATH)  # type: ignore[no-untyped-call]  # torch leaves it untyped
except OSError as error:
    reason = error.__cause__ or error
    raise ImportError(
        f"torch {torch.__version__} cannot load {PATH} ({reason}): install torch>=2.11, or rebuild with {_BUILD}"
    ) from None


def build_info() -> dict[str, Any]:
    """Return facts about the build, and the instruction sets of this processor.

    The result is a dict with the keys `version` (of avgpipe), `torch` (the version built against; the library
    also loads with others from 2.11), `cpu_features` (instruction sets of this processor among those that
    kernels are built for), `cuda` (whether CUDA kernels are built in) and `cuda_arch_list` (as in
    TORCH_CUDA_ARCH_LIST).
    """
    return _native.build_info(str(PATH))


def cpu_path() -> str:
    """Return the instruction set of the CPU kernels in use: "avx512", "avx2" or "baseline"."""
    return _native.cpu_path(str(PATH))
