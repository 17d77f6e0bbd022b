"""What predictions.py runs in processes: profiles and trials, each with the machine's pace at the time.

A shared machine is quicker in one second than in another. So a fixed piece of work is timed before and after, in all
processes at once, and what was measured is given for a machine that takes a second for it.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

_ROUNDS, _ROUND_S = 4, 0.8
_REPEATS = 5
_CORES = 2


def yardstick() -> float:
    """Seconds of a fixed mix of computing, memory and small operators; about 50 ms."""
    import torch

    a, b, small = torch.ones(256, 256), torch.ones(2**22), torch.ones(64)
    samples = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        for _ in range(24):
            torch.mm(a, a)
        for _ in range(4):
            b.add_(1.0)
        for _ in range(1000):
            small.add(1.0)
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def layers(subject: dict[str, Any], micro_batch_sizes: list[int], budget_s: float) -> dict[str, Any]:
    """A profile of the layers, and the pace."""
    import torch

    from avgpipe.tuning import subject as subjects

    torch.set_num_threads(1)
    before_s = yardstick()
    found = subjects.layers(subject, micro_batch_sizes, budget_s)
    return {"profile": found, "pace_s": (before_s + yardstick()) / 2}


def trial(subject: dict[str, Any], plan: str, expected_s: float) -> dict[str, Any]:
    """Seconds per batch in rounds, each with the pace around it."""
    import math

    import torch

    from avgpipe.bench.schedules.rows import seconds_per_batch
    from avgpipe.plan import Plan
    from avgpipe.runtime.memory import peak_memory_bytes
    from avgpipe.tuning.subject import pipeline_of
    from avgpipe.tuning.trial import Batches, Subject

    torch.set_num_threads(1)
    yardstick()
    pipeline, batch = pipeline_of(Subject(**subject), Plan.from_json(plan))
    with pipeline:
        n = pipeline.plan.pipelines
        count = n * max(2, math.ceil(_ROUND_S / expected_s / n))
        row = Batches(pipeline, batch)
        seconds_per_batch(row, n)
        rounds, paces = [], [_pace(pipeline)]
        for _ in range(_ROUNDS):
            rounds.append(seconds_per_batch(row, count))
            paces.append(_pace(pipeline))
        around = [(a + b) / 2 for a, b in pairwise(paces)]
        return {"rounds_s": rounds, "paces_s": around, "memory_bytes": peak_memory_bytes("cpu")}


def _pace(pipeline: Any) -> float:
    """The mean of all ranks, which run it at once; of no more than there are cores, as no more ever compute at once."""
    import torch

    pipeline.world.barrier()
    own = [[yardstick()]] if pipeline.world.rank < _CORES else []
    return float(pipeline.world.gather_rows(torch.tensor(own, dtype=torch.float64).reshape(-1, 1)).mean())
