"""Ways of training batch after batch that are compared: our pipelines, and torch.distributed.pipelining's schedules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from avgpipe.measure.tune import seconds_per_batch
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.timeline.timeline import Timeline
from avgpipe_lab.bench.schedules import SEVERAL, TORCH, torch_stages


@dataclass(frozen=True)
class Task:
    """Task of all rows: a whole batch, a loss (the mean over samples), and an optimizer of some parameters."""

    inputs: torch.Tensor
    targets: torch.Tensor
    loss_fn: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer]

    def optimizer_of(self, module: nn.Module) -> torch.optim.Optimizer | None:
        parameters = [p for p in module.parameters() if p.requires_grad]
        return self.optimizer(parameters) if parameters else None


class TrainingRow(Protocol):
    """A way of training, alike on every rank.

    Attributes:
        pipelines: Batches that are in flight at once, or as many more as make whole rounds of them.
        timeline: Of the last ``losses``, if the row has one.
    """

    name: str
    pipelines: int
    timeline: Timeline | None

    def losses(self, batches: int) -> Iterator[float | None]:
        """Train on the task's batch so many times; yields when a batch is done. None: another rank knows the loss."""

    def close(self) -> None: ...


class Unavailable(NamedTuple):
    """A row that cannot run here, and why."""

    name: str
    reason: str


class RowSamples(NamedTuple):
    """Seconds per batch of a row on one rank, a sample a round."""

    name: str
    seconds: list[float]


def measure_rows(
    rows: Sequence[TrainingRow], rounds: int, batches: int, say: Callable[[str], None] = lambda line: None
) -> list[RowSamples]:
    """Time all rows in turn, A B C A B C ..., after a round that only warms up."""
    seconds: list[list[float]] = [[] for _ in rows]
    for number in range(rounds + 1):
        for row, samples in zip(rows, seconds):
            dist.barrier()  # so that whoever fails from here on fails at this row
            say(f"round {number} of {rounds}: {row.name}")
            taken = seconds_per_batch(row.losses, row.pipelines, batches if number else row.pipelines)
            if number:
                samples.append(taken)
    dist.barrier()  # nobody closes a row while another rank is still at its last batch
    return [RowSamples(row.name, samples) for row, samples in zip(rows, seconds)]


def update(optimizer: torch.optim.Optimizer | None) -> None:
    """Step, after which gradients are gone."""
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


# ---- ours ----------------------------------------------------------------------------------------------------------


class OurRow:
    """Pipelines of ``plan``, streaming; ``modules``: one for each stage.

    The task's batch is cut into ``per_batch`` of the plan's, which are one batch of the row.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        modules: Sequence[nn.Module],
        plan: Plan,
        *,
        per_batch: int = 1,
        **options: Any,
    ) -> None:
        self.name, self.pipelines = name, batches_in_flight(plan, per_batch)
        self.timeline: Timeline | None = None
        inputs, targets = (x.chunk(per_batch) for x in (task.inputs, task.targets))
        self._batches = list(zip(inputs, targets))
        self.pipeline = Pipeline(
            list(modules), plan, loss_fn=task.loss_fn, optimizer=task.optimizer, **options
        )

    def losses(self, batches: int) -> Iterator[float | None]:
        loader = chain.from_iterable(repeat(self._batches, batches))
        losses = (result.loss for result in self.pipeline.train(loader))
        for first in losses:
            others = list(islice(losses, len(self._batches) - 1))
            yield (first + sum(others)) / len(self._batches)
        self.timeline = self.pipeline.timeline()

    def close(self) -> None:
        self.pipeline.close()


class PassingRow:
    """An ``OurRow`` that is there only while it trains.

    One that waits still watches over its ranks, and many of them take a noticeable part of the processor from the row
    whose turn it is.
    """

    def __init__(self, make: Callable[[], OurRow]) -> None:
        """ValueError from ``make`` for what cannot be."""
        self._make = make
        with closing(make()) as row:
            self.name, self.pipelines = row.name, row.pipelines
        self.timeline: Timeline | None = None

    def losses(self, batches: int) -> Iterator[float | None]:
        with closing(self._make()) as row:
            for _ in row.losses(row.pipelines):
                pass  # finds its buffers, and the speed of its connections
            yield from row.losses(batches)
            self.timeline = row.timeline

    def close(self) -> None:
        pass


def batches_in_flight(plan: Plan, per_batch: int) -> int:
    """Batches of a row at once, each of ``per_batch`` of the plan's, or as many more as make whole rounds."""
    most = 1 + -(-(plan.batches_in_flight - 1) // per_batch)
    while most * per_batch % plan.batches_per_round:
        most += 1
    return most


def our_plan(
    stages: int, micro_batches: int, schedule: str = "advance-forward", pipelines: int = 1, **options: Any
) -> Plan:
    """A stage for each module."""
    cut = list(range(1, stages))
    return Plan(
        stages, pipelines, micro_batches, schedule, partition=cut, staleness=1, warmup_rounds=0, **options
    )


# ---- torch's -------------------------------------------------------------------------------------------------------


class TorchRow:
    """A schedule of torch's over the ranks of the default group.

    ``modules``: one for each stage, of which rank r of R has r, r + R, ..., or in a V r and 2R - 1 - r.

    Args:
        schedule: A row of torch's in ``avgpipe bench schedules``, such as "1f1b" or "dualpipe-v"; "advance-forward" is
            ours on torch's runtime.
    """

    pipelines = 1
    timeline: Timeline | None = None

    def __init__(
        self, name: str, task: Task, modules: Sequence[nn.Module], schedule: str, micro_batches: int
    ) -> None:
        self.name, self._task = name, task
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = torch_stages(f"torch-{schedule}", rank, ranks, len(modules))
        own = [copy.deepcopy(modules[n]).train() for n in mine]
        stages = [
            pipelining.PipelineStage(module, n, len(modules), torch.device("cpu"))
            for module, n in zip(own, mine)
        ]
        self._first, self._last = 0 in mine, len(modules) - 1 in mine
        self._schedule: Any
        if schedule == "advance-forward":
            from avgpipe.interop.torch_pipelining import ScheduleAdvanceForward

            self._schedule = ScheduleAdvanceForward(stages[0], micro_batches, loss_fn=task.loss_fn)
        else:
            row = f"torch-{schedule}"
            kind: Any = TORCH[row]
            self._schedule = kind(
                stages if row in SEVERAL else stages[0], micro_batches, loss_fn=task.loss_fn
            )
        self._optimizer = task.optimizer_of(nn.ModuleList(own))

    def losses(self, batches: int) -> Iterator[float | None]:
        inputs = (self._task.inputs,) if self._first else ()
        for _ in range(batches):
            loss = None
            if self._last:
                losses: list[torch.Tensor] = []
                self._schedule.step(*inputs, target=self._task.targets, losses=losses, return_outputs=False)
                loss = float(torch.stack(losses).mean())
            else:
                self._schedule.step(*inputs, return_outputs=False)
            update(self._optimizer)
            yield loss

    def close(self) -> None:
        pass


def torch_row(
    name: str, task: Task, modules: Sequence[nn.Module], schedule: str, micro_batches: int
) -> TorchRow | Unavailable:
    """The row, or why torch refuses it: some schedules need M to be a multiple of something, or at least K.

    Ours needs a torch that it knows.
    """
    try:
        return TorchRow(name, task, modules, schedule, micro_batches)
    except (ValueError, ImportError) as error:
        return Unavailable(name, " ".join(str(error).split()))
