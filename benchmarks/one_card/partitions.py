"""What a partition is worth: its rates of matrix products and of copies, alone and when all are busy.

The stop rule of four GPUs in one: all together must multiply at 0.85 and more of the rate of one alone. If they do not,
partitions slow each other, and only rows with equal load compare.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.one_card.meeting import Meeting

LEAST_TOGETHER = 0.85
_REPEATS = 20


def partitions(meeting: Meeting, device: torch.device, small: bool) -> dict[str, Any]:
    """Return (Tflop/s of float32 products, GB/s of a copy) of the first rank alone, and of each when all run."""
    side, size = (128, 1 << 16) if small else (2048, 1 << 27)
    a, out = (torch.randn(side, side, device=device) for _ in range(2))
    source, copied = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))

    def rates() -> tuple[float, float]:
        product_s = _seconds(device, lambda: torch.mm(a, a, out=out))
        copy_s = _seconds(device, lambda: copied.copy_(source))
        return round(2 * side**3 / product_s / 1e12, 3), round(2 * size / copy_s / 1e9, 1)

    meeting.wait("partitions, alone")
    alone = meeting.gathered("alone", rates() if meeting.rank == 0 else None)[0]
    meeting.wait("partitions, together")
    together = meeting.gathered("together", rates())
    part = statistics.mean(found[0] for found in together) / alone[0]
    sms = torch.cuda.get_device_properties(0).multi_processor_count if device.type == "cuda" else 0
    return {
        "sms": sms,
        "alone": alone,
        "together": together,
        "together_to_alone": round(part, 3),
        "holds": part >= LEAST_TOGETHER,
    }


def _seconds(device: torch.device, run: Callable[[], Any]) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        run()
    wait()
    begin = time.perf_counter()
    for _ in range(_REPEATS):
        run()
    wait()
    return (time.perf_counter() - begin) / _REPEATS
