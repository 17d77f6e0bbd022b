"""Ways to train on the quarters: our pipelines, torch's schedules, and data parallelism. Each rank calls the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import avgpipe
from avgpipe.links.codec import Format
from benchmarks.one_card.ipc_group import one_card_group
from benchmarks.overlap import models

Train = Callable[[list[Any]], None]
ADVANCES = "advance-forward"


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

    @property
    def name(self) -> str:
        if self.system == "data parallel":
            return self.system
        if self.system == "torch":
            return f"torch {self.schedule}, M = {self.M}"
        batch = "shared" if self.shared else "own"
        made = f"avgpipe {self.schedule}, N = {self.N}, M = {self.M} each, {batch}"
        return f"{made}, graphs" if self.graphs else made


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

    def layers(self, model: str) -> list[nn.Module]:
        if model == "lstm":
            return models.lstm(self.width, self.size)
        blocks, heads = (self.size, 4) if self.small else (3 * self.size, 16)
        return models.transformer(self.width, blocks, heads, self.length)

    def batches(self, count: int) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        shape = self.samples, self.length + 1
        made = [torch.randint(models.VOCABULARY, shape, generator=generator) for _ in range(count)]
        return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in made]

    def autocast(self, row: Row) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=row.precision == "bf16")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


# ---- ours ------------------------------------------------------------------------------------------------------


@contextmanager
def ours(quarter: Quarter, row: Row) -> Iterator[tuple[Train, Callable[[], dict[str, Any]]]]:
    """Yield what trains, and what the row knows at its end: how busy each worker was."""
    plan = avgpipe.Plan(
        stages=quarter.size,
        pipelines=row.N,
        micro_batches=row.M * row.N if row.shared else row.M,
        schedule=row.schedule,
        advance=quarter.size if row.schedule == ADVANCES else None,
        warmup_rounds=0,  # rounds that wait for the average leave nothing to fill bubbles with
        batch="global" if row.shared else "per-pipeline",
    )
    precision = [avgpipe.Precision(autocast=torch.bfloat16)] if row.precision == "bf16" else []
    pipeline = avgpipe.Pipeline(
        quarter.layers(row.model),
        plan,
        loss_fn=models.loss,
        optimizer=adamw,
        device=quarter.device,
        link="cuda-ipc" if quarter.device.type == "cuda" else "shm",
        timeout_s=60,
        extensions=[*precision, *([avgpipe.CudaGraphs()] if row.graphs else [])],
    )

    def train(batches: list[Any]) -> None:
        for _ in pipeline.train(batches):
            pass

    def found() -> dict[str, Any]:
        return {"busy": [round(part, 3) for part in pipeline.timeline().worker_busy_fraction]}

    try:
        with _line(quarter, row.wire):
            yield train, found
    finally:
        pipeline.close()


@contextmanager
def _line(quarter: Quarter, seconds_per_byte: float) -> Iterator[None]:
    """Hold messages between processes up, on the stream that copies them, by a kernel of one thread."""
    if not (seconds_per_byte and quarter.cycles_per_s):
        yield
        return
    write = Format.write

    def held(format: Format, tensors: Any, memory: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if memory.is_cuda:
            torch.cuda._sleep(int(quarter.cycles_per_s * seconds_per_byte * format.bytes))
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

    layers, rank, size = quarter.layers(row.model), quarter.rank, quarter.size
    cuts = [n * len(layers) // size for n in range(size + 1)]
    module = nn.Sequential(*layers[cuts[rank] : cuts[rank + 1]]).to(quarter.device)
    shape = quarter.samples // row.M, quarter.length
    hidden = torch.empty(*shape, quarter.width, device="meta", requires_grad=True)
    tokens = torch.empty(shape, dtype=torch.long, device="meta")
    logits = torch.empty(*shape, models.VOCABULARY, device="meta", requires_grad=True)
    last = rank == size - 1
    stage = pipelining.PipelineStage(
        _Cast(module, quarter.autocast(row)),
        *(rank, size, quarter.device),
        input_args=(hidden if rank else tokens,),
        output_args=logits if last else hidden,
        group=one_card_group(quarter.device),
    )
    kind: Any = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}[row.schedule]
    schedule, optimizer = kind(stage, row.M, loss_fn=models.loss), adamw(module.parameters())

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
                loss = models.loss(model(x[own].to(quarter.device)), y[own].to(quarter.device))
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
    with nullcontext():
        yield make(quarter, row), dict
