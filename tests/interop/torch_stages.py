"""Stages of torch.distributed.pipelining, what a schedule of theirs computes, and the same without stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from avgpipe.interop.torch_pipelining import ScheduleAdvanceForward

WIDTH, LR = 5, 0.1
RANKS = {1: [3], 2: [1, 2], 3: [1, 2, 3], 4: [0, 1, 2, 3]}  # where a pipeline of so many stages runs


class Plain(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Scaled(Plain):
    """Takes a factor for each sample, [b, 1], as a keyword argument."""

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return super().forward(x) * factor


class Pair(Plain):
    """Gives the next stage two tensors; the last stage's loss is of both."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z = super().forward(x)
        return z, torch.cat([z, x], 1) if y is None else y * y + z.repeat(1, 2)


MODELS = {"plain": Plain, "scaled": Scaled, "pair": Pair}


def loss_of(output: Any, target: Tensor) -> Tensor:
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.stack([(o[:, :WIDTH] - target).square().mean() for o in outputs]).sum()


def sum_of_losses(output: Any, target: Tensor) -> Tensor:
    return loss_of(output, target) * len(target)


LOSSES = {True: loss_of, False: sum_of_losses}  # by scale_grads: means, and sums


def batch(step: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [b, WIDTH], targets alike, and a factor for each sample [b, 1]."""
    generator = torch.Generator().manual_seed(100 + step)
    x, y = (torch.randn(size, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, y, 1 + torch.rand(size, 1, dtype=torch.float64, generator=generator)


def gradients_of(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def update(module: nn.Module) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p -= LR * p.grad
            p.grad = None


def without_stages(
    stages: int,
    micro_batches: int,
    model: str = "plain",
    scale_grads: bool = True,
    program: str = "tt",
    **_: Any,
) -> list[dict[str, Any]]:
    """What `pipelined` returns, of the stages one after another on whole batches; gradients of all of them."""
    layers = nn.ModuleList([MODELS[model](k) for k in range(stages)])
    loss_fn, results = LOSSES[scale_grads], []
    for step, kind in enumerate(program):
        x, y, factor = batch(step, 2 * micro_batches)
        value: Any = x
        for layer in layers:
            args = value if isinstance(value, tuple) else (value,)
            value = layer(*args, **({"factor": factor} if model == "scaled" else {}))
        loss = loss_fn(value, y)
        result = {"output": value, "loss": loss.item(), "gradients": []}
        if kind == "t":
            loss.backward()
            result["gradients"] = gradients_of(layers)
            update(layers)
        results.append(result)
    return results


def schedule_of(
    name: str, stage: PipelineStage, micro_batches: int, scale_grads: bool = True, advance: Any = None
) -> Any:
    options = {"loss_fn": LOSSES[scale_grads], "scale_grads": scale_grads}
    if name == "advance-forward":
        return ScheduleAdvanceForward(stage, micro_batches, **options, advance=advance)
    return {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name](stage, micro_batches, **options)


def pipelined(
    group: Any,
    schedule: str,
    stages: int,
    micro_batches: int,
    model: str = "plain",
    scale_grads: bool = True,
    program: str = "tt",
    advance: Any = None,
) -> list[dict[str, Any]]:
    """For each step of the program, t: train, e: evaluate, this rank's losses, output and gradients."""
    rank = dist.get_rank(group)
    module = MODELS[model](rank)
    stage = PipelineStage(module, rank, stages, torch.device("cpu"), group=group)
    runs = schedule_of(schedule, stage, micro_batches, scale_grads, advance)
    results = []
    for step, kind in enumerate(program):
        x, y, factor = batch(step, 2 * micro_batches)
        losses: list[Tensor] = [torch.zeros(())]  # to be replaced
        arguments: dict[str, Any] = {"factor": factor} if model == "scaled" else {}
        if rank == stages - 1:
            arguments |= {"target": y, "losses": losses}
        inputs = (x,) if rank == 0 else ()
        if kind == "e":
            with torch.no_grad():
                output = runs.eval(*inputs, **arguments)
        else:
            output = runs.step(*inputs, **arguments)
        results.append(
            {"output": output, "losses": [x.item() for x in losses], "gradients": gradients_of(module)}
        )
        if kind == "t":
            update(module)
    return results


def options(group: Any) -> dict[str, Any]:
    """Of two stages: the order, gradients around an evaluation, and what `return_outputs=False` returns."""
    rank = dist.get_rank(group)
    module = Plain(rank)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
    schedule = ScheduleAdvanceForward(stage, 2, loss_fn=loss_of)
    x, y, _ = batch(0, 4)
    arguments = {} if rank == 0 else {"target": y}
    output = schedule.step(*([x] if rank == 0 else []), **arguments, return_outputs=False)
    before = gradients_of(module)
    schedule.eval(*([x] if rank == 0 else []), **arguments)
    order = [" ".join(map(str, schedule.pipeline_order_with_comms[r])) for r in range(2)]
    return {"output": output, "before": before, "after": gradients_of(module), "order": order}


def refused(group: Any) -> list[str]:
    """The messages about what does not fit a group of two ranks."""
    rank = dist.get_rank(group)
    messages = []
    for index, stages in ((rank, 3), (1 - rank, 2)):
        stage = PipelineStage(Plain(0), index, stages, torch.device("cpu"), group=group)
        try:
            ScheduleAdvanceForward(stage, 2)
        except ValueError as error:
            messages.append(str(error))
    stage = PipelineStage(Plain(rank), rank, 2, torch.device("cpu"), group=group)
    schedule = ScheduleAdvanceForward(stage, 2, loss_fn=loss_of)
    for size in (3, 4, 2):
        x, y, _ = batch(0, size)
        try:
            schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == 1 else {}))
        except ValueError as error:
            messages.append(str(error))
    return messages


def on_four_ranks(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The result of every case that this rank has a part in, by name."""
    dist.init_process_group("gloo")
    groups = {stages: None if len(ranks) == 4 else dist.new_group(ranks) for stages, ranks in RANKS.items()}
    results: dict[str, Any] = {}
    for name, case in cases.items():
        if dist.get_rank() in RANKS[case["stages"]]:
            results[name] = pipelined(groups[case["stages"]], **case)
    if dist.get_rank() in RANKS[2]:
        results["options"], results["refused"] = options(groups[2]), refused(groups[2])
    return results
