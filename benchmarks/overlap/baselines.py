"""What needs no pipeline: one process, and data parallelism over the same processes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.rows import Task, update


class AloneRow:
    """All of it in the process of rank 0, accumulating over `parts`; the other ranks only wait."""

    pipelines, timeline = 1, None

    def __init__(self, name: str, task: Task, layers: Sequence[nn.Module], parts: int) -> None:
        self.name, self._task, self._parts = name, task, parts
        self._works = dist.get_rank() == 0
        self._model = nn.Sequential(*layers)
        self._optimizer = task.optimizer_of(self._model)

    def losses(self, batches: int) -> Iterator[float | None]:
        pieces = list(zip(self._task.inputs.chunk(self._parts), self._task.targets.chunk(self._parts)))
        for _ in range(batches):
            loss = 0.0
            for x, y in pieces if self._works else []:
                share = self._task.loss_fn(self._model(x), y) / self._parts
                share.backward()  # type: ignore[no-untyped-call]
                loss += float(share)
            if self._works:
                update(self._optimizer)
            yield loss if self._works else None

    def close(self) -> None:
        pass


class DataParallelRow:
    """DistributedDataParallel: each rank has its share of the samples, in `parts`, synchronised after the last one."""

    pipelines, timeline = 1, None

    def __init__(self, name: str, task: Task, layers: Sequence[nn.Module], parts: int) -> None:
        self.name, self._task, self._parts = name, task, parts
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self._inputs = task.inputs.chunk(ranks)[rank].chunk(parts)
        self._targets = task.targets.chunk(ranks)[rank].chunk(parts)
        self._model = nn.parallel.DistributedDataParallel(
            nn.Sequential(*layers), gradient_as_bucket_view=True
        )
        self._optimizer = task.optimizer_of(self._model)

    def losses(self, batches: int) -> Iterator[float | None]:
        for _ in range(batches):
            loss = 0.0
            for n, (x, y) in enumerate(zip(self._inputs, self._targets)):
                with nullcontext() if n == self._parts - 1 else self._model.no_sync():
                    share = self._task.loss_fn(self._model(x), y) / self._parts
                    share.backward()  # type: ignore[no-untyped-call]
                loss += float(share)
            update(self._optimizer)
            yield loss

    def close(self) -> None:
        pass


def layer_seconds(task: Task, layers: Sequence[nn.Module], parts: int, repeats: int = 3) -> list[float]:
    """Forward, backward and update of every layer alone, for a whole batch in `parts`; the loss is the last's."""
    x: torch.Tensor = task.inputs.chunk(parts)[0]
    target = task.targets.chunk(parts)[0]
    found = []
    for n, layer in enumerate(layers):
        optimizer = task.optimizer_of(layer)
        best = float("inf")
        for _ in range(repeats + 1):
            fed = x.detach().requires_grad_(n > 0)
            begin = time.perf_counter()
            output = layer(fed)
            passed = task.loss_fn(output, target) if n == len(layers) - 1 else output
            passed.backward(torch.ones_like(passed))
            middle = time.perf_counter()
            update(optimizer)
            best = min(best, parts * (middle - begin) + time.perf_counter() - middle)
        found.append(best)
        x = output
    return found
