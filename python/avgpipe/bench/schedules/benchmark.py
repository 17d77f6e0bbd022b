"""The emulated cluster: all rows in the same processes, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from avgpipe.bench.schedules.cluster import ending_by_signal, progress, run_workers
from avgpipe.bench.schedules.emulation import EmulatedStage, MeanLoss, precise_sleeps
from avgpipe.bench.schedules.namespaces import check_namespaces, network
from avgpipe.bench.schedules.result import ScheduleResult, summarise
from avgpipe.bench.schedules.rows import Row, Task, Unavailable, measure_rows
from avgpipe.bench.schedules.settings import CHUNKS, ScheduleSettings

_PROBE_BYTES = 16 * 2**20
_PROBES = 4


def check(settings: ScheduleSettings) -> None:
    """ValueError for what this machine or this user cannot do."""
    if settings.rate_bits_per_s is not None:
        check_namespaces("--rate")


def run(settings: ScheduleSettings, say: Callable[[str], None] = lambda line: None) -> ScheduleResult:
    """Start the workers and measure. PipelineError when a worker fails or namespaces cannot be made."""
    rate = settings.rate_bits_per_s
    hosts = nullcontext() if rate is None else network(settings.stages, rate)
    with ending_by_signal(), hosts as net:
        found = run_workers(
            f"{__name__}:worker",
            settings.stages,
            {"settings": settings.to_json()},
            timeout_s=settings.budget_s,
            network=net,
            say=say,
        )
    return summarise(settings, found)


def worker(settings: dict[str, Any]) -> dict[str, Any]:
    """A rank: builds all rows, measures the line and then the rows."""
    chosen = ScheduleSettings.from_json(settings)
    torch.set_num_threads(1)
    precise_sleeps()
    # Nobody may wait forever, neither in our rows nor in torch's.
    dist.init_process_group("gloo", timeout=timedelta(seconds=chosen.timeout_s))
    progress("measuring the line")
    line = _bytes_per_s() if chosen.stages > 1 else None
    built = _rows(chosen)
    rows = [row for row in built if not isinstance(row, Unavailable)]
    measured = measure_rows(rows, chosen.rounds, chosen.batches, progress)
    for row in rows:
        row.close()
    return {
        "line_bytes_per_s": line,
        "rows": [vars(item) for item in measured],
        "unavailable": [vars(row) for row in built if isinstance(row, Unavailable)],
    }


def _bytes_per_s() -> float | None:
    """What a plain send of gloo reaches from rank 0 to rank 1, the receive being there already; known to both."""
    rank, tensor = dist.get_rank(), torch.zeros(_PROBE_BYTES // 4)
    best = None
    for probe in range(_PROBES + 1):
        dist.barrier()
        begin = time.perf_counter()
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(torch.empty(1), 1)  # it has arrived, not merely left
        elif rank == 1:
            dist.recv(tensor, 0)
            dist.send(torch.empty(1), 0)
        taken = time.perf_counter() - begin
        if probe and rank < 2:  # the first one finds the speed of the connection
            best = max(best or 0.0, _PROBE_BYTES / taken)
    return best


def _rows(settings: ScheduleSettings) -> list[Row | Unavailable]:
    """In the order of the table."""
    from avgpipe.bench.schedules.our_rows import OurRow, our_plan
    from avgpipe.bench.schedules.torch_rows import torch_row

    task = _task(settings)
    k, m = settings.stages, settings.micro_batches
    whole, parts = _stages(settings, 1), _stages(settings, CHUNKS)
    rows: list[Row | Unavailable] = []

    def ours(name: str, schedule: str, pipelines: int = 1) -> None:
        plan = our_plan(k, m, schedule, pipelines)
        link, limit = settings.effective_link, settings.timeout_s
        rows.append(OurRow(name, task, whole, plan, link=link, timeout_s=limit))

    for schedule in ("1f1b", "all-forward-all-backward"):
        if settings.asks(schedule):
            ours(f"avgpipe {schedule}", schedule)
    if settings.asks("advance-forward"):
        for pipelines in settings.pipelines:
            ours(f"avgpipe advance-forward, N = {pipelines}", "advance-forward", pipelines)
    plain = [name for name in ("1f1b", "gpipe") if settings.asks(f"torch-{name}")]
    rows += [torch_row(f"torch {name}", task, whole, name, m) for name in plain]
    for schedule in ("interleaved-1f1b", "zero-bubble"):
        # Two chunks a rank have half the bubble and twice the transfers: each is better somewhere.
        for chunks, modules in ((1, whole), (CHUNKS, parts)):
            if settings.asks(f"torch-{schedule}"):
                name = f"torch {schedule}, {chunks} a rank"
                rows.append(torch_row(name, task, modules, schedule, m))
    return rows


def _stages(settings: ScheduleSettings, chunks: int) -> list[EmulatedStage]:
    costs = (settings.forward_s / chunks, settings.backward_s / chunks)
    return [EmulatedStage(*costs) for _ in range(settings.stages * chunks)]


def _task(settings: ScheduleSettings) -> Task:
    m = settings.micro_batches
    return Task(
        inputs=torch.ones(m, settings.activation_bytes // 4),
        targets=torch.zeros(m, 1),
        loss_fn=MeanLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )
