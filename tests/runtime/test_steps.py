"""What a step tells: metrics of the loss function, the gradient's norm, the learning rate, and what was left out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from avgpipe import Pipeline, Plan, Precision, StageError
from tests.links.ends import LINKS
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import adamw, language_model, momentum, token_batches, unequal

LOSS = nn.CrossEntropyLoss()
IGNORED = -100


# ---- metrics -------------------------------------------------------------------------------------------------------


def mean(output: Any, target: Any) -> Any:
    right = (output.argmax(-1) == target).double()
    return LOSS(output, target), {"accuracy": right.mean(), "largest": float(output.detach().square().mean())}


def counted(output: Any, target: Any) -> Any:
    """A sum and a count; what the dict has is divided by the count, too."""
    kept = target != IGNORED
    total = functional.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum")
    right = ((output.argmax(-1) == target) & kept).sum()
    return (total, kept.sum()), {"accuracy": right, "largest": output.detach().square().mean(-1)[kept].sum()}


class Sum(nn.Module):
    reduction = "sum"

    def forward(self, output: Any, target: Any) -> Any:
        total = functional.cross_entropy(output, target, reduction="sum")
        return total, {"right": int((output.argmax(-1) == target).sum())}


LOSSES = {"a mean": mean, "a sum and a count": counted, "a sum": Sum()}


def batches_for(name: str) -> list[Any]:
    batches = token_batches(4, 9, last=3)
    if name == "a sum and a count":
        batches = [(x, y.where(torch.arange(len(y)) % 3 != 1, IGNORED)) for x, y in batches]
    return batches


def on_one_device(
    loss_fn: Any, batches: list[Any]
) -> tuple[list[float], list[dict[str, float]], list[float]]:
    """Losses, metrics and norms of plain training."""
    model = language_model()
    optimizer = momentum(model.parameters())
    losses, metrics, norms = [], [], []
    for x, y in batches:
        optimizer.zero_grad()
        loss, found = loss_fn(model(x), y)
        count = 1.0
        if isinstance(loss, tuple):
            loss, count = loss[0] / loss[1], float(loss[1])
        loss.backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step()
        losses.append(float(loss.detach()))
        metrics.append({name: float(value) / count for name, value in found.items()})
    return losses, metrics, norms


def check(name: str, plan: dict[str, Any], **options: Any) -> Any:
    batches, loss_fn = batches_for(name), LOSSES[name]
    with Pipeline(
        language_model(), Plan(**plan), **grouped(loss_fn=loss_fn, optimizer=momentum, **options)
    ) as p:
        results = list(p.train(batches))
        evaluated = p.evaluate(batches)
        state = p.state_dict()
    # Pipelines that share a batch divide by the counts of their own shares, so their weights are others from then on.
    exact = 1 if name == "a sum and a count" and plan.get("pipelines", 1) > 1 else len(batches)
    losses, metrics, norms = (found[:exact] for found in on_one_device(loss_fn, batches))
    assert unequal([r.loss for r in results[:exact]], losses) < 1e-10
    for result, expected in zip(results[:exact], metrics, strict=True):
        assert list(result.metrics) == list(expected)
        assert unequal(list(result.metrics.values()), list(expected.values())) < 1e-10
    if plan.get("pipelines", 1) == 1 and "clip_grad_norm" in options:
        assert unequal([r.grad_norm for r in results], norms) < 1e-10
    model = language_model()
    model.load_state_dict(state)
    with torch.no_grad():
        x, y = (torch.cat(values) for values in zip(*batches))
        _, expected = loss_fn(model.eval()(x), y)
    count = float((y != IGNORED).sum()) if name == "a sum and a count" else 1.0
    for key, value in expected.items():
        assert abs(evaluated.metrics[key] - float(value) / count) < 1e-10
    assert evaluated.metric is None
    return [(r.loss, r.metrics, r.grad_norm, r.skipped) for r in results]


PLANS: list[dict[str, Any]] = [
    {"stages": 1, "micro_batches": 4},
    {"stages": 3, "micro_batches": 4},
    {"stages": 2, "micro_batches": 4, "pipelines": 2, "staleness": 0},
    {"stages": 2, "micro_batches": 4, "schedule": "1f1b", "replication": [1, 2]},
    {"stages": 2, "micro_batches": 4, "schedule": "zero-bubble-h1"},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_metrics_are_those_of_the_whole_batch(name: str, plan: dict[str, Any]) -> None:
    check(name, plan, clip_grad_norm=math.inf)


@pytest.mark.ranks
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", LOSSES)
def test_every_rank_learns_them_with_the_loss(name: str, link: str) -> None:
    plan = {"stages": 2, "micro_batches": 4, "pipelines": 2, "staleness": 0}
    first, second = run(2, check, name=name, plan=plan, link=link, clip_grad_norm=1e9)
    assert first == second


@pytest.mark.ranks
def test_replicas_of_the_last_stage_add_them_up() -> None:
    plan = {"stages": 2, "micro_batches": 4, "schedule": "1f1b", "replication": [1, 2]}
    for name in LOSSES:
        found = run(3, check, name=name, plan=plan, clip_grad_norm=1e9)
        assert found == found[:1] * 3


@pytest.mark.ranks
@pytest.mark.parametrize("batch", ["global", "per-pipeline"])
def test_ranks_without_a_part_in_a_batch_learn_all_of_its_result(batch: str) -> None:
    plan = {"stages": 1, "micro_batches": 2, "pipelines": 2, "spread": True, "batch": batch, "staleness": 0}
    first, second = run(2, results_of, plan=plan)
    assert first == second
    assert all(norm is not None and lr == 0.1 for _, _, norm, lr in first)
    assert [lr for *_, lr in run(2, results_of, plan={**plan, "rule": "avgpipe"}, halves=True)[1]] == (
        [0.1 * 0.5**n for n in range(4)] if batch == "global" else [0.1, 0.1, 0.05, 0.05]
    )


def results_of(plan: dict[str, Any], halves: bool = False) -> Any:
    schedule = halving if halves else None
    with Pipeline(
        language_model(),
        Plan(**plan),
        loss_fn=mean,
        optimizer=momentum,
        clip_grad_norm=1.0,
        lr_scheduler=schedule,
        timeout_s=30,
    ) as p:
        return [(r.loss, r.metrics, r.grad_norm, r.lr) for r in p.train(token_batches(4, 8))]


@pytest.mark.ranks
def test_a_narrow_wire_rounds_neither_losses_nor_metrics() -> None:
    first, second = run(2, on_a_narrow_wire)
    assert first == second
    assert all(metrics["exact"] == 1 / 3 for _, metrics in first)


def exact(output: Any, target: Any) -> Any:
    return (functional.cross_entropy(output, target, reduction="sum"), len(target)), {
        "exact": len(target) / 3
    }


def on_a_narrow_wire() -> Any:
    plan = Plan(stages=2, micro_batches=2)
    with Pipeline(
        language_model(),
        plan,
        loss_fn=exact,
        optimizer=momentum,
        extensions=[Precision(wire_dtype=torch.bfloat16)],
        timeout_s=30,
    ) as p:
        return [(r.loss, r.metrics) for r in p.train(token_batches(3, 9))]


def test_without_metrics_there_are_none() -> None:
    with Pipeline(language_model(), Plan(stages=2), loss_fn=LOSS, optimizer=momentum) as p:
        (result,) = p.train(token_batches(1, 4))
        assert (result.metrics, result.grad_norm, result.skipped) == ({}, None, False)
        assert p.evaluate(token_batches(1, 4)).metrics == {}
        assert hash(result) == hash(result)


@pytest.mark.parametrize("batch", ["global", "per-pipeline"])
@pytest.mark.parametrize("pipelines", [1, 2])
def test_a_step_counts_what_there_is_to_count(pipelines: int, batch: str) -> None:
    plan = Plan(stages=2, pipelines=pipelines, micro_batches=2, batch=batch if pipelines > 1 else "global")
    inputs, targets = token_batches(1, 4)[0]
    with Pipeline(
        language_model(), plan, loss_fn=LOSS, optimizer=momentum, extensions=[Precision(skip_nonfinite=True)]
    ) as p:
        assert math.isnan(p.step(inputs, torch.full_like(targets, IGNORED)))
        targets[:2] = IGNORED  # all of the first pipeline's
        expected = p.evaluate([(inputs, targets)]).loss
        assert abs(p.step(inputs, targets) - expected) < 1e-10


def test_a_share_without_samples_adds_nothing_to_a_sums_metrics() -> None:
    plan = Plan(stages=2, pipelines=2, micro_batches=2)
    ((inputs, targets),) = token_batches(1, 1)
    with Pipeline(language_model(), plan, loss_fn=Sum(), optimizer=momentum) as p:
        expected = p.evaluate([(inputs, targets)]).metrics
        (result,) = p.train([(inputs, targets)])
    assert expected
    assert result.metrics.keys() == expected.keys()
    assert unequal(list(result.metrics.values()), list(expected.values())) < 1e-10


def test_metrics_stand_beside_those_of_a_metric_function() -> None:
    with Pipeline(language_model(), Plan(stages=2), loss_fn=mean, optimizer=momentum) as p:
        found = p.evaluate(token_batches(3, 7), lambda output, target: {"accuracy": 0.5})
    assert found.metric == {"accuracy": 0.5}
    assert set(found.metrics) == {"accuracy", "largest"}


def test_what_are_no_metrics_is_refused() -> None:
    def refused(told: Any, match: str) -> None:
        plan = Plan(stages=2, micro_batches=2)
        loss_fn = lambda output, target: (LOSS(output, target), told(output))  # noqa: E731
        with (
            Pipeline(language_model(), plan, loss_fn=loss_fn, optimizer=momentum) as p,
            pytest.raises(StageError, match=match),
        ):
            list(p.train(token_batches(1, 5)))

    refused(lambda output: {"a": output}, r"the metric 'a' as shape \(3, 11\); metrics are a dict of numbers")
    refused(lambda output: {"a": "b"}, r"the metric 'a' as str")
    refused(lambda output: {3: 1.0}, r"the metric 3 as float")
    refused(lambda output: {"a" * len(output): 1.0}, "metrics aaa for some micro-batches and aa for others")
    refused(
        lambda output: {"a": 1.0} if len(output) == 3 else {}, "for some micro-batches and none for others"
    )
    refused(lambda output: [output], r"returned tuple; .*either may have metrics, as \(loss, dict\)")


# ---- norm, rate, left out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("N", [1, 2])
def test_an_infinite_limit_measures_and_changes_nothing(N: int) -> None:
    def trained(**options: Any) -> Any:
        plan = Plan(stages=2, pipelines=N, micro_batches=4)
        with Pipeline(language_model(), plan, **grouped(loss_fn=LOSS, optimizer=adamw, **options)) as p:
            return [(r.loss, r.grad_norm) for r in p.train(token_batches(4, 8))], p.state_dict()

    without, state = trained()
    measured, same = trained(clip_grad_norm=math.inf)
    assert [loss for loss, _ in measured] == [loss for loss, _ in without]
    assert all(norm > 0 for _, norm in measured)
    assert all(torch.equal(same[name], state[name]) for name in state)


def test_the_norm_is_that_before_clipping() -> None:
    results = check("a mean", {"stages": 3, "micro_batches": 4}, clip_grad_norm=math.inf)
    with Pipeline(
        language_model(), Plan(stages=2), loss_fn=LOSS, optimizer=momentum, clip_grad_norm=1e-3
    ) as p:
        first = next(iter(p.train(batches_for("a mean"))))
    assert abs(first.grad_norm - results[0][2]) < 1e-10


def halving(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


@pytest.mark.parametrize("N", [1, 2])
def test_the_learning_rate_is_that_of_the_batchs_update(N: int) -> None:
    plan = Plan(stages=2, pipelines=N, micro_batches=4)
    with Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=momentum, lr_scheduler=halving) as p:
        assert [r.lr for r in p.train(token_batches(4, 8))] == [0.1, 0.05, 0.025, 0.0125]


def test_a_learning_rate_may_be_a_tensor() -> None:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=torch.tensor(0.5))

    with Pipeline(language_model(), Plan(), loss_fn=LOSS, optimizer=optimizer, lr_scheduler=halving) as p:
        assert [r.lr for r in p.train(token_batches(3, 8))] == [0.5, 0.25, 0.125]


def test_a_model_without_anything_to_train_is_refused() -> None:
    model = language_model()
    model.requires_grad_(False)
    with (
        Pipeline(model, Plan(stages=2), loss_fn=LOSS, optimizer=momentum) as p,
        pytest.raises(StageError, match="leads back to no parameter that requires a gradient"),
    ):
        list(p.train(token_batches(1, 4)))


@pytest.mark.parametrize("plan", [{}, {"pipelines": 2}, {"schedule": "1f1b", "replication": [2, 1]}], ids=str)
def test_an_update_that_was_left_out_is_reported(plan: dict[str, Any]) -> None:
    def loss_fn(output: Any, target: Any) -> Any:
        answers, weight = target
        return (functional.cross_entropy(output, answers, reduction="none") * weight).mean()

    weights = (1.0, 1.0, math.inf, 1.0)
    batches = [
        (x, (y, torch.full((8,), w, dtype=torch.float64))) for (x, y), w in zip(token_batches(4, 8), weights)
    ]
    made = Plan(stages=2, micro_batches=4, **plan)
    with Pipeline(
        language_model(),
        made,
        loss_fn=loss_fn,
        optimizer=momentum,
        extensions=[Precision(skip_nonfinite=True)],
    ) as p:
        results = list(p.train(batches))
    assert [r.skipped for r in results] == [False, False, True, False]
    assert [math.isfinite(r.grad_norm) for r in results] == [True, True, False, True]
