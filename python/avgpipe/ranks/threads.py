"""Threads of torch's operators on a machine that has other work."""

from __future__ import annotations

import logging
import os

import torch

_log = logging.getLogger("avgpipe")
_CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # variables by which a user chooses
_warned = False


def warn_of_threads() -> None:
    """Once, where a pipeline computes in this process alone: small operators wait for each thread in turn, which takes
    many times as long as the work where a thread has lost its processor.
    """
    global _warned
    threads, processors = torch.get_num_threads(), os.cpu_count() or 1
    if (
        _warned
        or threads == 1
        or any(name in os.environ for name in _CHOSEN)
        or not hasattr(os, "getloadavg")
    ):
        return
    if os.getloadavg()[0] >= processors:
        _warned = True
        _log.warning(
            "this machine is busy, and each operator of torch waits for %d threads: micro-batches may take many times "
            "as long as with one; set OMP_NUM_THREADS=1, or call torch.set_num_threads(1)",
            threads,
        )
