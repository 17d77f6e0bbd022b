"""The training loop by itself: the places of validations, and where a run ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from avgpipe import Course, Pipeline, Plan, Task
from avgpipe.report.course import Totals
from avgpipe.report.loop import TrainingLoop
from avgpipe.tasks import BuildOptions
from avgpipe.tasks.task import workload_of


class KeptResults:
    """Keeps the rows of a run, as in its metrics.jsonl."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def batch(self, row: Mapping[str, Any], samples: int, seconds: float) -> None:
        self.rows.append({"kind": "train", **row})

    def validating(self, batches: Iterable[Any], most: int | None) -> Iterator[Any]:
        return islice(batches, most)

    def validation(self, row: Mapping[str, Any]) -> None:
        self.rows.append({"kind": "valid", **row})


def places(results: KeptResults, kind: str) -> list[int]:
    return [row["batch"] for row in results.rows if row["kind"] == kind]


def batches(epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    xs = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(epoch))
    return [(x, x.sum(1, keepdim=True)) for x in xs]


def trained(course: Course, **changes: Any) -> tuple[KeptResults, Totals, dict[str, Any]]:
    """Train on five batches an epoch; return results, totals and the summary."""
    given: dict[str, Any] = {"model": nn.Linear(3, 1), "loader": batches, "loss_fn": nn.MSELoss()}
    given["optimizer"] = lambda params: torch.optim.SGD(params, lr=0.1)
    task = Task(**{**given, "held_out": batches(9), **changes})
    workload = workload_of(task, "sums", BuildOptions(epochs=course.epochs, max_batches=course.max_batches))
    results, done = KeptResults(), Totals(workload.lower_is_better, course.target)
    plan = Plan(stages=1)
    with Pipeline(workload.layers, plan, loss_fn=workload.loss_fn, optimizer=workload.optimizer) as pipeline:
        loop = TrainingLoop(pipeline, workload, course, results, done, ["slow"])
        assert loop.train()
        found = loop.rows.summary(pipeline, done, seed=7)
    assert found is not None
    return results, done, found[0]


def test_validations_are_at_equal_places_of_the_run_and_at_its_end() -> None:
    results, done, summary = trained(Course(epochs=2, validations=4))
    assert places(results, "train") == list(range(10))
    assert places(results, "valid") == [0, 3, 5, 8, 10]
    assert (summary["batches"], summary["samples"], summary["epochs"], summary["seed"]) == (10, 40, 2.0, 7)
    assert summary["metric"] == done.loss == results.rows[-1]["loss"]
    assert results.rows[0]["warnings"] == summary["warnings"] == ["slow"]


def test_a_run_ends_after_its_most_batches_or_at_its_target() -> None:
    results, _, summary = trained(Course(epochs=2, max_batches=7, validations=1))
    assert places(results, "valid") == [0, 7]
    assert summary["epochs"] == 1.4
    results, done, summary = trained(Course(epochs=2, validations=10, target="loss=1e9"))
    assert places(results, "valid") == [0, 1]
    assert (summary["samples_to_target"], done.batches) == (4, 1)


def test_without_held_out_data_there_are_batches_only() -> None:
    results, _, summary = trained(Course(epochs=1), held_out=None)
    assert (places(results, "train"), places(results, "valid")) == ([0, 1, 2, 3, 4], [])
    assert results.rows[0]["total_batches"] == 5
    assert summary["batches"] == 5
