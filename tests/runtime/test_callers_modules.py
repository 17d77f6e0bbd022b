"""Modules that the caller has put into evaluation mode stay there: in the model and the loss, however it is cut."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from avgpipe import Pipeline, Plan
from tests.runtime.cases import assert_same_training, momentum, train_on_one_device

PLANS = {
    "one": Plan(stages=2, micro_batches=2),
    "two": Plan(stages=2, pipelines=2, micro_batches=2, staleness=0),
    "recomputed": Plan(stages=2, micro_batches=2, recompute="always"),
    "versions": Plan.for_system("pipedream", stages=2, micro_batches=2),
}


class Block(nn.Module):
    """Asks for the mode itself, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(F.dropout(self.lin(x), 0.9, training=self.training))
        return x * 2 if self.training else x + 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(4, 4), Block(), nn.Linear(4, 3)
        self.drop = nn.Dropout(0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.tanh(self.frozen(torch.tanh(self.first(x))))))


class Distilled(nn.Module):
    """A loss with a teacher."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.teacher = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.9)).eval().requires_grad_(False)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scale = 1.0 if self.training else 3.0
        return F.mse_loss(output, self.teacher(target)) * scale


def frozen(kind: str) -> Any:
    torch.manual_seed(1)
    model = Model().double()
    for module in (model.frozen, model.drop):
        module.eval()
    nn.init.normal_(model.frozen.norm.running_mean)
    if kind == "module":
        return model
    return nn.Sequential(model.first, nn.Tanh(), model.frozen, nn.Tanh(), model.drop, model.last)


def batches(count: int = 4) -> list[Any]:
    draw = torch.Generator().manual_seed(2)
    return [
        tuple(torch.randn(8, n, dtype=torch.float64, generator=draw) for n in (4, 3)) for _ in range(count)
    ]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["module", "example", "sequential"])
def test_what_is_in_evaluation_mode_stays_there(kind: str, plan: str) -> None:
    model, data, loss_fn = frozen("module" if kind == "example" else kind), batches(), Distilled().double()
    given = {"example_inputs": data[0][0]} if kind == "example" else {}
    flags = [m.training for m in model.modules()]
    with Pipeline(model, PLANS[plan], loss_fn=loss_fn, optimizer=momentum, **given) as pipeline:
        losses = [result.loss for result in pipeline.train(data[:2])]
        pipeline.evaluate(data)
        losses += [result.loss for result in pipeline.train(data[2:])]
        state = pipeline.state_dict()
    if plan != "versions":
        assert_same_training(
            (losses, state), train_on_one_device(model, data, Distilled().double(), momentum)
        )
    name = next(name for name in state if name.endswith("running_mean"))
    assert torch.equal(state[name], model.state_dict()[name])
    assert [m.training for m in model.modules()] == flags
    assert not loss_fn.teacher.training


def test_evaluation_has_the_loss_in_its_mode() -> None:
    data, loss_fn = batches(1), Distilled().double()
    with Pipeline(frozen("module"), PLANS["one"], loss_fn=loss_fn, optimizer=momentum) as pipeline:
        output = pipeline.predict(data[0][0])
        assert pipeline.evaluate(data).loss == pytest.approx(
            3 * F.mse_loss(output, loss_fn.teacher(data[0][1])).item()
        )


def test_evaluation_leaves_the_loss_as_it_was_given_for_the_next_training() -> None:
    data, loss_fn = batches(), Distilled().double()
    found = []
    for _ in range(2):
        with Pipeline(frozen("module"), PLANS["one"], loss_fn=loss_fn, optimizer=momentum) as pipeline:
            found.append([result.loss for result in pipeline.train(data)])
            pipeline.evaluate(data)
        assert [loss_fn.training, loss_fn.teacher.training] == [True, False]
    assert found[0] == found[1]


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_model_in_evaluation_mode_as_a_whole_is_trained_and_says_so(
    is_whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    if is_whole:
        model.eval()
    loss_fn = nn.MSELoss()
    with (
        caplog.at_level(logging.WARNING, "avgpipe"),
        Pipeline(model, PLANS["one"], loss_fn=loss_fn, optimizer=momentum) as pipeline,
    ):
        list(pipeline.train(batches(2)))
        assert pipeline.state_dict()["1.num_batches_tracked"] == 2
    assert ("evaluation mode as a whole" in caplog.text) is is_whole
    assert model.training is not is_whole
