"""How far kernels fill the multiprocessors, and how many run at once: from torch.profiler's trace of one batch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from avgpipe.files import read_json
from benchmarks.common.gpu_trace import occupancy
from benchmarks.one_card.issue import WAYS

if TYPE_CHECKING:
    from benchmarks.one_card.one_worker import Card, Case

_BATCHES = 3


def rows(card: Card, dtype: str) -> list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    from benchmarks.one_card.one_worker import Case

    made: list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = []
    for name in ("bert", "gnmt"):
        for n in (1, 2) if card.has(name) else ():
            case = Case(name, dtype, 4, n, "row", 0)
            row = {"row": "occupancy", **{k: v for k, v in asdict(case).items() if k != "wire"}}
            made.append((row, partial(profiled, card, case)))
    return made


def profiled(card: Card, case: Case) -> dict[str, Any]:
    """Profile some batches, and return what ``occupancy`` finds; neighbours' delays are no kernels of it."""
    card.clear()
    worker = card.worker(case)
    lanes = card.lanes(case, case.N)
    batch = WAYS[case.how](worker, lanes, [card.waits(worker, lane) for lane in lanes])
    batch()
    card.wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(_BATCHES):
            batch()
        card.wait()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = read_json(file)["traceEvents"]
    return occupancy(events)
