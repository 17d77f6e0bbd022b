"""What a Chrome trace of torch.profiler says of a GPU: actions, kernels, copies, and what ran at once."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from itertools import pairwise
from typing import Any

COPY, KERNEL = "gpu_memcpy", "kernel"  # categories
ACTION = "action "  # begins the names of what a lane does
TOP = 12  # kernels, by their time
_DELAY = "spin_kernel"  # of torch.cuda._sleep

Events = list[dict[str, Any]]


def actions(events: Events) -> list[dict[str, Any]]:
    """Of a Chrome trace: what an action of each kind takes the host, and the device for the kernels that it launched.

    One thread issues all actions and waits for autograd's, which launches backwards' kernels meanwhile: a launch
    belongs to the action during which it happened.
    """
    spans = [e for e in events if e.get("cat") == "user_annotation" and e.get("name", "").startswith(ACTION)]
    spans.sort(key=lambda e: e["ts"])
    begins = [e["ts"] for e in spans]
    by_launch = {e["args"]["correlation"]: e["dur"] for e in events if e.get("cat") == KERNEL}
    kernels: dict[int, list[float]] = defaultdict(list)  # by action
    for e in events:
        n = bisect_right(begins, e.get("ts", 0)) - 1
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and n >= 0:
            took = by_launch.get(e.get("args", {}).get("correlation"))
            if took is not None and e["ts"] <= spans[n]["ts"] + spans[n]["dur"]:
                kernels[n].append(took)
    found = []
    for kind in sorted({e["name"] for e in spans}):
        of_kind = [n for n, e in enumerate(spans) if e["name"] == kind]
        device = [sum(kernels[n]) for n in of_kind]
        found.append(
            {
                "action": kind.removeprefix(ACTION),
                "count": len(of_kind),
                "host_us": round(statistics.median(spans[n]["dur"] for n in of_kind), 1),
                "kernels": round(statistics.mean(len(kernels[n]) for n in of_kind), 1),
                "device_us": round(statistics.median(device), 1),
            }
        )
    between = [b["ts"] - a["ts"] - a["dur"] for a, b in pairwise(spans)]
    if between:
        found.append(
            {"action": "between", "count": len(between), "host_us": round(statistics.median(between), 1)}
        )
    return found


def kernels_by_time(events: Events) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = defaultdict(list)
    for e in events:
        if e.get("cat") == KERNEL:
            times[e["name"][:80]].append(e["dur"])
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:TOP]
    return [
        {
            "kernel": name,
            "count": len(t),
            "total_us": round(sum(t), 1),
            "mean_us": round(statistics.mean(t), 1),
        }
        for name, t in longest
    ]


def overlap(events: Events) -> dict[str, Any]:
    """Of a Chrome trace: copies to the device, those during which a kernel ran, and streams with kernels."""

    def spans(category: str) -> list[tuple[float, float, Any]]:
        found = [e for e in events if e.get("ph") == "X" and e.get("cat") == category]
        return [(e["ts"], e["ts"] + e["dur"], e["args"].get("stream")) for e in found if _counts(e)]

    def _counts(event: dict[str, Any]) -> bool:
        return event["cat"] == KERNEL or "HtoD" in event["name"]

    copies, kernels = spans(COPY), spans(KERNEL)
    during = sum(any(a < end and start < b for a, b, _ in kernels) for start, end, _ in copies)
    at_once = sum(one[1] > other[0] and one[2] != other[2] for one, other in pairwise(sorted(kernels)))
    return {
        "copies_to_the_device": len(copies),
        "copies_during_a_kernel": during,
        "kernels": len(kernels),
        "kernels_that_begin_during_one_of_another_stream": at_once,
        "streams_with_kernels": len({stream for *_, stream in kernels}),
    }


def occupancy(events: Events) -> dict[str, Any]:
    """Fill of the multiprocessors, by time; without the kernels that only wait.

    ``blocks_fill``: the share of multiprocessors that have a block of the kernel; ``warps_fill``: torch's estimate of
    the warps that they hold, of those that they could. ``at_once``: kernels that run at a time, while any does.
    """
    kernels = [e for e in events if e.get("cat") == KERNEL and _DELAY not in e["name"]]
    total = sum(e["dur"] for e in kernels)
    if not total:
        return {"kernels": 0}
    busy, until = 0.0, float("-inf")
    for e in sorted(kernels, key=lambda e: e["ts"]):
        end = e["ts"] + e["dur"]
        busy += max(0.0, end - max(until, e["ts"]))
        until = max(until, end)

    def mean(name: str, most: float) -> float:
        return sum(e["dur"] * min(most, float(e["args"].get(name, 0))) for e in kernels) / total

    return {
        "kernels": len(kernels),
        "mean_us": round(total / len(kernels), 2),
        "blocks_fill": round(mean("blocks per SM", 1.0), 3),
        "warps_fill": round(mean("est. achieved occupancy %", 100.0) / 100, 3),
        "busy_us": round(busy, 1),
        "at_once": round(total / busy, 3),
    }
