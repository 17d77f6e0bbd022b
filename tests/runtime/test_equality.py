"""The headline: pipelines of any shape train exactly as one device does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from tests.links.ends import LINKS
from tests.runner import run
from tests.runtime.cases import (
    adamw,
    assert_same_state,
    assert_same_training,
    assert_trains_as_one_device,
    language_model,
    momentum,
    token_batches,
    train_on_one_device,
    train_pipeline,
    unequal,
)

SCHEDULES = ["all-forward-all-backward", "1f1b", "advance-forward"]


def compare(case: dict[str, Any], **options: Any) -> Any:
    """One case, on the ranks at hand or in this process. Losses and the final state."""
    model = language_model(frozen=case.get("frozen", False))
    batches = token_batches(4, case.get("samples", 9), case.get("last"))
    loss_fn = nn.CrossEntropyLoss(
        reduction=case.get("reduction", "mean"), ignore_index=case.get("ignore", -100)
    )
    optimizer = adamw if case.get("adamw") else momentum
    clip = case.get("clip")
    plan = Plan(
        stages=case["K"],
        micro_batches=case["M"],
        schedule=case.get("schedule", "advance-forward"),
        recompute=case.get("recompute", "never"),
    )
    losses, state = train_pipeline(model, plan, batches, loss_fn, optimizer, clip_grad_norm=clip, **options)
    expected = train_on_one_device(model, batches, loss_fn, optimizer, clip)
    assert unequal(losses, expected[0]) < 1e-10, case
    assert_same_state(state, expected[1])
    return losses, state


@pytest.mark.grid(32)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("K", [1, 2, 3, 4])
@pytest.mark.parametrize("M", range(1, 9))
def test_equals_one_device_for_every_shape(K: int, M: int, schedule: str) -> None:
    for reduction, frozen, last in itertools.product(["mean", "sum"], [False, True], [None, 5]):
        compare(
            {"K": K, "M": M, "schedule": schedule, "reduction": reduction, "frozen": frozen, "last": last}
        )


VARIANTS = [
    {"reduction": "sum"},
    {"frozen": True},
    {"last": 5},
    {"last": 1, "reduction": "sum"},
    {"clip": 0.05},
    {"clip": 0.05, "frozen": True, "adamw": True},
    {"ignore": 3},
    {"recompute": "always"},
    {"recompute": "except-last"},
    {"adamw": True, "samples": 13},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("K", [1, 2, 4])
def test_equals_one_device_in_every_variant(K: int, variant: dict[str, Any]) -> None:
    compare({"K": K, "M": 4, **variant})


def check_on_ranks(K: int) -> bool:
    """Every schedule and variant at M = 4 over each link, a thinner grid of shapes beside it; all bitwise alike."""
    cases = [{"K": K, "M": 4, "schedule": s} for s in SCHEDULES]
    cases += [{"K": K, "M": M, "schedule": SCHEDULES[M % 3]} for M in (1, 2, 3, 5, 8)]
    for case in cases + [{"K": K, "M": 4, **v} for v in VARIANTS]:
        (losses, state), *others = (compare(case, link=link) for link in LINKS)
        for other_losses, other_state in others:
            assert other_losses == losses, case
            assert all(torch.equal(state[name], other_state[name]) for name in state), case
    return True


@pytest.mark.promise(1)
@pytest.mark.slow
@pytest.mark.parametrize("K", [2, 3, 4])
def test_equals_one_device_on_ranks_over_every_link(K: int) -> None:
    assert run(K, check_on_ranks, K=K, timeout_s=110) == [True] * K


def test_dropout_does_not_depend_on_the_number_of_stages() -> None:
    model = language_model(dropout=0.4)
    batches = token_batches(4, 8)
    ends = [
        train_pipeline(
            model,
            Plan(stages=K, micro_batches=3, recompute=how),
            batches,
            nn.CrossEntropyLoss(),
            momentum,
            seed=3,
        )
        for K, how in [(1, "never"), (2, "never"), (3, "always"), (4, "except-last")]
    ]
    for end in ends[1:]:
        assert_same_training(end, ends[0])
    other_seed, _ = train_pipeline(
        model, Plan(stages=2, micro_batches=3), batches, nn.CrossEntropyLoss(), momentum, seed=4
    )
    assert unequal(other_seed, ends[0][0]) > 1e-6


def test_random_state_of_the_caller_is_untouched() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train_pipeline(
        language_model(dropout=0.4),
        Plan(stages=2, micro_batches=2),
        token_batches(2, 4),
        nn.CrossEntropyLoss(),
        momentum,
    )
    torch.manual_seed(5)
    with Pipeline(
        language_model(dropout=0.4),
        Plan(stages=2, micro_batches=2),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=momentum,
    ) as p:
        list(p.train(token_batches(2, 4)))
        # language_model() seeds as well; training itself must not draw from the caller's generator
        torch.manual_seed(5)
        list(p.train(token_batches(2, 4)))
        assert torch.equal(torch.rand(3), expected)


def test_learning_rate_schedule_steps_per_batch() -> None:
    model, batches = language_model(), token_batches(5, 8)
    plan, loss_fn = Plan(stages=3, micro_batches=2), nn.CrossEntropyLoss()
    halving = lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)  # noqa: E731
    assert_trains_as_one_device(model, plan, batches, loss_fn, momentum, lr_scheduler=halving)
