"""A worker that becomes slow in a run is named, by one warning of the first rank."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.ranks import met
from avgpipe.ranks.limits import LIMITS
from avgpipe.runtime import pace
from tests.isolated import Isolated
from tests.patience import Deadline
from tests.runner import run
from tests.runtime.cases import momentum

pytestmark = pytest.mark.ranks

_LIMIT_S = 60


class Spins(nn.Module):
    """Keeps a processor busy, longer from its forward ``after`` on."""

    def __init__(self, seconds: float, later_s: float, after: int) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.seconds, self.later_s, self.after, self.calls = seconds, later_s, after, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        end = time.process_time() + (self.later_s if self.calls > self.after else self.seconds)
        while time.process_time() < end:
            pass
        return self.lin(x)


def slow(isolate: bool = False) -> list[str]:
    """Train until something is said on the first rank, with readings that are made ten times as often as usual."""
    pace._WINDOW_S, met.LIMITS = 0.25, replace(LIMITS, tick_s=0.05)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("avgpipe").addHandler(handler)
    layers = [Spins(1e-3, 1e-3, 0), Spins(2e-3, 12e-3, 1000)]
    deadline = Deadline(_LIMIT_S)
    batch = torch.zeros(4, 4), torch.zeros(4, dtype=torch.long)

    several: Any = {"pipelines": 2, "micro_batches": 4, "isolate": True} if isolate else {"micro_batches": 2}
    plan = Plan(stages=2, **several)
    with Pipeline(nn.Sequential(*layers), plan, loss_fn=nn.CrossEntropyLoss(), optimizer=momentum) as p:
        for result in p.train(repeat(batch)):
            # Every rank must end after the same batch.
            if result.batch % 50 == 49 and p.once("end", lambda: bool(said) or deadline.has_passed):
                break
    return [*said, os.environ["RANK"]]


@pytest.mark.slow
def test_a_stage_that_becomes_slow_is_named_by_the_first_rank() -> None:
    first, second = run(2, slow)
    assert second == ["1"]
    assert first[0].startswith("rank 1 (stage 1) takes ")
    assert " times as long for a micro-batch as it did at first (" in first[0]
    assert first[1:] == ["0"]


@pytest.mark.slow
def test_a_stage_of_an_isolated_pipeline_is_named_too() -> None:
    run = Isolated(2, 2, slow, isolate=True, restarts=0)
    said = [text for (_, rank), texts in run.results.items() for text in texts[:-1] if rank == 0]
    assert said, (run.results, [text for _, text in run.failures.values()])
    assert all(text.startswith("rank 1 (stage 1) takes ") for text in said)
