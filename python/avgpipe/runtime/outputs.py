"""What the last stage makes of its outputs in a forward-only pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from avgpipe.runtime.batch import concatenate
from avgpipe.runtime.loss import Loss


class Prediction:
    """Collects the last stage's outputs."""

    def __init__(self) -> None:
        self._outputs: list[Any] = []

    def add(self, output: Any, target: Any, samples: int) -> None:
        self._outputs.append(output)

    def result(self) -> Any:
        return concatenate(self._outputs)


class Evaluation:
    """Sums loss and metrics over a batch.

    The result is one float64 tensor (loss, weight of the loss, samples, metrics...) and the names of the metrics: None
    without any, "" for one without a name.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Loss],
        weight: Callable[[Any, int], float],
        metric: Callable[[Any, Any], Any] | None,
    ) -> None:
        self._loss, self._weight, self._metric = loss, weight, metric
        self._sums = torch.zeros(3, dtype=torch.float64)
        self._means: dict[str, float] = {}

    def add(self, output: Any, target: Any, samples: int) -> None:
        weight = self._weight(target, samples)
        loss = 0.0
        if weight:
            value, count = self._loss(output, target)
            weight, loss = (weight, float(value) * weight) if count is None else (float(count), float(value))
        self._sums += torch.tensor([loss, weight, samples], dtype=torch.float64)
        if self._metric is not None:
            metric = self._metric(output, target)
            for name, value in (metric if isinstance(metric, dict) else {"": metric}).items():
                self._means[name] = self._means.get(name, 0.0) + float(value) * samples

    def result(self) -> tuple[torch.Tensor, list[str]]:
        means = torch.tensor(list(self._means.values()), dtype=torch.float64)
        return torch.cat([self._sums, means]), list(self._means)
