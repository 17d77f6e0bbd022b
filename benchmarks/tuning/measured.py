"""What predictions.py and traversal.py measure in worker processes, a slice in each turn (turns.py)."""

from __future__ import annotations

import math
from typing import Any

_SLICE_S = 1.0


def profiles(config: str, size: int, budget_s: float, repeats: int, turns: dict[str, Any]) -> list[str]:
    """A profile of the layers at one micro-batch size in each turn after the first, made by all ranks at once."""
    import torch
    import torch.distributed as dist

    from avgpipe.cli.config import ProfilingOptions
    from avgpipe.cli.measuring import build, layers_of_workload
    from avgpipe.ranks.rendezvous import join
    from benchmarks.tuning.turns import Turns

    torch.set_num_threads(1)
    join(600.0, "gloo")
    asked = ProfilingOptions.from_json(config)
    workload, batch = build(asked)
    mine, found = Turns(**turns), []
    for _ in range(1 + repeats):
        with mine.own(dist.barrier):
            found.append(layers_of_workload(asked, workload, batch, [size], budget_s).to_json())
    return found[1:]


def trial(config: str, plan: str, expected_s: float, repeats: int, turns: dict[str, Any]) -> dict[str, Any]:
    """Seconds per batch in each turn after the first, and the most memory of the process."""
    import torch

    from avgpipe.cli.config import ProfilingOptions
    from avgpipe.cli.measuring import build
    from avgpipe.cli.resolve import pipeline_options
    from avgpipe.measure.tune import rounds_of
    from avgpipe.pipeline import Pipeline
    from avgpipe.plan import Plan
    from avgpipe.ranks.environment import peak_memory_bytes
    from benchmarks.tuning.turns import Turns

    torch.set_num_threads(1)
    asked = ProfilingOptions.from_json(config)
    workload, batch = build(asked)
    mine, slices = Turns(**turns), []
    with Pipeline(workload.layers, Plan.from_json(plan), **pipeline_options(asked, workload)) as pipeline:
        n = pipeline.plan.pipelines
        count = n * max(2, math.ceil(_SLICE_S / expected_s / n))
        for number in range(1 + repeats):
            with mine.own(pipeline.world.barrier):
                slices += rounds_of(pipeline, batch, count if number else n, 1)
        return {"batch_s": slices[1:], "memory_bytes": peak_memory_bytes(pipeline.device)}
