"""A rank of real.py: every system finds its best cut and micro-batches, then the best of each run in turn."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from avgpipe.measure.tune import seconds_per_batch
from avgpipe.plan import Plan
from avgpipe.ranks.process import progress
from avgpipe.ranks.rendezvous import join
from benchmarks.common.rows import OurRow, Task, TrainingRow, Unavailable, measure_rows, torch_row
from benchmarks.overlap.baselines import AloneRow, DataParallelRow, layer_seconds
from benchmarks.overlap.cuts import nearest_to_balance, stages_of
from benchmarks.overlap.models import MODELS, VOCABULARY, loss

BATCH, RANKS, TIMEOUT_S = 16, 2, 120
ACCUMULATIONS = (1, 2, 4, 8)
PIPELINES = (1, 2, 3)
OUR_PARTS, TORCH_PARTS = (1, 2, 4), (2, 4, 8)
TORCH_SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2), ("zero-bubble", 1), ("zero-bubble", 2))


@dataclass(frozen=True)
class Candidate:
    """One way to set a system up. label: what was chosen."""

    label: str
    make: Callable[[str], TrainingRow | Unavailable]


def worker(model: str, rounds: int, batches: int, cuts: int, links: list[str], only: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    join(TIMEOUT_S, "gloo")
    shape = MODELS[model]
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, shape.length + 1), generator=draw)
    task = Task(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), loss, _adamw)
    progress("timing the layers")
    costs = {
        parts: _agreed(layer_seconds(task, shape.layers(), parts)) for parts in {*OUR_PARTS, *TORCH_PARTS}
    }
    tried: dict[str, dict[str, float | str]] = {}
    finalists = [partial(AloneRow, f"one process, {p} parts", task, shape.layers(), p) for p in ACCUMULATIONS]
    rows: list[TrainingRow] = [make() for make in finalists]
    for name, candidates in _systems(task, shape.layers, costs, cuts, links):
        if not re.search(only, name):
            continue
        best = _best(name, candidates, tried.setdefault(name, {}))
        row = best.make(f"{name} ({best.label})") if best else None
        rows += [row] if row is not None and not isinstance(row, Unavailable) else []
    measured = measure_rows(rows, rounds, batches, progress)
    for row in rows:
        row.close()
    return {"rows": [row._asdict() for row in measured], "layer_s": costs, "tried": tried}


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


def _systems(
    task: Task,
    layers: Callable[[], list[nn.Module]],
    costs: dict[int, list[float]],
    cuts: int,
    links: Sequence[str],
) -> Iterator[tuple[str, list[Candidate]]]:
    for link in links:
        for pipelines in PIPELINES:
            candidates = [
                Candidate(
                    f"M = {parts}, cut {cut}", partial(_ours, task, layers, pipelines, parts, cut, link)
                )
                for parts in OUR_PARTS
                for cut in nearest_to_balance(costs[parts], RANKS, RANKS, cuts)
            ]
            yield f"avgpipe, N = {pipelines}, {link}", candidates
    for schedule, chunks in TORCH_SCHEDULES:
        candidates = [
            Candidate(f"M = {parts}, cut {cut}", partial(_torch, task, layers, schedule, parts, cut))
            for parts in TORCH_PARTS
            for cut in nearest_to_balance(costs[parts], RANKS * chunks, RANKS, cuts)
        ]
        yield f"torch {schedule}, {chunks} a rank", candidates
    yield (
        "DistributedDataParallel",
        [Candidate(f"{parts} parts", partial(_data_parallel, task, layers, parts)) for parts in (1, 2, 4)],
    )


def _ours(
    task: Task,
    layers: Callable[[], list[nn.Module]],
    pipelines: int,
    parts: int,
    cut: list[int],
    link: str,
    name: str,
) -> TrainingRow:
    plan = Plan(stages=RANKS, pipelines=pipelines, micro_batches=parts, partition=list(cut), warmup_rounds=0)
    return OurRow(name, task, layers(), plan, link=link, timeout_s=TIMEOUT_S)


def _torch(
    task: Task, layers: Callable[[], list[nn.Module]], schedule: str, parts: int, cut: list[int], name: str
) -> TrainingRow | Unavailable:
    return torch_row(name, task, stages_of(layers(), cut), schedule, parts)


def _data_parallel(task: Task, layers: Callable[[], list[nn.Module]], parts: int, name: str) -> TrainingRow:
    return DataParallelRow(name, task, layers(), parts)


def _best(name: str, candidates: Sequence[Candidate], tried: dict[str, float | str]) -> Candidate | None:
    """The fastest of a few batches of each; None where none can run."""
    best: tuple[float, Candidate] | None = None
    for candidate in candidates:
        progress(f"{name}: {candidate.label}")
        row = candidate.make(name)
        if isinstance(row, Unavailable):
            tried[candidate.label] = row.reason
            continue
        dist.barrier()
        seconds_per_batch(row.losses, row.pipelines, 1)
        (seconds,) = _agreed([seconds_per_batch(row.losses, row.pipelines, 3)])
        tried[candidate.label] = seconds
        dist.barrier()
        row.close()
        del row
        gc.collect()
        if best is None or seconds < best[0]:
            best = (seconds, candidate)
    return None if best is None else best[1]


def _agreed(values: list[float]) -> list[float]:
    """Those of rank 0, where batches end last, on every rank: all must decide alike."""
    table = torch.tensor(values, dtype=torch.float64)
    dist.broadcast(table, 0)
    made: list[float] = table.tolist()
    return made
