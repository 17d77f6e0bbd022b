"""A run that would learn nothing, or leave something out, says so: at its beginning, or in the first batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan, StageError
from tests.options import grouped
from tests.runtime.cases import momentum

LOSS = nn.MSELoss()
PLANS = {
    "one": Plan(stages=2, micro_batches=2),
    "two, which share": Plan(stages=2, pipelines=2, micro_batches=2),
    "two in turn": Plan(stages=2, pipelines=2, micro_batches=2, batch="per-pipeline"),
    "split": Plan(stages=2, micro_batches=2, schedule="zero-bubble-h1"),
    "versions": Plan.for_system("pipedream-2bw", stages=2),
    "recomputed": Plan(stages=2, micro_batches=2, recompute="always"),
}


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count: int = 3) -> list[Any]:
    draw = torch.Generator().manual_seed(2)
    return [tuple(torch.randn(8, n, generator=draw) for n in (4, 3)) for _ in range(count)]


def trained(whole: Any, plan: str, loss_fn: Any = LOSS, optimizer: Any = momentum) -> list[float]:
    with Pipeline(whole, PLANS[plan], loss_fn=loss_fn, optimizer=optimizer) as pipeline:
        return [result.loss for result in pipeline.train(batches())]


def frozen() -> nn.Sequential:
    return model().requires_grad_(False)


DETACHED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "detached": (model, lambda o, t: (o.detach() - t).square().mean()),
    "a number": (model, lambda o, t: torch.tensor(float((o - t).square().mean()))),
    "argmax": (model, lambda o, t: (o.argmax(1) - t.argmax(1)).double().square().mean()),
    "under no_grad": (model, torch.no_grad()(lambda o, t: LOSS(o, t))),
    "all frozen": (frozen, LOSS),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("what", DETACHED)
def test_a_loss_that_leads_nowhere_is_refused(what: str, plan: str) -> None:
    make, loss_fn = DETACHED[what]
    with pytest.raises(StageError, match="the loss leads back to no parameter that requires a gradient"):
        trained(make(), plan, loss_fn)


def test_a_micro_batch_without_targets_may_lead_nowhere() -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> Any:
        rows = target[:, 0] > 0
        if not rows.any():
            return torch.zeros(()), torch.zeros(())
        return (output[rows] - target[rows]).square().sum(), rows.sum()

    inputs, targets = batches(1)[0]
    targets[:4], targets[4:] = -1, 1
    with Pipeline(model(), PLANS["one"], loss_fn=loss_fn, optimizer=momentum) as pipeline:
        (result,) = pipeline.train([(inputs, targets)])
    expected = (model()(inputs)[4:] - 1).square().sum() / 4
    assert result.loss == pytest.approx(float(expected))


OUTER = model()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.SGD(OUTER.parameters(), lr=0.1),
        lambda params: [torch.optim.SGD(params, lr=0.1), torch.optim.SGD(OUTER.parameters(), lr=0.1)],
        lambda params: torch.optim.SGD([{"params": params}, {"params": OUTER[0].parameters()}], lr=0.1),
        lambda named_params: torch.optim.SGD(OUTER.named_parameters(), lr=0.1),
        lambda params: torch.optim.SGD([p.detach().clone().requires_grad_() for p in params], lr=0.1),
    ],
)
def test_an_optimizer_over_other_tensors_is_refused(optimizer: Any, plan: str) -> None:
    with pytest.raises(
        ValueError, match=r"SGD over \d tensors that it was not given.*not over model.parameters\(\)"
    ):
        trained(OUTER, plan, optimizer=optimizer)


@pytest.mark.parametrize("plan", PLANS)
def test_an_optimizer_that_has_another_tensor_when_it_is_first_made_is_refused(plan: str) -> None:
    more = [nn.Parameter(torch.zeros(()))]

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([*params, *(more.pop() for _ in more[:])], lr=0.1)

    with pytest.raises(ValueError, match="SGD over 1 tensors that it was not given"):
        trained(model(), plan, optimizer=optimizer)


@pytest.mark.parametrize("plan", PLANS)
def test_parameters_that_an_optimizer_leaves_out_are_named_once(
    plan: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "avgpipe"):
        trained(model(), plan, optimizer=lambda params: torch.optim.SGD(list(params)[:1], lr=0.1))
    named = [record.getMessage() for record in caplog.records if "leaves out" in record.getMessage()]
    assert [text.split(",")[0] for text in named] == [
        "optimizer leaves out '0.bias'",
        "optimizer leaves out '2.bias'",
    ]


def test_a_loss_with_parameters_is_refused_and_frozen_ones_are_not() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return LOSS(output, target) * self.scale

    with pytest.raises(ValueError, match="loss_fn has parameters that require gradients, such as 'scale'"):
        trained(model(), "one", Scaled())
    assert trained(model(), "one", Scaled().requires_grad_(False)) == trained(model(), "one")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": torch.optim.SGD(OUTER.parameters(), lr=0.1)},
            "optimizer must be a function, such as .*each stage",
        ),
        ({"optimizer": "sgd"}, "optimizer must be a function, such as .*, not 'sgd'"),
        ({"loss_fn": "ce"}, "loss_fn must be a function, such as .*, not 'ce'"),
        ({"loss_fn": None}, "loss_fn must be a function, such as .*, not a NoneType"),
        ({"lr_scheduler": 3}, "lr_scheduler must be a function, such as .*, not 3"),
        ({"loss_weight": [1.0]}, "loss_weight must be a function, such as .*, not a list"),
    ],
)
def test_what_should_be_a_function_is_refused_with_an_example(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Pipeline(model(), PLANS["one"], **grouped(**{"loss_fn": LOSS, "optimizer": momentum, **options}))


@pytest.mark.parametrize("batch", ["global", "per-pipeline"])
@pytest.mark.parametrize("rule", ["mean-gradient", "avgpipe"])
def test_sparse_gradients_that_pipelines_would_make_dense_are_refused(rule: str, batch: str) -> None:
    embedding = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    plan = Plan(stages=2, pipelines=2, micro_batches=2, rule=rule, batch=batch)
    with pytest.raises(ValueError, match="SparseAdam takes sparse gradients alone"):
        Pipeline(
            embedding,
            plan,
            loss_fn=LOSS,
            optimizer=lambda params: [
                torch.optim.SparseAdam(params) if tuple(p.shape) == (9, 4) else torch.optim.SGD([p], lr=0.1)
                for p in params
            ],
        )
