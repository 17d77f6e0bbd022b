"""Several batches of a loader make one update: that of one batch of all their samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Carry, Pipeline, Plan
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import (
    adamw,
    assert_same_state,
    assert_same_training,
    language_model,
    token_batches,
    train_on_one_device,
    train_pipeline,
)
from tests.runtime.test_loss import IGNORED, as_one_number, ignoring
from tests.runtime.test_steps import Sum, mean

LOSS = nn.CrossEntropyLoss()
SIZES = [6, 7, 2, 6, 1, 6, 6, 4]  # of the loader's batches; the last update has two of them


def uneven() -> list[Any]:
    batches = [token_batches(1, n, seed=j)[0] for j, n in enumerate(SIZES)]
    return [(x, y.where(torch.arange(len(y)) % 3 != 1, IGNORED)) for x, y in batches]


def unions(batches: list[Any], count: int) -> list[Any]:
    groups = [batches[j : j + count] for j in range(0, len(batches), count)]
    return [tuple(torch.cat(values) for values in zip(*group)) for group in groups]


LOSSES = {
    "counted elements": LOSS,
    "a sum": nn.CrossEntropyLoss(reduction="sum"),
    "a sum and a count": ignoring,
}


def check(plan: dict[str, Any], name: str = "counted elements", **options: Any) -> Any:
    batches, loss_fn = uneven(), LOSSES[name]
    with Pipeline(
        language_model(), Plan(**plan), **grouped(loss_fn=loss_fn, optimizer=adamw, accumulate=3, **options)
    ) as p:
        results = list(p.train(iter(batches)))
        state = p.state_dict()
        assert p.batches == 3
        assert p.plan == Plan(**plan)
    losses, expected = train_on_one_device(
        language_model(), unions(batches, 3), as_one_number(loss_fn), adamw, options.get("clip_grad_norm")
    )
    assert [r.samples for r in results] == [15, 13, 10]
    assert [r.batch for r in results] == [0, 1, 2]
    assert_same_training(([r.loss for r in results], state), (losses, expected))
    return [r.loss for r in results]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "plan",
    [
        {"stages": 1, "micro_batches": 2},
        {"stages": 3, "micro_batches": 4, "schedule": "1f1b"},
        {"stages": 2, "micro_batches": 4, "recompute": "except-last"},
        {"stages": 2, "micro_batches": 4, "schedule": "1f1b", "replication": [1, 2]},
        {"stages": 4, "micro_batches": 2, "schedule": "zero-bubble-v"},
    ],
    ids=str,
)
def test_an_update_is_that_of_one_batch_of_all_samples(plan: dict[str, Any], name: str) -> None:
    check(plan, name)


@pytest.mark.parametrize("name", ["counted elements", "a sum"])
def test_pipelines_share_all_of_it(name: str) -> None:
    check({"stages": 2, "micro_batches": 2, "pipelines": 2, "staleness": 0}, name, clip_grad_norm=1e9)


@pytest.mark.ranks
@pytest.mark.parametrize("N", [1, 2])
def test_an_update_is_that_of_one_batch_on_ranks(N: int) -> None:
    plan = {"stages": 2, "micro_batches": 2, "pipelines": N, "staleness": 0}
    first, second = run(2, check, plan=plan)
    assert first == second


@pytest.mark.parametrize("plan", [{"schedule": "pipedream-2bw"}, {"pipelines": 2, "batch": "per-pipeline"}])
def test_any_plan_sees_what_one_batch_of_all_would_be(plan: dict[str, Any]) -> None:
    """The same micro-batches, of a loader with batches three times as large."""
    batches = token_batches(12, 4)

    def trained(count: int, accumulate: int) -> Any:
        made = Plan(stages=2, micro_batches=2 * count, **plan)
        given = unions(batches, count)
        with Pipeline(
            language_model(dropout=0.3), made, loss_fn=LOSS, optimizer=adamw, accumulate=accumulate
        ) as p:
            return [r.loss for r in p.train(given)], p.state_dict()

    once, parts = trained(3, 1), trained(1, 3)
    assert_same_training(parts, once)


class Rows(nn.Module):
    """Sums over rows of any length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1)


def test_batches_may_be_padded_to_different_lengths() -> None:
    model = nn.Sequential(nn.Embedding(11, 8, padding_idx=0), Rows(), nn.Linear(8, 11)).double()
    generator = torch.Generator().manual_seed(3)
    batches = [
        (torch.randint(1, 11, (4, n), generator=generator), torch.randint(11, (4,), generator=generator))
        for n in (5, 3, 8, 2)
    ]
    ours = train_pipeline(model, Plan(stages=2, micro_batches=2), batches, LOSS, adamw, accumulate=2)
    padded = [(nn.functional.pad(x, (0, 8 - x.shape[1])), y) for x, y in batches]
    expected = train_on_one_device(model, unions(padded, 2), LOSS, adamw)
    assert_same_training(ours, expected)


def test_metrics_are_over_all_batches_of_an_update() -> None:
    batches = [(x, y.clamp(min=0)) for x, y in uneven()]
    for loss_fn in (mean, Sum()):
        with Pipeline(
            language_model(), Plan(stages=2, micro_batches=2), loss_fn=loss_fn, optimizer=adamw, accumulate=4
        ) as p:
            result = next(iter(p.train(batches)))
        x, y = unions(batches, 4)[0]
        with torch.no_grad():
            _, expected = loss_fn(language_model()(x), y)
        assert result.metrics.keys() == expected.keys()
        for key, value in expected.items():
            assert abs(result.metrics[key] - float(value)) < 1e-10


def test_a_loaders_state_is_that_before_what_was_fetched_ahead() -> None:
    class Loader:
        def __init__(self) -> None:
            self.given = 0

        def __iter__(self) -> Any:
            for batch in token_batches(9, 4):
                self.given += 1
                yield batch

        def state_dict(self) -> int:
            return self.given

    loader = Loader()
    with Pipeline(language_model(), Plan(), loss_fn=LOSS, optimizer=adamw, accumulate=3) as p:
        for result in p.train(loader):
            assert p.loader_state(loader) == 3 * p.batches
            assert p.batches > result.batch  # on a device with streams results come later


def test_a_step_makes_an_update_of_the_batch_that_it_is_given() -> None:
    (x, y), *_ = token_batches(1, 8)
    with Pipeline(
        language_model(), Plan(stages=2, micro_batches=2), loss_fn=LOSS, optimizer=adamw, accumulate=3
    ) as p:
        loss, state = p.step(x, y), p.state_dict()
    losses, expected = train_on_one_device(language_model(), [(x, y)], LOSS, adamw)
    assert abs(loss - losses[0]) < 1e-10
    assert_same_state(state, expected)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.carry = Carry()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_what_cannot_be_accumulated_over_is_refused() -> None:
    def refused(match: str, model: nn.Module, accumulate: Any) -> None:
        with pytest.raises(ValueError, match=match):
            Pipeline(model, Plan(), loss_fn=LOSS, optimizer=adamw, accumulate=accumulate)

    for wrong in (0, -1, 1.5, True):
        refused(f"accumulate must be a number of batches of at least 1, not {wrong}", language_model(), wrong)
    refused("accumulate=2 trains on several .* a Carry", nn.Sequential(nn.Linear(2, 2), Counts()), 2)
