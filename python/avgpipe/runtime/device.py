"""Which device is a process's own.

CUDA has a current device for each thread, at first device 0. Whoever switches to another one for a moment goes back to
it afterwards, which makes a context there, of some hundred MB; so a process selects its device in every thread that
comes near it.
"""

from __future__ import annotations

import os

import torch


def own_device(device: torch.device | str) -> torch.device:
    """``device``, of CUDA with its number: where a launcher has numbered the processes of this host, each takes one of
    its own as long as there are enough; else it is the current one. ValueError where torch sees no CUDA device, and for
    one that is neither CPU nor CUDA.
    """
    asked = device
    try:
        device = torch.device(device)
    except RuntimeError:  # it knows no such type
        raise ValueError(f"device {asked!r}: use 'cpu' or 'cuda'") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"device {str(device)!r}: use 'cpu' or 'cuda'")
    if not torch.cuda.is_available():
        raise ValueError(
            f"device {str(device)!r} was asked for, but torch {torch.__version__} sees no CUDA device: use device='cpu'"
        )
    if device.index is not None:
        return device
    place = os.environ.get("LOCAL_RANK")
    index = torch.cuda.current_device() if place is None else int(place) % torch.cuda.device_count()
    return torch.device("cuda", index)


def select(device: torch.device) -> None:
    """Make a CUDA device the calling thread's current one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
