"""What a measurement ran on: versions, processor, memory."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from avgpipe import __version__
from avgpipe.measure.profiler import cpu_model, lines_of


def versions() -> dict[str, Any]:
    import avgpipe_ext

    found: dict[str, Any] = {
        "avgpipe": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "native": dict(avgpipe_ext.build_info()),
    }
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def machine(threads: int, device: str) -> dict[str, Any]:
    """Processor, cores and threads in use, bytes of memory; on CUDA the device."""
    found: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        # Near 0 where nothing else ran meanwhile.
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "memory_available_bytes": memory_available_bytes("cpu"),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["gpu"] = properties.name
        found["gpu_capability"] = f"{properties.major}.{properties.minor}"
        found["gpu_memory_bytes"] = properties.total_memory
        found["gpu_memory_available_bytes"] = memory_available_bytes("cuda")
    return found


def memory_available_bytes(device: str) -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    for line in lines_of("/proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None
