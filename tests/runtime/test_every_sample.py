"""Every sample moves the reference as in the undisturbed run, whichever isolated pipelines leave and join."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Plan
from tests.runtime.pipelines_here import Batch, Here

COUNTED = 0  # targets of 0 are ignored by one of the losses


class Sum(nn.Module):
    reduction = "sum"

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum()


class Mean(nn.Module):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.mean()


class Ignoring(nn.Module):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output[target != COUNTED].sum() / (target != COUNTED).sum()


def count(target: torch.Tensor) -> int:
    return int((target != COUNTED).sum())


LOSSES: dict[str, tuple[Any, Any]] = {
    "sum": (Sum(), None),
    "mean": (Mean(), None),
    "ignoring": (Ignoring(), count),
}


def batches_of(number: int, size: int) -> list[Batch]:
    """Batches that differ in size; targets from 0 to 2, of which two consecutive micro-batches may have only zeros."""
    draw, found, first = torch.Generator().manual_seed(0), [], 0
    for j in range(number):
        samples = size - j % 3
        targets = torch.randint(0, 3, (samples,), generator=draw)
        targets[: samples // 2] *= j % 4 != 1
        targets[-1] = 1
        found.append((torch.arange(first, first + samples), targets))
        first += samples
    return found


def expected(batches: Sequence[Batch], loss: str, divisor: int) -> torch.Tensor:
    """By the rule, sample by sample: minus its weight in the loss of its batch, the mean of ``divisor`` batches."""
    found = []
    for numbers, targets in batches:
        weights = torch.ones(len(numbers), dtype=torch.float64)
        if loss == "ignoring":
            weights = (targets != COUNTED).double()
        found.append(weights if loss == "sum" else weights / weights.sum())
    return -torch.cat(found) / divisor


CASES = [
    {"batch": "global"},
    {"batch": "global", "staleness": 0},
    {"batch": "global", "rule": "avgpipe"},
    {"batch": "global", "rule": "avgpipe", "period": 3},
    {"batch": "per-pipeline"},
    {"batch": "per-pipeline", "staleness": 0},
    {"batch": "per-pipeline", "rule": "mean-gradient"},
    {"batch": "per-pipeline", "period": 2},
]


def here_of(case: dict[str, Any], N: int, loss: str, batches: int, **more: Any) -> tuple[Here, torch.Tensor]:
    """Return pipelines and the expected weights; of more batches, as the last ones may not complete a period."""
    plan = Plan(pipelines=N, micro_batches=6, isolate=True, **case)
    data = batches_of(batches + (2 * N * plan.period if plan.period > 1 else 0), 12)
    loss_fn, loss_weight = LOSSES[loss]
    here = Here(plan, data, loss_fn, loss_weight=loss_weight, **more)
    return here, expected(data[:batches], loss, 1 if case["batch"] == "global" else N)


def moved_as(here: Here, rule: torch.Tensor) -> bool:
    return torch.allclose(here.weights()[: len(rule)], rule, rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("N", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_of_the_undisturbed_run(case: dict[str, Any], N: int, loss: str) -> None:
    here, rule = here_of(case, N, loss, 12)
    here.run()
    assert moved_as(here, rule)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_whoever_leaves_and_joins(case: dict[str, Any], seed: int, loss: str) -> None:
    draw = random.Random(f"{case} {seed} {loss}")
    N = draw.choice([2, 3, 4])
    here, rule = here_of(case, N, loss, 36 if case["batch"] == "global" else 30 * N)
    here.run_drawn(draw, until=22, losses=0.3)
    assert moved_as(here, rule)


@pytest.mark.parametrize("loss", ["mean", "ignoring"])
@pytest.mark.parametrize("batch", ["global", "per-pipeline"])
def test_batches_given_one_by_one_are_shared_whatever_the_plan(batch: str, loss: str) -> None:
    plan = Plan(pipelines=3, micro_batches=6, isolate=True, batch=batch)
    data = batches_of(12, 12)
    here = Here(plan, data, LOSSES[loss][0], loss_weight=LOSSES[loss][1], given=True)
    here.run(4)
    here.begin(0)
    here.lose(1)
    here.run(3)
    here.join(1)
    here.run()
    assert moved_as(here, expected(data, loss, 1))


def test_a_step_of_a_sum_without_a_pipeline_that_is_lost_is_as_large_as_its_shares() -> None:
    here, _ = here_of({"batch": "global"}, 3, "sum", 6)
    here.begin(0)
    here.lose(2)
    here.end()
    numbers = here.batches[0][0].tolist()
    assert here.weights()[numbers].tolist() == [-1.0] * 8 + [0.0] * 4


def test_what_is_lost_in_a_period_is_trained_on_again_from_its_first_step() -> None:
    here, _ = here_of({"batch": "per-pipeline", "period": 3}, 2, "sum", 12)
    here.run(2)
    here.publish(0)
    here.lose(1)  # it has published two steps of three, and no update
    others, its = (torch.cat([here.batches[j][0] for j in range(first, 6, 2)]) for first in (0, 1))
    here.end()
    assert here.weights()[others].eq(-0.5).all()
    assert here.weights()[its].eq(0).all()
    here.run(3)
    assert here.weights()[others].eq(-0.5).all()
    assert here.weights()[its].eq(-0.5).all()


@pytest.mark.parametrize("case", [case for case in CASES if "period" not in case], ids=str)
def test_what_is_lost_of_the_last_steps_is_trained_on_after_the_loader(case: dict[str, Any]) -> None:
    here, rule = here_of(case, 3, "mean", 6)
    here.run(5 if case["batch"] == "global" else 1)  # of 6, or of 2
    here.lose(1)
    here.run()
    assert moved_as(here, rule)


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("batch", ["global", "per-pipeline"])
def test_batches_that_one_pipeline_lacks_are_trained_on_with_a_warning_if_it_has_left(
    batch: str, leaves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    here, rule = here_of({"batch": batch}, 2, "mean", 12)
    here.run(4)
    here.lose(1, leaves=leaves)
    here.run()
    assert moved_as(here, rule)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == leaves
    at = 4 if batch == "global" else 9  # of the fifth step
    assert all(f"pipeline 1 has left at batch {at}, and the loader here has more" in text for text in said)


def test_pipelines_that_leave_at_the_loaders_end_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    here, rule = here_of({"batch": "global"}, 2, "mean", 6)
    here.run(5)
    here.lose(1, leaves=True)
    here.run()
    assert moved_as(here, rule)
    assert not caplog.records
