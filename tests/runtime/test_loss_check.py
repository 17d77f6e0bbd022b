"""What a loss function is taken for is looked at, and what it cannot do in a pipeline is refused in words."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from avgpipe import Audit, Pipeline, Plan, StageError
from tests.runtime.cases import (
    assert_trains_as_one_device,
    language_model,
    momentum,
    token_batches,
    train_pipeline,
)

IGNORED = -100
NO_MEAN = "loss_fn is no mean over the samples"
NO_COUNT = "and the second is no count"
KEEPS = "loss_fn gives another value for the same outputs, targets and random numbers"

Warned = list[str]


def batches(count: int = 3, samples: int = 8) -> list[Any]:
    return token_batches(count, samples)


def hiding(data: list[Any], *numbers: int) -> list[Any]:
    """The same batches, of which some have targets that are ignored, among them a whole micro-batch of one."""
    return [
        (x, y.index_fill(0, torch.tensor([0, 3]), IGNORED) if n in numbers else y)
        for n, (x, y) in enumerate(data)
    ]


def warned_of(
    loss_fn: Any, caplog: pytest.LogCaptureFixture, data: list[Any] | None = None, M: int = 2, **options: Any
) -> Warned:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "avgpipe"):
        plan = Plan(stages=2, micro_batches=M)
        train_pipeline(language_model(), plan, data or batches(), loss_fn, momentum, **options)
    return [record.getMessage() for record in caplog.records]


def mean(output: Any, target: Any) -> torch.Tensor:
    return functional.cross_entropy(output, target, ignore_index=IGNORED)


# ---- a sum and a count -----------------------------------------------------------------------------------------------


def with_accuracy(output: Any, target: Any) -> Any:
    return mean(output, target), (output.topk(8).indices == target[:, None]).any(1).double().mean()


def summed(output: Any, target: Any) -> Any:
    total = functional.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()


def limited(output: Any, target: Any) -> Any:
    total, count = summed(output, target)
    return total, count.clamp(min=1)


@pytest.mark.parametrize("M", [1, 2, 8])
@pytest.mark.host
def test_a_metric_that_is_taken_for_a_count_is_warned_of(M: int, caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warned_of(with_accuracy, caplog, M=M)
    assert NO_COUNT in text
    assert 'return (loss, {"name": metric})' in text


@pytest.mark.parametrize("M", [1, 2, 8])
@pytest.mark.parametrize("loss_fn", [summed, limited])
def test_a_count_is_not(loss_fn: Any, M: int, caplog: pytest.LogCaptureFixture) -> None:
    assert warned_of(loss_fn, caplog, hiding(batches(), 0, 2), M) == []


@pytest.mark.parametrize("M", [1, 2])
def test_a_metric_in_a_dict_is_not(M: int, caplog: pytest.LogCaptureFixture) -> None:
    def named(output: Any, target: Any) -> Any:
        loss, accuracy = with_accuracy(output, target)
        return loss, {"accuracy": accuracy}

    assert warned_of(named, caplog, M=M) == []


def test_a_weighted_count_is_not(caplog: pytest.LogCaptureFixture) -> None:
    weights = torch.linspace(0.2, 2.0, 11, dtype=torch.float64)

    def weighted(output: Any, target: Any) -> Any:
        return functional.cross_entropy(output, target, weights, reduction="sum"), weights[target].sum()

    assert warned_of(weighted, caplog, M=1) == []


# ---- what a loss keeps, and draws ------------------------------------------------------------------------------------


def counting() -> Any:
    calls = [0]

    def loss_fn(output: Any, target: Any) -> torch.Tensor:
        calls[0] += torch.is_grad_enabled()
        return mean(output, target) + calls[0] / 10 * output.square().mean()

    return loss_fn


class Normalised(nn.Module):
    """Divides by a moving mean, and counts how often it has moved; in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))
        self.register_buffer("moved", torch.zeros((), dtype=torch.int64))

    def forward(self, output: Any, target: Any) -> torch.Tensor:
        loss = mean(output, target)
        if self.training and torch.is_grad_enabled():
            self.mean.lerp_(loss.detach(), 0.3)
            self.moved += 1
        return loss / self.mean


@pytest.mark.host
def test_a_loss_that_keeps_something_of_its_calls_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for loss_fn in (counting(), Normalised()):
        (text,) = warned_of(loss_fn, caplog)
        assert KEEPS in text


def test_the_buffers_of_a_loss_are_moved_by_training_alone(caplog: pytest.LogCaptureFixture) -> None:
    loss_fn, plain = Normalised(), Normalised()
    warned_of(loss_fn, caplog, batches(3))
    assert int(loss_fn.moved) == 3 * 2
    with Pipeline(
        language_model(), Plan(micro_batches=2), loss_fn=plain, optimizer=momentum, extensions=[Audit("off")]
    ) as p:
        list(p.train(batches(3)))
    torch.testing.assert_close(loss_fn.mean, plain.mean, rtol=1e-10, atol=1e-10)


def smeared(output: Any, target: Any) -> torch.Tensor:
    return mean(output + torch.randn_like(output), target)


def sampled(output: Any, target: Any) -> torch.Tensor:
    return mean(functional.dropout(output, 0.5), target)


@pytest.mark.parametrize("loss_fn", [smeared, sampled])
def test_a_loss_that_draws_by_torch_is_not(loss_fn: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert warned_of(loss_fn, caplog) == []


def test_what_the_body_of_the_loop_changes_is_not(caplog: pytest.LogCaptureFixture) -> None:
    weight = [0.0]

    def loss_fn(output: Any, target: Any) -> torch.Tensor:
        return mean(output, target) + weight[0] * output.square().mean()

    with Pipeline(
        language_model(), Plan(stages=2, micro_batches=2), loss_fn=loss_fn, optimizer=momentum
    ) as p:
        for _ in p.train(batches()):
            weight[0] += 0.1
    assert not caplog.records


# ---- what it does beside ---------------------------------------------------------------------------------------------


def refused(loss_fn: Any, match: str, model: nn.Module | None = None, **plan: Any) -> None:
    plan = {"stages": 2, "micro_batches": 2, **plan}
    with pytest.raises(StageError, match=match):
        train_pipeline(model or language_model(), Plan(**plan), batches(1), loss_fn, momentum)


@pytest.mark.parametrize("plan", [{}, {"stages": 1}, {"micro_batches": 1}, {"pipelines": 2}], ids=str)
def test_a_loss_that_calls_backward_is_refused(plan: dict[str, Any]) -> None:
    def loss_fn(output: Any, target: Any) -> torch.Tensor:
        loss = mean(output, target)
        loss.backward(retain_graph=True)
        return loss

    refused(loss_fn, r"loss_fn has called backward\(\) itself", **plan)


@pytest.mark.parametrize("plan", [{}, {"stages": 1}, {"micro_batches": 1}, {"pipelines": 2}], ids=str)
def test_a_loss_over_the_callers_model_is_refused(plan: dict[str, Any]) -> None:
    model = language_model()

    def decaying(output: Any, target: Any) -> torch.Tensor:
        return mean(output, target) + sum(p.square().sum() for p in model.parameters())

    def consistent(output: Any, target: Any) -> torch.Tensor:
        return mean(output, target) + (model(torch.arange(5)) - 1).square().mean()

    for loss_fn in (decaying, consistent):
        refused(loss_fn, r"loss_fn uses '\d.\w+' of the model that was given, of which", model, **plan)


def test_a_loss_of_another_model_or_of_values_alone_trains(caplog: pytest.LogCaptureFixture) -> None:
    teacher, model = language_model(), language_model()

    def distilled(output: Any, target: Any) -> torch.Tensor:
        return mean(output, target) + output.mean() * teacher(torch.arange(4)).square().mean()

    def reporting(output: Any, target: Any) -> torch.Tensor:
        with torch.no_grad():
            scale = model[1].weight.norm()
        return mean(output, target) / scale

    for loss_fn in (distilled, reporting):
        assert warned_of(loss_fn, caplog) == []


class KeepsAnActivation:
    """Adds a penalty on what a hook has kept of the forward before."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        self.kept.append(output)
        return mean(output, target) + sum(t.square().mean() for t in self.kept)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_loss_that_uses_an_output_of_an_earlier_micro_batch_is_refused(stages: int) -> None:
    refused(
        KeepsAnActivation(),
        "reaches a graph whose backward has run: .*detach",
        stages=stages,
        micro_batches=3,
    )


def test_a_layer_that_uses_an_activation_of_an_earlier_micro_batch_is_refused() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.last = nn.Linear(8, 8), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.lin(x)
            y, self.last = (y if self.last is None else y + self.last.mean()), y
            return y

    model = nn.Sequential(nn.Embedding(11, 8), Remembers(), nn.Linear(8, 11)).double()
    with (
        Pipeline(
            model,
            Plan(stages=2, micro_batches=2),
            loss_fn=mean,
            optimizer=momentum,
            extensions=[Audit("off")],
        ) as pipeline,
        pytest.raises(StageError, match="uses a tensor of an earlier forward"),
    ):
        list(pipeline.train(batches()))


# ---- means -----------------------------------------------------------------------------------------------------------


@pytest.mark.host
def test_padding_that_comes_late_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert warned_of(mean, caplog, batches(6)) == []
    assert warned_of(mean, caplog, hiding(batches(4), 9)) == []
    (text,) = warned_of(mean, caplog, hiding(batches(6), 4, 5))
    assert NO_MEAN in text


def contrasting(output: Any, target: Any) -> torch.Tensor:
    output = 1000 * output
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)))


def compared_elsewhere(output: Any, target: Any) -> torch.Tensor:
    """As :func:`contrasting`, of each sample by itself."""
    output = 1000 * output
    return functional.cross_entropy(output, output.argmin(1))


@pytest.mark.host
def test_a_contrastive_loss_of_large_outputs_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warned_of(contrasting, caplog)
    assert NO_MEAN in text
    assert "micro_batches=1" in text
    assert warned_of(contrasting, caplog, M=1) == []
    assert warned_of(compared_elsewhere, caplog) == []


@pytest.mark.parametrize("plan", [{}, {"micro_batches": 1}, {"pipelines": 2, "staleness": 0}], ids=str)
def test_a_loss_that_writes_to_its_targets_trains_as_on_one_device(plan: dict[str, Any]) -> None:
    def loss_fn(output: Any, target: Any) -> torch.Tensor:
        return functional.cross_entropy(output, target.sub_(1).clamp_(min=0))

    plan = {"stages": 2, "micro_batches": 4, **plan}
    model, data = language_model(), Fresh()
    assert_trains_as_one_device(model, Plan(**plan), data, loss_fn, momentum)


class Fresh(list[Any]):
    """The same batches in each epoch, whatever becomes of them."""

    def __iter__(self) -> Any:
        return iter(batches(3))


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_names_the_micro_batch_shapes_and_the_reason() -> None:
    def two_wide(output: Any, target: Any) -> torch.Tensor:
        return mean(output.view(2, -1), target)

    def second(output: Any, target: Any) -> torch.Tensor:
        if not bool((target == batches(1)[0][1][:4]).all()):
            raise IndexError("only the first half")
        return mean(output, target)

    def unpacking(output: Any, target: Any) -> torch.Tensor:
        return mean(output.logits, target)

    shapes = r"with outputs \[4, 11\] float64 and targets \[4\] int64: "
    refused(two_wide, rf"loss_fn failed on micro-batch 0 of batch 0, {shapes}Expected input batch_size \(2\)")
    refused(second, rf"loss_fn failed on micro-batch 1 of batch 0, {shapes}only the first half")
    refused(unpacking, rf"micro-batch 0 of batch 0, {shapes}'Tensor' object has no attribute 'logits'")
