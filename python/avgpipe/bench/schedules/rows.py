"""What is compared: ways of training batch after batch, and how long a batch takes each of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

OptimizerFn = Callable[[Iterable[Any]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Task:
    """What all rows train on: a whole batch, a loss (the mean over samples), and an optimizer of some parameters."""

    inputs: torch.Tensor
    targets: torch.Tensor
    loss_fn: Callable[[Any, Any], torch.Tensor]
    optimizer: OptimizerFn


class Row(Protocol):
    """A way of training, alike on every rank. pipelines: batches that are under way at once, or more, so that a round
    of all that work beside each other is whole. actions: of the last `losses`, the mean seconds of a stage's actions by
    kind, if the row knows them.
    """

    name: str
    pipelines: int

    @property
    def actions(self) -> dict[str, list[float]] | None: ...

    def losses(self, batches: int) -> Iterator[float | None]:
        """Train on the task's batch so many times; yields when a batch is done. None: another rank knows the loss."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Unavailable:
    """A row that cannot run here, and why."""

    name: str
    reason: str


def seconds_per_batch(row: Row, batches: int) -> float:
    """Seconds from one batch's end to the next one's on this rank, in the steady state.

    Batches run back to back, without barriers. The first of each pipeline are not timed, and neither are the last
    N - 1, which only keep the pipelines busy while the others are: from the end of batch N to that of batch N + J,
    over J, the least multiple of N that is at least `batches`. A batch includes its update.
    """
    lead = row.pipelines
    timed = math.ceil(batches / lead) * lead
    ends = []
    for loss in row.losses(lead + timed + lead - 1):
        ends.append(time.perf_counter())
        if loss is not None and not math.isfinite(loss):
            raise ValueError(f"{row.name}: the loss of batch {len(ends) - 1} is {loss}")
    return (ends[lead + timed - 1] - ends[lead - 1]) / timed


@dataclass(frozen=True)
class Measured:
    """Of one rank: seconds per batch, a sample a round. actions: the last round's, as of `Row`."""

    name: str
    seconds: list[float]
    actions: dict[str, list[float]] | None = None


def measure_rows(
    rows: Sequence[Row], rounds: int, batches: int, say: Callable[[str], None] = lambda line: None
) -> list[Measured]:
    """Time all rows in turn, A B C A B C ..., after a round that only warms up."""
    seconds: list[list[float]] = [[] for _ in rows]
    for number in range(rounds + 1):
        for row, samples in zip(rows, seconds):
            dist.barrier()  # so that whoever fails from here on fails at this row
            say(f"round {number} of {rounds}: {row.name}")
            taken = seconds_per_batch(row, batches if number else row.pipelines)
            if number:
                samples.append(taken)
    dist.barrier()  # nobody closes a row while another rank is still at its last batch
    return [Measured(row.name, samples, row.actions) for row, samples in zip(rows, seconds)]


def stepped(optimizer: torch.optim.Optimizer | None) -> None:
    """An update, after which gradients are gone."""
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of(task: Task, module: nn.Module) -> torch.optim.Optimizer | None:
    parameters = [p for p in module.parameters() if p.requires_grad]
    return task.optimizer(parameters) if parameters else None
