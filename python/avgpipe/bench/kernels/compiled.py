"""torch.compile as a baseline."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from avgpipe.bench.kernels.workspace import Workspace
from avgpipe.bench.section import Skipped, Variant

NAME = "torch.compile"


def compiled(space: Workspace, bytes_per_element: float, update: Callable[[], None]) -> Variant | Skipped:
    """`update` compiled by its first call here, or why that did not work."""
    if not space.settings.compiles:
        return Skipped(NAME, "--no-compile")
    # Code compiled for an earlier section must not count against this one's limit of recompilations.
    torch.compiler.reset()
    run: Callable[[], None] = torch.no_grad()(torch.compile(update, dynamic=False, fullgraph=True))
    begin = time.perf_counter()
    try:
        run()
    except Exception as error:  # what compilers raise is beyond counting; the reason is shown
        return Skipped(NAME, " ".join(str(error).split())[:200] or type(error).__name__)
    if space.device == "cuda":
        torch.cuda.synchronize()
    return Variant(NAME, "baseline", bytes_per_element, run, compile_s=time.perf_counter() - begin)
