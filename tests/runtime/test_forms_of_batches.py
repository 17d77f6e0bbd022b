"""Batches that are not tensors of samples alone: lists of values, masks, edges, lists of inputs."""

from __future__ import annotations

import copy
import logging
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from avgpipe import Pipeline, Plan
from tests.runtime.cases import assert_trains_as_one_device, momentum, train_pipeline

LOSS = nn.MSELoss()
ONE = Plan(stages=2, micro_batches=1)
PLANS = {
    "whole": ONE,
    "two micro-batches": Plan(stages=2, micro_batches=2),
    "three": Plan(stages=2, micro_batches=3, schedule="zero-bubble-h1"),
    "two pipelines": Plan(stages=2, pipelines=2, micro_batches=4, staleness=0),
}


class Weighed(nn.Module):
    """Has a word, and a number, for each sample, and some that are the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        hidden, scale = self.a(batch["x"]), batch["shape"][0] / batch["shape"][1]
        assert len(batch["names"]) == len(batch["lengths"]) == len(hidden)
        rows = [
            row * (2.0 if name.startswith("a") else 0.5) * length
            for row, name, length in zip(hidden, batch["names"], batch["lengths"])
        ]
        return self.b(torch.tanh(torch.stack(rows)) * scale)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def worded(samples: int, names: Any = list) -> Any:
    words = names("ab"[n % 2] * 3 for n in range(samples))
    given = {
        "x": randn(samples, 4),
        "names": words,
        "lengths": [1.0 + n for n in range(samples)],
        "shape": (3, 4),
    }
    return given, randn(samples, 3)


@pytest.mark.parametrize("names", [list, tuple])
@pytest.mark.parametrize("plan", PLANS)
def test_lists_with_a_value_for_each_sample_are_cut(plan: str, names: Any) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(Weighed(), nn.Linear(3, 3)).double()
    data = [worded(n, names) for n in (8, 8, 5)]
    assert_trains_as_one_device(model, PLANS[plan], data, LOSS, momentum)
    with Pipeline(model, PLANS[plan], loss_fn=LOSS, optimizer=momentum) as pipeline:
        losses = [LOSS(model(x), y).item() * len(y) for x, y in data]
        assert pipeline.evaluate(data).loss == pytest.approx(sum(losses) / 21)
        torch.testing.assert_close(pipeline.predict(data[0][0]), model(data[0][0]))


@pytest.mark.parametrize("plan", PLANS)
def test_lists_of_targets_without_a_dimension_are_cut(plan: str) -> None:
    """As a dataset returns labels, and a collation of one's own leaves them."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def loss_fn(output: torch.Tensor, target: list[torch.Tensor]) -> torch.Tensor:
        assert len(target) == len(output)
        return nn.functional.cross_entropy(output, torch.stack(target))

    data = [(randn(n, 4), [torch.tensor(k % 3) for k in range(n)]) for n in (8, 8, 5)]
    assert_trains_as_one_device(model, PLANS[plan], data, loss_fn, momentum)
    with Pipeline(model, PLANS[plan], loss_fn=loss_fn, optimizer=momentum) as pipeline:
        losses = [loss_fn(model(x), y).item() * len(y) for x, y in data]
        assert pipeline.evaluate(data).loss == pytest.approx(sum(losses) / 21)


def test_a_tuple_of_numbers_as_long_as_the_batch_goes_whole_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(Weighed(), nn.Linear(3, 3)).double()
    data = [worded(2)]
    with caplog.at_level(logging.WARNING, "avgpipe"):
        assert_trains_as_one_device(model, PLANS["two micro-batches"], data, LOSS, momentum)
    assert "a batch of 2 samples has the tuple (3, 4), which goes whole" in caplog.text


def test_a_list_that_is_cut_in_one_batch_alone_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()

    class Given(nn.Module):
        def forward(self, batch: Any) -> torch.Tensor:
            return batch["x"] * len(batch["sizes"])

    data = [({"x": randn(n, 4), "sizes": [1, 2, 3]}, randn(n, 3)) for n in (6, 3)]
    with pytest.raises(
        ValueError, match=r"a batch of 3 samples has the list \[1, 2, 3\], which was treated differently"
    ):
        train_pipeline(nn.Sequential(Given(), *model), PLANS["two micro-batches"], data, LOSS, momentum)


Packed = namedtuple("Packed", "offsets longest")


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, given: Any) -> torch.Tensor:
        x, extra = given
        hidden = torch.tanh(self.a(x))
        if isinstance(extra, Packed):
            rows = torch.repeat_interleave(torch.arange(len(extra.offsets) - 1), extra.offsets.diff())
            hidden = (
                hidden
                + torch.zeros(len(extra.offsets) - 1, 6, dtype=x.dtype).index_add(0, rows, hidden)[rows]
            )
        elif extra.dtype == torch.long:
            hidden = hidden.index_add(0, extra[1], hidden[extra[0]])
        else:
            hidden = hidden * extra
        return self.b(hidden)


FORMS = {
    "a mask for all samples": lambda: randn(1, 6),
    "offsets": lambda: Packed(torch.tensor([0, 2, 3, 6]), 3),
    "edges": lambda: torch.randint(6, (2, 9)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_that_is_not_cut_may_have_any_form(form: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(Masked(), nn.Linear(3, 3)).double()
    data = [((randn(6, 4), FORMS[form]()), randn(6, 3)) for _ in range(3)]
    assert_trains_as_one_device(model, ONE, data, LOSS, momentum)
    with Pipeline(model, ONE, loss_fn=LOSS, optimizer=momentum) as pipeline:
        assert pipeline.step(*data[0]) == pytest.approx(LOSS(model(data[0][0]), data[0][1]).item())
        assert [result.samples for result in pipeline.train(data)] == [6, 6, 6]
        assert pipeline.evaluate(data).samples == 18
        assert pipeline.predict(data[0][0]).shape == (6, 3)
    with pytest.raises(ValueError, match="with micro_batches=1 and one pipeline"):
        train_pipeline(model, PLANS["two micro-batches"], data, LOSS, momentum)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.a(x) + self.b(y)))


@pytest.mark.parametrize("example", [False, True])
def test_two_inputs_of_the_default_collation(example: bool) -> None:
    torch.manual_seed(1)
    model = Two().double()
    rows = [((randn(4), randn(5)), randn(3)) for _ in range(20)]
    loader = DataLoader(rows, batch_size=6)  # type: ignore[arg-type]
    options = {"example_inputs": next(iter(loader))[0]} if example else {}
    with Pipeline(model, PLANS["two micro-batches"], loss_fn=LOSS, optimizer=momentum, **options) as pipeline:
        found = [result.loss for result in pipeline.train(loader)]
    twin = copy.deepcopy(model)
    optimizer = momentum(list(twin.parameters()))
    for (inputs, target), loss in zip(loader, found, strict=True):
        optimizer.zero_grad()
        value = LOSS(twin(*inputs), target)
        value.backward()
        optimizer.step()
        assert value.item() == pytest.approx(loss, rel=1e-12)
