"""Ways to train on the quarters: our pipelines, torch's schedules, and data parallelism. Each rank calls the same."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import avgpipe
from avgpipe import device
from avgpipe.links.codec import Format
from avgpipe.schedule.row import COMPUTE_KINDS
from benchmarks.one_card.ipc_group import one_card_group
from benchmarks.one_card.networks import Encoder
from benchmarks.one_card.stage_of_pipeline import mean_square
from benchmarks.overlap.models import Recurrence

Train = Callable[[list[Any]], None]
ADVANCES = "advance-forward"
_DIFFERENT = 2
_PRIORITIES = 3  # above the default one, of torch's streams


@dataclass(frozen=True)
class Row:
    """What a row trains, and how.

    Attributes:
        system: "avgpipe", "torch" or "data parallel".
        schedule: Of the first two.
        M: Micro-batches of a batch; of pipelines that share a batch, of each pipeline.
        wire: Seconds for a byte between processes, beside what it takes here.
        shared: Whether pipelines share each batch.
        graphs: Whether by CUDA graphs.
        ranked: Whether an earlier pipeline's stream has a higher priority than a later one's.
        in_turn: Whether the device runs one action at a time.
    """

    model: str
    precision: str
    wire: float
    system: str
    schedule: str = ""
    N: int = 1
    M: int = 4
    shared: bool = False
    graphs: bool = False
    ranked: bool = False
    in_turn: bool = False

    @property
    def name(self) -> str:
        if self.system == "data parallel":
            return self.system
        if self.system == "torch":
            return f"torch {self.schedule}, M = {self.M}"
        batch = "shared" if self.shared else "own"
        made = f"avgpipe {self.schedule}, N = {self.N}, M = {self.M} each, {batch}"
        return made + ", graphs" * self.graphs + ", ranked" * self.ranked + ", in turn" * self.in_turn


@dataclass(frozen=True)
class Quarter:
    """This process: one of ``size``, its device and its sizes of models.

    Attributes:
        cycles_per_s: Of ``torch.cuda._sleep``.
    """

    rank: int
    size: int
    device: torch.device
    small: bool
    cycles_per_s: float = 0.0

    @property
    def width(self) -> int:
        return 16 if self.small else 1024

    @property
    def length(self) -> int:
        return 8 if self.small else 128

    @property
    def samples(self) -> int:
        return 16 if self.small else 32

    @property
    def layers_of_a_stage(self) -> dict[str, int]:
        return {"bert": 1 if self.small else 3, "lstm": 1}

    def layers(self, model: str) -> list[nn.Module]:
        """Equal stages: nothing is measured of a cut that is not."""
        torch.manual_seed(0)
        count = self.size * self.layers_of_a_stage[model]
        if model == "lstm":
            return [Recurrence(self.width) for _ in range(count)]
        return [Encoder(self.width, 4 if self.small else 16, dropout=0.0) for _ in range(count)]

    def cuts(self, model: str) -> list[int]:
        """The first layers of the stages but the first."""
        return [k * self.layers_of_a_stage[model] for k in range(1, self.size)]

    def batches(self, count: int) -> list[Any]:
        """Return as many, of which few differ."""
        generator = torch.Generator().manual_seed(0)
        shape = self.samples, self.length, self.width
        made = [
            (torch.randn(shape, generator=generator), torch.zeros(self.samples, 1)) for _ in range(_DIFFERENT)
        ]
        return [made[n % _DIFFERENT] for n in range(count)]

    def autocast(self, row: Row) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=row.precision == "bf16")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


# ---- ours ------------------------------------------------------------------------------------------------------


@contextmanager
def ours(quarter: Quarter, row: Row) -> Iterator[tuple[Train, Callable[[], dict[str, Any]]]]:
    """Yield what trains, and what returns what the row knows at its end."""
    plan = avgpipe.Plan(
        stages=quarter.size,
        pipelines=row.N,
        micro_batches=row.M * row.N if row.shared else row.M,
        schedule=row.schedule,
        advance=quarter.size if row.schedule == ADVANCES else None,
        partition=quarter.cuts(row.model),
        warmup_rounds=0,  # rounds that wait for the average leave nothing to fill bubbles with
        batch="global" if row.shared else "per-pipeline",
    )
    with ExitStack() as stack:
        if row.ranked:
            # Around all: a pipeline that is closed gives its streams to the next one.
            stack.enter_context(_ranked(row.N))
        stack.enter_context(_line(quarter, row.wire))
        pipeline = stack.enter_context(closing(_pipeline(quarter, row, plan)))
        yield partial(_train, pipeline), partial(_found, pipeline, quarter.size)


def _train(pipeline: avgpipe.Pipeline, batches: list[Any]) -> None:
    for _ in pipeline.train(batches):
        pass


def _found(pipeline: avgpipe.Pipeline, workers: int) -> dict[str, Any]:
    """Return how busy each worker was, and the median milliseconds of its actions."""
    timeline = pipeline.timeline()
    taken: dict[str, list[list[float]]] = {}
    for event in timeline.events:
        if event.kind in COMPUTE_KINDS:
            taken.setdefault(event.kind, [[] for _ in range(workers)])[event.worker].append(event.seconds)
    stage_ms = {kind: [round(1e3 * median(own), 2) for own in of if own] for kind, of in taken.items()}
    return {"busy": [round(part, 3) for part in timeline.worker_busy_fraction], "stage_ms": stage_ms}


def _pipeline(quarter: Quarter, row: Row, plan: avgpipe.Plan) -> avgpipe.Pipeline:
    given = {
        avgpipe.Precision(autocast=torch.bfloat16): row.precision == "bf16",
        avgpipe.CudaGraphs(): row.graphs,
        avgpipe.InTurn(): row.in_turn,
    }
    return avgpipe.Pipeline(
        quarter.layers(row.model),
        plan,
        loss_fn=mean_square,
        optimizer=adamw,
        device=quarter.device,
        link="cuda-ipc" if quarter.device.type == "cuda" else "shm",
        timeout_s=60,
        extensions=[extension for extension, is_given in given.items() if is_given],
    )


@contextmanager
def _ranked(pipelines: int) -> Iterator[None]:
    """Make the lanes' streams in an order of priorities: the first pipeline's kernels go before the others'.

    So one pipeline is ahead, and the others fill the time in which it waits.
    """
    backend = device.backend
    made = count(-1)  # the first one is for copies

    def stream(at: torch.device) -> Any:
        return torch.Stream(at, priority=-min(_PRIORITIES, max(0, pipelines - 1 - max(0, next(made)))))

    idle: defaultdict[Any, list[Any]] = defaultdict(list)
    with mock.patch.object(backend, "idle", idle):  # those of closed pipelines have other priorities
        if torch.accelerator.is_available():
            with mock.patch.object(backend, "Stream", stream):
                yield
        else:
            yield


@contextmanager
def _line(quarter: Quarter, seconds_per_byte: float) -> Iterator[None]:
    """Hold messages between processes up: on a GPU the stream that copies them, by a kernel of one thread."""
    if not seconds_per_byte:
        yield
        return
    write = Format.write

    def held(format: Format, tensors: Any, memory: torch.Tensor, *rest: Any, **more: Any) -> Any:
        seconds = seconds_per_byte * format.bytes
        if quarter.cycles_per_s:
            torch.cuda._sleep(int(quarter.cycles_per_s * seconds))
        else:
            time.sleep(seconds)
        return write(format, tensors, memory, *rest, **more)

    with mock.patch.object(Format, "write", held):
        yield


# ---- torch's ---------------------------------------------------------------------------------------------------


class _Cast(nn.Module):
    """A stage under autocast, whose output is float32 as torch's receive buffers are."""

    def __init__(self, stage: nn.Module, autocast: Any) -> None:
        super().__init__()
        self._stage, self._autocast = stage, autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._autocast:
            made: torch.Tensor = self._stage(x)
        return made.float()


def torchs(quarter: Quarter, row: Row) -> Train:
    from torch.distributed import pipelining

    rank, size, last = quarter.rank, quarter.size, quarter.rank == quarter.size - 1
    cuts = [0, *quarter.cuts(row.model), len(quarter.layers(row.model))]
    module = nn.Sequential(*quarter.layers(row.model)[cuts[rank] : cuts[rank + 1]]).to(quarter.device)
    shape = quarter.samples // row.M, quarter.length, quarter.width
    given, made = (torch.empty(shape, device="meta", requires_grad=needed) for needed in (rank > 0, True))
    stage = pipelining.PipelineStage(
        _Cast(module, quarter.autocast(row)),
        *(rank, size, quarter.device),
        input_args=(given,),
        output_args=made,
        group=one_card_group(quarter.device),
    )
    kind: Any = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}[row.schedule]
    schedule, optimizer = kind(stage, row.M, loss_fn=mean_square), adamw(module.parameters())

    def train(batches: list[Any]) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(x.to(quarter.device, non_blocking=True))
            elif last:
                schedule.step(target=y.to(quarter.device, non_blocking=True), losses=[])
            else:
                schedule.step()
            optimizer.step()

    return train


# ---- data parallelism ------------------------------------------------------------------------------------------


def data_parallel(quarter: Quarter, row: Row) -> Train:
    """The whole model in each quarter, an equal share of each batch, and the mean of gradients.

    Each quarter reads the gradients of all in memory that they share: no line is as fast. With a line, the quarter is
    held up for what a ring would send: 2 (K - 1) / K of the gradients' bytes.
    """
    model = nn.Sequential(*quarter.layers(row.model)).to(quarter.device)
    parameters, optimizer = list(model.parameters()), adamw(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), device=quarter.device)
    add_up = _sum_in_memory(quarter, row, flat) if quarter.device.type == "cuda" else dist.all_reduce
    share = quarter.samples // quarter.size
    own = slice(quarter.rank * share, (quarter.rank + 1) * share)

    def train(batches: list[Any]) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            with quarter.autocast(row):
                loss = mean_square(model(x[own].to(quarter.device)), y[own].to(quarter.device))
            loss.backward()
            gradients = [g for p in parameters if (g := p.grad) is not None]
            torch.cat([g.view(-1) for g in gradients], out=flat)
            add_up(flat)
            flat.div_(quarter.size)
            parts = flat.split([g.numel() for g in gradients])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients)])
            optimizer.step()

    return train


def _sum_in_memory(quarter: Quarter, row: Row, flat: torch.Tensor) -> Callable[[torch.Tensor], None]:
    from torch.multiprocessing.reductions import reduce_tensor

    offers: list[Any] = [None] * quarter.size
    dist.all_gather_object(offers, reduce_tensor(flat))
    others = [rebuild(*given) for rank, (rebuild, given) in enumerate(offers) if rank != quarter.rank]
    on_line_s = row.wire * 2 * (quarter.size - 1) / quarter.size * flat.nbytes
    total = torch.empty_like(flat)

    def add_up(own: torch.Tensor) -> None:
        torch.cuda.synchronize()
        dist.barrier()  # all gradients are there
        if on_line_s:
            torch.cuda._sleep(int(quarter.cycles_per_s * on_line_s))
        total.copy_(own)
        for other in others:
            total.add_(other)
        torch.cuda.synchronize()
        dist.barrier()  # all have read
        own.copy_(total)

    return add_up


@contextmanager
def training(quarter: Quarter, row: Row) -> Iterator[tuple[Train, Callable[[], dict[str, Any]]]]:
    """Yield what trains the row's model, and what else the row knows at its end."""
    if row.system == "avgpipe":
        with ours(quarter, row) as made:
            yield made
        return
    make = torchs if row.system == "torch" else data_parallel
    yield make(quarter, row), dict
