"""Stages of the papers' models that take a device's time and have tensors of the true sizes, and compute nothing.

A stage gets a micro-batch in one row of numbers and hands on another one; gradients travel back in tensors as large as
what came. Its weights are of the true number where their gradients or updates travel: of stages with replicas, of
pipelines with workers of their own, and those that another stage has too. Elsewhere it has one weight, since nothing
but its device would know of more.

What everything takes and weighs can be scaled: bytes, together with the lines' rates, leave all times as they are;
seconds, together with one over the rates, leave the ratios of all times, and the host's own work counts for less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from avgpipe.plan import Plan
from avgpipe.rules import RULES
from avgpipe_lab.bench.schedules import occupied, takes
from benchmarks.papers.forecast import StageWork
from benchmarks.papers.models import FLOAT_BYTES


def scaled(work: StageWork, bytes_by: float, seconds_by: float, weights_by: float) -> StageWork:
    """Multiply what a stage sends, what it takes, and its weights; 0 for ``weights_by`` where its own do not travel."""
    return replace(
        work,
        forward_s=work.forward_s * seconds_by,
        backward_s=work.backward_s * seconds_by,
        input_backward_s=work.input_backward_s * seconds_by,
        update_s=work.update_s * seconds_by,
        input_bytes=work.input_bytes * bytes_by,
        output_bytes=work.output_bytes * bytes_by,
        own_bytes=work.own_bytes * bytes_by * weights_by,
        tied_bytes={n: size * bytes_by * (weights_by or 1) for n, size in work.tied_bytes.items()},
    )


def values(size_bytes: float) -> int:
    """Numbers that have so many bytes, at least one."""
    return max(1, round(size_bytes / FLOAT_BYTES))


class PaperStage(nn.Module):
    """(micro-batches, numbers of the input) -> (micro-batches, numbers of the output), in a device's time.

    Forward and backward take theirs; a schedule that splits the backward can run the parts for input and weights apart.
    A stage whose input needs no gradient spends both on its weights.

    Args:
        number: Of the stage, which its weights hold, so that their optimizer can tell whose they are.
        work: What it takes and has.
        tied: Weights that it shares with other stages.
    """

    def __init__(self, number: int, work: StageWork, tied: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.full((values(work.own_bytes),), float(number)))
        self.tied = nn.ParameterList(tied)
        self._work, self._outputs = work, values(work.output_bytes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        work, shape = self._work, (len(x), self._outputs)
        with occupied(work.forward_s):
            input_s = work.input_backward_s if x.requires_grad else 0.0
            # Slices: what they are of has a gradient of its own size, whatever is read of it.
            weight = torch.stack([w[0] for w in (self.own, *self.tied)]).sum()
            return takes(x[:, :1], shape, input_s) + takes(weight, shape, work.backward_s - input_s)


def stages_of(works: Sequence[StageWork]) -> list[PaperStage]:
    """Make the stages of a plan; those that have the same tie share its weights."""
    sizes = {n: size for work in works for n, size in work.tied_bytes.items()}
    tied = {n: nn.Parameter(torch.zeros(values(size))) for n, size in sizes.items()}
    return [PaperStage(k, work, [tied[n] for n in work.tied_bytes]) for k, work in enumerate(works)]


def optimizer_of(works: Sequence[StageWork], plan: Plan, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Make one whose steps take the time of a pipeline's updates, and change nothing.

    Where all pipelines share it, a round is a step for each of them and one of the reference, which take as long as an
    update for each.
    """
    given = list(parameters)
    optimizer = torch.optim.SGD(given, lr=0.0, momentum=0.9 * (plan.correction == "predicted"))
    shared = plan.pipelines > 1 and RULES[plan.rule or ""].tries
    share = plan.pipelines / (plan.pipelines + 1) if shared else 1.0
    stage = round(float(given[0].detach().flatten()[0]))
    optimizer.register_step_post_hook(partial(_take, works[stage].update_s * share))
    return optimizer


def _take(seconds: float, *_: object) -> None:
    with occupied(seconds):
        pass
