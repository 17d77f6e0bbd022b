"""The hardware queues of a CUDA device, which all streams of a process share.

What waits at the head of a queue holds up all behind it, of whatever stream: lanes that share a queue take turns, and a
kernel of NCCL that waits for another device may wait for ever. CUDA makes 8 queues unless a variable asks for more; it
reads the variable when a process uses a device for the first time.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST = 32
_UNDER_MPS = 16  # four processes of one device were seen to lack memory for 32 each

_log = logging.getLogger("avgpipe")


def mps_runs() -> bool:
    """Whether MPS runs here, by which kernels of several processes run at once on a device."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    try:
        return Path("/proc", str(int((folder / "nvidia-cuda-mps-control.pid").read_text()))).exists()
    except (OSError, ValueError):
        return False


def queue_environment() -> dict[str, str]:
    """Return the variable for a process that will use a CUDA device; nothing if the environment has it."""
    return {} if VARIABLE in os.environ else {VARIABLE: str(_UNDER_MPS if mps_runs() else MOST)}


def ask_for_queues(device: torch.device, lanes: int) -> None:
    """Ask for enough queues for this process and its ``lanes`` on a device; warn if it is too late for that."""
    if device.type != "cuda" or VARIABLE in os.environ:
        return
    import torch

    asked = queue_environment()
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped in torch
        os.environ.update(asked)
    elif lanes > 1:
        _log.warning(
            "CUDA has started in this process without %s, so the streams of %d lanes share 8 hardware queues, and wait "
            "for each other: set %s=%s before the process starts, or make the Pipeline before anything else uses CUDA",
            *(VARIABLE, lanes, *next(iter(asked.items()))),
        )


def warn_of_few_queues(communicators: int) -> None:
    """Warn where kernels of NCCL, which wait for other devices, share queues with lanes."""
    asked = os.environ.get(VARIABLE, "")
    if communicators and not (asked.isdigit() and int(asked) >= MOST):
        _log.warning(
            "%d communicators of NCCL with %s: their kernels wait for other devices, and hold up what shares a queue "
            "with them, so that training may hang: set %s=%d before the process starts",
            *(communicators, f"{VARIABLE}={asked}" if asked else "8 hardware queues", VARIABLE, MOST),
        )
