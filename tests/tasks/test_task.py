"""What a script's function returns, and what the commands make of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Task
from avgpipe.tasks import BuildOptions, Workload
from avgpipe.tasks.task import workload_of


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def task(**changed: Any) -> Task:
    batches = [(torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)) for _ in range(3)]
    four = {"model": nn.Linear(4, 2), "loader": batches, "loss_fn": nn.CrossEntropyLoss(), "optimizer": sgd}
    return Task(**{**four, **changed})


def built(options: dict[str, Any] | None = None, **changed: Any) -> Workload:
    return workload_of(task(**changed), "own", BuildOptions(**(options or {})))


def test_four_things_are_enough():
    workload = built()
    assert (workload.name, workload.label, workload.batch_size, workload.epochs) == ("own", "own", 6, 1)
    assert (workload.metric_name, workload.lower_is_better) == ("loss", True)
    assert workload.metrics(0.5, {}) == {"loss": 0.5}
    assert workload.valid_batches is None
    assert len(workload.train_batches(0)) == 3
    assert len(workload.train_batches(0, 1)) == 2


def test_options_of_the_command_come_first():
    assert built({"epochs": 3}, epochs=2).epochs == 3
    assert built(epochs=2).epochs == 2
    assert built(batch_size=9).batch_size == 9


def test_a_list_of_layers_stays_one_and_autocast_is_for_every_device():
    workload = built(model=(nn.Linear(4, 4), nn.Linear(4, 2)), autocast=torch.bfloat16)
    assert [type(layer) for layer in workload.layers] == [nn.Linear] * 2
    assert workload.autocast["cpu"] == workload.autocast["cuda"] == torch.bfloat16


def test_a_number_is_the_metric_that_was_named():
    workload = built(metric_fn=lambda output, target: 0.25, metric_name="accuracy")
    assert workload.metric_fn is not None
    assert workload.metric_fn(None, None) == {"accuracy": 0.25}
    assert workload.metrics(1.5, {"accuracy": 0.25}) == {"loss": 1.5, "accuracy": 0.25}
    assert not workload.lower_is_better
    assert built(metric_name="error", lower_is_better=True).lower_is_better


def test_runs_are_judged_by_the_loss_unless_a_metric_is_named():
    workload = built(metric_fn=lambda output, target: 0.25)
    assert workload.metric_fn is not None
    assert workload.metric_fn(None, None) == {"metric": 0.25}
    assert (workload.metric_name, workload.lower_is_better) == ("loss", True)


def test_a_metric_that_is_not_there_is_refused():
    workload = built(metric_fn=lambda output, target: {"f1": 0.5, "recall": 0.1}, metric_name="accuracy")
    with pytest.raises(ValueError, match=r"metric_name='accuracy': metric_fn returned f1, recall: name one"):
        workload.metrics(1.0, {"f1": 0.5, "recall": 0.1})


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"model": "resnet"}, TypeError, "model='resnet': must be a torch.nn.Module, or a list of them"),
        ({"loader": iter([])}, TypeError, "loader can be iterated only once: give a DataLoader, a list"),
        ({"loader": 3}, TypeError, "loader=3: must be an iterable of batches, such as a DataLoader"),
        ({"held_out": len}, TypeError, "held_out=<built-in function len>: must be an iterable of batches"),
        ({"loss_fn": None}, TypeError, "loss_fn=None: must be a function"),
        ({"optimizer": 0.1}, TypeError, "optimizer=0.1: must be a function"),
        ({"metric_fn": "accuracy"}, TypeError, "metric_fn='accuracy': must be a function"),
        ({"epochs": 0}, ValueError, "epochs=0: must be an int of at least 1"),
        ({"batch_size": 0}, ValueError, "batch_size=0: must be an int of at least 1"),
    ],
)
def test_what_cannot_be_is_refused_in_words(changed, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        task(**changed)
