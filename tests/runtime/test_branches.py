"""What a forward reads of tensors' values, where micro-batches are answered otherwise than each other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from tests.options import grouped
from tests.runtime.cases import momentum

BATCHES = [(torch.arange(32.0).reshape(8, 4).sub(14), torch.zeros(8, 2))] * 4


class Chooses(nn.Module):
    def __init__(self, choose: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.choose = choose

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.choose(x)
        return x


def told(choose: Callable[[torch.Tensor], Any], caplog: pytest.LogCaptureFixture, **options: Any) -> int:
    layers = [Chooses(choose), nn.Linear(4, 4), nn.Linear(4, 2)]
    plan = Plan(stages=2, micro_batches=options.pop("micro_batches", 4))
    with (
        caplog.at_level(logging.WARNING, "avgpipe"),
        Pipeline(layers, plan, **grouped(loss_fn=nn.MSELoss(), optimizer=momentum, **options)) as pipeline,
    ):
        for _ in pipeline.train(BATCHES):
            pass
    return sum("branches on the values" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    "choose",
    [lambda x: bool(x.mean() > 0), lambda x: float(x.mean()), lambda x: x.mean().item()],
    ids=["a branch", "a float", "an item"],
)
def test_answers_that_differ_are_warned_of_once(
    choose: Callable[[torch.Tensor], Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert told(choose, caplog) == 1


@pytest.mark.parametrize(
    "choose",
    [lambda x: bool(x.isfinite().all()), lambda x: int(x.long().max()), lambda x: x.shape[0] > 1],
    ids=["an assertion", "a length", "a shape"],
)
def test_answers_that_are_alike_and_whole_numbers_are_not(
    choose: Callable[[torch.Tensor], Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert told(choose, caplog) == 0


def test_whole_batches_have_one_answer_and_nothing_is_looked_at_without_check(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert told(lambda x: bool(x.mean() > 0), caplog, micro_batches=1) == 0
    assert told(lambda x: bool(x.mean() > 0), caplog, check="off") == 0
