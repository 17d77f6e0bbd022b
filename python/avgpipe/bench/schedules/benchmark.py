"""The emulated cluster: all rows in the same processes, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from avgpipe.bench.schedules.emulation import EmulatedStage, MeanLoss, precise_sleeps
from avgpipe.bench.schedules.namespaces import check_namespaces, network
from avgpipe.bench.schedules.our_plans import our_cases, stage_costs
from avgpipe.bench.schedules.result import ScheduleResult, summarise
from avgpipe.bench.schedules.rows import Row, Task, Unavailable, measure_rows
from avgpipe.bench.schedules.settings import CHUNKS, TORCH, ScheduleSettings
from avgpipe.errors import PipelineError
from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.process import progress
from avgpipe.ranks.rendezvous import join

_PROBE_BYTES = 16 * 2**20
_PROBES = 4
_WORKER = f"{__name__}:worker"
_MOST_FAILURES = 5  # rows, after which something else must be wrong


def check(settings: ScheduleSettings) -> None:
    """ValueError for what this machine or this user cannot do."""
    if settings.rate_bits_per_s is not None:
        check_namespaces("--rate")


def run(settings: ScheduleSettings, say: Callable[[str], None] = lambda line: None) -> ScheduleResult:
    """Start the workers and measure. A row at which they fail is left out, and the others begin anew without it.

    PipelineError when workers fail elsewhere or at too many rows, or namespaces cannot be made.
    """
    rate = settings.rate_bits_per_s
    hosts = nullcontext() if rate is None else network(settings.stages, rate)
    failed: list[Unavailable] = []
    with hosts as net:
        while True:
            at = _Place(say)
            try:
                found = run_on_ranks(
                    _WORKER,
                    settings.stages,
                    {"settings": settings.to_json(), "without": [row.name for row in failed]},
                    timeout_s=settings.budget_s,
                    say=at,
                    **(net.launching() if net is not None else {}),
                )
                break
            except PipelineError as error:
                if at.row is None or len(failed) == _MOST_FAILURES:
                    raise
                failed.append(Unavailable(at.row, str(error)))
                say(f"{at.row} failed, the others begin anew: {error}")
    if failed and not found[0]["rows"]:
        raise PipelineError(f"no row is left; {failed[-1].name}: {failed[-1].reason}")
    return summarise(settings, found, failed)


class _Place:
    """Listens to what rank 0 says it is at. row: the row, None between them."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.row: str | None = None

    def __call__(self, line: str) -> None:
        self.row = line.partition(": ")[2] or None
        self._say(line)


def worker(settings: dict[str, Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """A rank: measures the line, builds all rows but those named, and measures them."""
    chosen = ScheduleSettings.from_json(settings)
    torch.set_num_threads(1)
    precise_sleeps()
    # Nobody may wait forever, neither in our rows nor in torch's.
    join(chosen.timeout_s, "gloo")
    progress("measuring the line")
    line = _bytes_per_s() if chosen.stages > 1 else None
    built = _rows(chosen, without)
    rows = [row for row in built if not isinstance(row, Unavailable)]
    measured = measure_rows(rows, chosen.rounds, chosen.batches, progress)
    progress("ending")
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


def _rows(settings: ScheduleSettings, without: Sequence[str]) -> list[Row | Unavailable]:
    """In the order of the table."""
    from avgpipe.bench.schedules.our_rows import our_row
    from avgpipe.bench.schedules.torch_rows import torch_row

    task, m = _task(settings), settings.micro_batches
    rows: list[Row | Unavailable] = []
    for case in our_cases(settings):
        if isinstance(case, Unavailable):
            rows.append(case)
        elif case.name not in without:
            _begin(case.name)
            rows.append(our_row(case, task, settings))
    for name, schedule, chunks in _torch_rows(settings):
        if name not in without:
            _begin(name)
            rows.append(torch_row(name, task, _stages(settings, chunks), schedule, m))
    return rows


def _begin(name: str) -> None:
    dist.barrier()  # so that whoever fails from here on fails at this row
    progress(f"building: {name}")


def _torch_rows(settings: ScheduleSettings) -> Iterator[tuple[str, str, int]]:
    """Name of the row, of the schedule, and chunks a rank."""
    for row in settings.rows:
        schedule = row.removeprefix("torch-")
        if row == "torch-advance-forward":
            yield "torch advance-forward (ours)", schedule, 1
        elif row in ("torch-interleaved-1f1b", "torch-zero-bubble"):
            # Two chunks a rank have half the bubble and twice the transfers: each is better somewhere.
            for chunks in (1, CHUNKS):
                yield f"torch {schedule}, {chunks} a rank", schedule, chunks
        elif row in TORCH:
            yield f"torch {schedule}", schedule, 1


def _stages(settings: ScheduleSettings, chunks: int) -> list[EmulatedStage]:
    stages = settings.stages * chunks
    return [EmulatedStage(*stage_costs(settings, stages)) for _ in range(stages)]


def _task(settings: ScheduleSettings) -> Task:
    m = settings.micro_batches
    return Task(
        inputs=torch.ones(m, settings.activation_bytes // 4),
        targets=torch.zeros(m, 1),
        loss_fn=MeanLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )
