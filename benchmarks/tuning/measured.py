"""What predictions.py and traversal.py measure in worker processes, a slice in each turn (turns.py)."""

from __future__ import annotations

import math
from typing import Any

_SLICE_S = 1.0


def profiles(
    subject: dict[str, Any], size: int, budget_s: float, repeats: int, turns: dict[str, Any]
) -> list[str]:
    """A profile of the layers at one micro-batch size in each turn after the first, made by all ranks at once."""
    import torch
    import torch.distributed as dist
    from turns import Turns

    from avgpipe.measure.subject import layers_of_workload, typical_batch, workload_of
    from avgpipe.measure.trial import Subject

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    asked = Subject(**subject)
    workload = workload_of(asked)
    batch = typical_batch(workload)
    mine, found = Turns(**turns), []
    for _ in range(1 + repeats):
        with mine.own(dist.barrier):
            found.append(layers_of_workload(asked, workload, batch, [size], budget_s).to_json())
    return found[1:]


def trial(
    subject: dict[str, Any], plan: str, expected_s: float, repeats: int, turns: dict[str, Any]
) -> dict[str, Any]:
    """Seconds per batch in each turn after the first, and the most memory of the process."""
    import torch
    from turns import Turns

    from avgpipe.bench.schedules.rows import seconds_per_batch
    from avgpipe.measure.subject import pipeline_of
    from avgpipe.measure.trial import Batches, Subject
    from avgpipe.plan import Plan
    from avgpipe.runtime.memory import peak_memory_bytes

    torch.set_num_threads(1)
    pipeline, batch = pipeline_of(Subject(**subject), Plan.from_json(plan))
    mine, slices = Turns(**turns), []
    with pipeline:
        n = pipeline.plan.pipelines
        count = n * max(2, math.ceil(_SLICE_S / expected_s / n))
        row = Batches(pipeline, batch)
        for number in range(1 + repeats):
            with mine.own(pipeline.world.barrier):
                slices.append(seconds_per_batch(row, count if number else n))
        return {"batch_s": slices[1:], "memory_bytes": peak_memory_bytes("cpu")}
