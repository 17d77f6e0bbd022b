"""Evaluation: losses and metrics are summed over micro-batches, and outputs put together again."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from avgpipe import Pipeline, Plan
from avgpipe.model import batch
from avgpipe.model.batch import LossWeights, loss_weights
from avgpipe.runtime import evaluate
from avgpipe.runtime.evaluate import MetricSums, result_of
from avgpipe.runtime.options import TrainingOptions
from avgpipe.runtime.outputs import OutputCollector
from tests.runtime.cases import momentum

OUTPUT, TARGET = torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [0.0]])


def sums(loss_fn: Any, metric_fn: Any = None, loss_weight: Any = None) -> MetricSums:
    return MetricSums(TrainingOptions(loss_fn, momentum, loss_weight=loss_weight), metric_fn)


def test_a_mean_is_weighed_by_its_samples() -> None:
    found = sums(nn.MSELoss())
    found.add(OUTPUT, TARGET, 2, TARGET)
    found.add(OUTPUT[1:], TARGET[1:], 1, TARGET[1:])
    total, names, _ = found.result()
    assert total.tolist() == [19.0, 3.0, 3.0]
    assert names == []


def test_a_sum_and_its_count_are_added_up() -> None:
    found = sums(lambda o, t: (o.sum(), 7))
    found.add(OUTPUT, TARGET, 2, TARGET)
    assert found.result()[0].tolist() == [4.0, 7.0, 2.0]


def test_what_counts_for_nothing_is_not_asked_for_its_loss() -> None:
    found = sums(lambda o, t: torch.tensor(math.nan), loss_weight=lambda t: 0)
    found.add(OUTPUT, TARGET, 2, TARGET)
    assert found.result()[0].tolist() == [0.0, 0.0, 2.0]
    of_nothing = result_of([found.result()], sums_loss=False, has_metric=False)
    assert math.isnan(of_nothing.loss)
    assert of_nothing.samples == 2


def test_metrics_are_summed_by_name_times_samples() -> None:
    found = sums(nn.MSELoss(), lambda o, t: {"mean": o.mean(), "largest": o.max()})
    found.add(OUTPUT, TARGET, 2, TARGET)
    found.add(OUTPUT[:1], TARGET[:1], 1, TARGET[:1])
    total, names, _ = found.result()
    assert names == ["mean", "largest"]
    assert total[3:].tolist() == [5.0, 7.0]


class Waits(TorchDispatchMode):
    """Raises where a device would be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"), func
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_before_the_end() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))
    for loss_fn, metric in ((loss, lambda o, t: (o.argmax(1) == t).float().mean()), (None, None)):
        found = sums(loss_fn or (lambda o, t: (o.sum(), t.sum())), metric)
        output, target = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
        weights = LossWeights([1.0], loss_weights(found._options.loss_fn, [target], [4], None).total)
        with mock.patch.object(evaluate, "loss_weights", return_value=weights), Waits():
            for _ in range(2):
                found.add(output, target, 4, target)  # the weights of losses are counted on the host
            total, *_ = found.result()
        assert total[2] == 8


def test_class_weights_are_copied_to_the_targets_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, target = torch.ones(3, device="meta"), torch.zeros(2)
    copied = []

    def to(self: torch.Tensor, device: torch.device) -> torch.Tensor:
        copied.append(device)
        return torch.zeros(3)

    monkeypatch.setattr(torch.Tensor, "to", to)
    first = batch._beside(weight, target)
    assert batch._beside(weight, target) is first
    torch.autograd.graph.increment_version(weight)
    batch._beside(weight, target)
    assert len(copied) == 2
    assert batch._beside(target, target) is target


def test_outputs_are_joined_in_order() -> None:
    collector = OutputCollector(0)
    for part in OUTPUT.split(1):
        collector.add({"logits": part, "count": 2}, None, 1, None)
    found, refusal = collector.result()
    assert refusal is None
    assert torch.equal(found["logits"], OUTPUT)
    assert found["count"] == 2


def test_many_batches_of_any_size_keep_their_order() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
    x = [torch.randn(n, 2, dtype=torch.float64) for n in (5, 1, 3, 2, 7, 1, 1, 4)]
    with Pipeline(model, Plan(stages=2, micro_batches=3), loss_fn=nn.MSELoss(), optimizer=momentum) as p:
        found = p.evaluate([(each, each[:, :1]) for each in x], lambda o, t: float(len(o)))
        assert all(torch.allclose(p.predict(each), model(each)) for each in x)
    whole = torch.cat(x)
    expected = nn.MSELoss()(model(whole), whole[:, :1]).item()
    assert found.samples == 24
    assert abs(found.loss - expected) < 1e-12
