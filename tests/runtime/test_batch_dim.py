"""``Pipeline(batch_dim=...)``: where the samples of a batch are, and what goes whole to every micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan, Source
from tests.isolated import Isolated
from tests.runner import run
from tests.runtime.cases import momentum, unequal

SAMPLES, LENGTH, WIDTH = 10, 5, 6


class Recurrent(nn.Module):
    """Of [length, batch, width], as torch's recurrent layers are by default."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


class LastStep(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[-1]


class Shifted(nn.Module):
    """Adds a table of positions that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.layer(given["x"] + given["table"]).tanh()


def per_step(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def recurrent() -> tuple[list[nn.Module], Callable[[int], Any], Any]:
    layers = [Recurrent(), nn.Tanh(), Recurrent()]
    return layers, lambda n: (torch.rand(LENGTH, n, WIDTH), torch.rand(LENGTH, n, WIDTH)), 1


def of_the_last_step() -> tuple[list[nn.Module], Callable[[int], Any], Any]:
    layers = [Recurrent(), Recurrent(), LastStep()]
    return layers, lambda n: (torch.rand(LENGTH, n, WIDTH), torch.rand(n, WIDTH)), (1, 0)


def with_a_table() -> tuple[list[nn.Module], Callable[[int], Any], Any]:
    layers = [Shifted(), nn.Linear(WIDTH, WIDTH)]
    table = torch.rand(SAMPLES, WIDTH).sum(0, keepdim=True).repeat(LENGTH, 1)

    def batch(n: int) -> Any:
        return {"x": torch.rand(n, LENGTH, WIDTH), "table": table}, torch.rand(n, LENGTH, WIDTH)

    return layers, batch, ({"x": 0, "table": None}, 0)


CASES = [recurrent, of_the_last_step, with_a_table]


def made(case: Callable[[], Any]) -> tuple[list[nn.Module], list[Any], Any]:
    torch.manual_seed(3)
    layers, batch, dims = case()
    return [layer.double() for layer in layers], [_double(batch(n)) for n in (SAMPLES, SAMPLES, 7)], dims


def _double(value: Any) -> Any:
    return torch.utils._pytree.tree_map(torch.Tensor.double, value)


def plainly(case: Callable[[], Any]) -> tuple[list[float], torch.Tensor]:
    layers, batches, _ = made(case)
    model, losses = nn.Sequential(*layers), []
    optimizer = momentum(model.parameters())
    for x, y in batches:
        loss = per_step(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, model(batches[2][0]).detach()


def pipelined(
    case: Callable[[], Any], steps: bool = False, **options: Any
) -> tuple[list[float], torch.Tensor]:
    layers, batches, dims = made(case)
    plan = Plan(**{"stages": 2, "micro_batches": 4, **options})
    with Pipeline(
        layers, plan, loss_fn=per_step, optimizer=momentum, extensions=[Source(batch_dim=dims)], timeout_s=60
    ) as pipeline:
        if steps:
            losses = [pipeline.step(x, y) for x, y in batches]
        else:
            losses = [result.loss for result in pipeline.train(batches)]
        found = pipeline.evaluate(batches)
        assert found.samples == 2 * SAMPLES + 7
        return losses, pipeline.predict(batches[2][0])


def isolated(case: Callable[[], Any]) -> tuple[list[float], torch.Tensor]:
    return pipelined(case, stages=1, pipelines=2, isolate=True, staleness=0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "options", [{}, {"pipelines": 2, "staleness": 0}, {"recompute": "always"}, {"steps": True}], ids=str
)
def test_it_equals_one_device(case: Callable[[], Any], options: dict[str, Any]) -> None:
    expected, output = plainly(case)
    losses, found = pipelined(case, **options)
    assert unequal(losses, expected) < 1e-12
    assert found.shape == output.shape
    assert torch.allclose(found, output, rtol=0, atol=1e-12)


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_on_ranks_it_equals_one_device(case: Callable[[], Any]) -> None:
    expected, output = plainly(case)
    for losses, found in run(2, pipelined, case=case):
        assert unequal(losses, expected) < 1e-12
        assert torch.allclose(found, output, rtol=0, atol=1e-12)


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_isolated_pipelines_equal_one_device(case: Callable[[], Any]) -> None:
    expected, output = plainly(case)
    for losses, found in Isolated(2, 1, isolated, case=case).results.values():
        assert unequal(losses, expected) < 1e-12
        assert torch.allclose(found, output, rtol=0, atol=1e-12)


def test_a_dimension_that_was_not_said_is_refused_with_the_way_out() -> None:
    layers, batches, _ = made(with_a_table)
    plan = Plan(stages=2, micro_batches=4)
    with (
        Pipeline(layers, plan, loss_fn=per_step, optimizer=momentum) as pipeline,
        pytest.raises(ValueError, match=r"found sizes \[5, 10\].*Source\(batch_dim=...\)"),
    ):
        list(pipeline.train(batches))


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ("1", "must be a number, or a tuple"),
        (True, "must be a number, or a tuple"),
        ((0,), "must be a number, or a tuple"),
        ((-1, 0), "batch_dim has -1: give the number of a dimension from 0 on"),
        ((0, {"y": "0"}), "batch_dim has '0'"),
        ((0, 0, None), "batch_dim has None"),
    ],
    ids=str,
)
def test_what_says_no_dimension_is_refused(asked: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        Pipeline(
            [nn.Linear(2, 2)],
            Plan(),
            loss_fn=per_step,
            optimizer=momentum,
            extensions=[Source(batch_dim=asked)],
        )


@pytest.mark.parametrize(
    ("dims", "match"),
    [
        (
            ({"x": 0, "mask": None}, 0),
            "has another structure than the batch: a batch has {'x': .10, 5, 6., 'table': .5, 6.}",
        ),
        (3, "samples are along dimension 3, but a tensor of the batch is .10, 5, 6."),
        (({"x": 1, "table": None}, 0), "the inputs have 5 samples and the targets 10"),
    ],
    ids=str,
)
def test_a_batch_that_is_not_as_said_is_refused(dims: Any, match: str) -> None:
    layers, batches, _ = made(with_a_table)
    plan = Plan(stages=2, micro_batches=4)
    with (
        Pipeline(
            layers, plan, loss_fn=per_step, optimizer=momentum, extensions=[Source(batch_dim=dims)]
        ) as pipeline,
        pytest.raises(ValueError, match=match),
    ):
        list(pipeline.train(batches))


class Also(nn.Module):
    """Returns something beside what there is for each sample."""

    def __init__(self, also: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.also = also

    def forward(self, x: torch.Tensor) -> Any:
        return x, self.also(x)


def first_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return per_step(output[0], target)


@pytest.mark.parametrize(
    ("also", "expected"),
    [
        (lambda x: torch.tensor(2.5), torch.tensor(2.5)),
        (lambda x: "name", "name"),
        (lambda x: torch.arange(3), torch.arange(3)),
        (lambda x: torch.Tensor.mean(x), None),
        (lambda x: torch.Tensor.sum(x, 0), None),
        (lambda x: x.shape[0], None),
    ],
    ids=["number", "text", "table", "mean", "sum", "size"],
)
def test_predict_returns_or_refuses_what_no_sample_has(also: Any, expected: Any) -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), Also(also)]
    x = torch.rand(10, 4)
    plan = Plan(stages=2, micro_batches=4)
    with Pipeline(layers, plan, loss_fn=first_loss, optimizer=momentum) as pipeline:
        if expected is None:
            with pytest.raises(ValueError, match="is not the same for all 4 micro-batches"):
                pipeline.predict(x)
            assert pipeline.predict(x[:1])[0].shape == (1, 4)  # a batch of one micro-batch has a value
        else:
            found = pipeline.predict(x)[1]
            assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected
