"""The schedules of torch.distributed.pipelining as rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from avgpipe.bench.schedules.rows import Task, Unavailable, optimizer_of, stepped

SINGLE = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
INTERLEAVED = {
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
}
DROP_IN = "advance-forward"  # ours on torch's runtime


class TorchRow:
    """A schedule of torch's over the ranks of the default group; `modules`: one for each stage, of which rank r has
    r, r + K, ...
    """

    pipelines, actions = 1, None

    def __init__(
        self, name: str, task: Task, modules: Sequence[nn.Module], schedule: str, micro_batches: int
    ) -> None:
        self.name, self._task = name, task
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = range(rank, len(modules), ranks)
        own = [copy.deepcopy(modules[n]).train() for n in mine]
        stages = [
            pipelining.PipelineStage(module, n, len(modules), torch.device("cpu"))
            for module, n in zip(own, mine)
        ]
        self._first, self._last = rank == 0, rank == ranks - 1
        self._schedule: Any
        if schedule == DROP_IN:
            from avgpipe.interop.torch_pipelining import ScheduleAdvanceForward

            self._schedule = ScheduleAdvanceForward(stages[0], micro_batches, loss_fn=task.loss_fn)
        elif schedule in SINGLE:
            self._schedule = SINGLE[schedule](stages[0], micro_batches, loss_fn=task.loss_fn)
        else:
            # The class's annotations name a private base class of the stages.
            self._schedule = INTERLEAVED[schedule](stages, micro_batches, loss_fn=task.loss_fn)  # type: ignore[arg-type]
        self._optimizer = optimizer_of(task, nn.ModuleList(own))

    def losses(self, batches: int) -> Iterator[float | None]:
        inputs = (self._task.inputs,) if self._first else ()
        for _ in range(batches):
            if self._last:
                losses: list[torch.Tensor] = []
                self._schedule.step(*inputs, target=self._task.targets, losses=losses, return_outputs=False)
                loss = float(torch.stack(losses).mean())
            else:
                self._schedule.step(*inputs, return_outputs=False)
                loss = None
            stepped(self._optimizer)
            yield loss

    def close(self) -> None:
        pass


def torch_row(
    name: str, task: Task, modules: Sequence[nn.Module], schedule: str, micro_batches: int
) -> TorchRow | Unavailable:
    """The row, or why torch refuses it: some schedules need M to be a multiple of something, or at least K; ours needs
    a torch that it knows.
    """
    try:
        return TorchRow(name, task, modules, schedule, micro_batches)
    except (ValueError, ImportError) as error:
        return Unavailable(name, " ".join(str(error).split()))
