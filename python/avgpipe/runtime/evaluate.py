"""Evaluation and prediction: forwards through all stages, without backwards.

The stages form a pipeline here too. A stage may run only a few batches ahead of the last one: before it
begins the next batch, each process waits for the result of an earlier one, which all receive anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from avgpipe.device import current_stream, on_accelerator, used_on
from avgpipe.model.batch import loss_weights, sample_count, split
from avgpipe.runtime.compute import Collector, Work
from avgpipe.runtime.loss import loss_of, wide
from avgpipe.runtime.options import TrainingOptions
from avgpipe.runtime.route import result_key
from avgpipe.runtime.weights import average_buffers
from avgpipe.runtime.worker import Worker

MetricFn = Callable[[Any, Any], Any]

_AHEAD = 4  # batches that the first stage may be ahead of the last one's results


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation.

    Attributes:
        loss: mean over the evaluated samples; for a sum loss, the sum.
        metric: mean over the samples of what ``metric_fn`` returned: one number, or each in a dict; None
            without it.
        samples: how many were evaluated.
        metrics: by name, what the loss function returned beside the loss, over all samples as the loss is.
    """

    loss: float
    metric: float | dict[str, float] | None
    samples: int
    metrics: dict[str, float] = field(default_factory=dict, hash=False)


def run_evaluation(
    worker: Worker,
    micro_batches: int,
    which: str | int,
    batches: Iterable[tuple[Any, Any]],
    collector: Callable[[], Collector],
) -> Iterator[Any]:
    """Yield the results of ``batches`` of (inputs, targets), in order, on every rank.

    Args:
        micro_batches: of each batch, if it has enough samples.
        which: the weights: "reference", "ema", or the number of a pipeline.
        collector: makes the object that turns the outputs of a batch into its result.
    """
    placement, dims = worker.placement, worker.batch_dims
    pipeline = which if isinstance(which, int) else placement.evaluates
    first_replicas = placement.first_replicas(pipeline)
    with ExitStack() as stack:
        for stage, replica in enumerate(first_replicas):
            buffers = {} if isinstance(which, int) else average_buffers(worker, stage)
            if replica in worker.held:
                is_own = isinstance(which, int) or (which == "reference" and not worker.references[replica])
                weights = None if is_own else worker.weights(replica, which)
                stack.enter_context(worker.trained[replica, pipeline].inference(weights, buffers))
        pending: list[tuple[int, Collector | None]] = []
        # Numbered over all evaluations: a process may still wait for a result of the previous one.
        for batch, (inputs, targets) in enumerate(batches, worker.evaluated):
            worker.evaluated = batch + 1
            worker.compare(batch, inputs, targets)
            samples = sample_count(inputs, is_whole=micro_batches == 1, dims=dims)
            parts = min(micro_batches, samples)
            collecting = collector() if first_replicas[-1] in worker.held else None
            work = Work(
                batch,
                parts,
                split(inputs, parts, samples, dims.inputs),
                split(targets, parts, samples, dims.targets),
                collector=collecting,
                trains=False,
            )
            for row in worker.rows_of(pipeline):
                row.evaluate(work)
            pending.append((batch, collecting))
            if len(pending) > _AHEAD:
                yield _result(worker, pipeline, *pending.pop(0))
        for item in pending:
            yield _result(worker, pipeline, *item)


def _result(worker: Worker, pipeline: int, batch: int, collector: Collector | None) -> Any:
    """Return the result of a batch, once it is computed here, or has arrived from the last stage."""
    lanes = [lane for row in worker.rows_of(pipeline) for lane in row.lanes.values() if lane.route.evaluates]
    key = result_key(worker.placement, worker.world.rank, pipeline, batch)
    awaited = [] if collector is not None else [key]
    with torch.no_grad():  # whichever mode a generator of batches has left on
        worker.scheduler.run_until(
            lambda: (
                all(lane.has_ended(batch) for lane in lanes)
                and (collector is not None or key in worker.mailbox)
            ),
            awaited=awaited,
            recorded=False,
        )
    for lane in lanes:
        lane.finish(batch)
    if collector is None:
        return worker.mailbox.take(key)
    result = collector.result()
    for rank in range(worker.world.size):
        if rank != worker.world.rank:
            sent = result_key(worker.placement, rank, pipeline, batch)
            worker.links[sent.target].send(sent, result)
    return result


class MetricSums:
    """Sums loss and metrics over a batch, on their device, so that the host does not wait for it.

    The result is one float64 tensor (loss, weight of the loss, samples, metrics...), the names of the metrics
    of ``metric_fn``, "" for one without a name, and those of the loss function, whose metrics are the last.
    """

    def __init__(self, options: TrainingOptions, metric_fn: MetricFn | None) -> None:
        self._options, self._metric_fn = options, metric_fn
        self._loss: _Sum = 0.0
        self._weight: _Sum = 0.0
        self._samples = 0
        self._means: dict[str, _Sum] = {}
        self._of_loss: dict[str, _Sum] = {}

    def add(self, output: Any, target: Any, samples: int, given: Any) -> None:
        loss_fn = self._options.loss_fn
        weight = loss_weights(loss_fn, [given], [samples], self._options.loss_weight).total
        if weight:
            value, count, metrics = loss_of(loss_fn, output, target)
            factor = weight if count is None else 1.0
            self._loss = self._loss + _wide(value) * factor
            self._weight = self._weight + (weight if count is None else _wide(count))
            for name, metric in (metrics or {}).items():
                self._of_loss[name] = self._of_loss.get(name, 0.0) + _wide(metric) * factor
        self._samples += samples
        if self._metric_fn is not None:
            metric = self._metric_fn(output, target)
            for name, value in (metric if isinstance(metric, dict) else {"": metric}).items():
                self._means[name] = self._means.get(name, 0.0) + _wide(value) * samples

    def result(self) -> tuple[torch.Tensor, list[str], list[str]]:
        means = [*self._means.values(), *self._of_loss.values()]
        numbers = [self._loss, self._weight, float(self._samples), *means]
        tensors = [n for n in numbers if isinstance(n, torch.Tensor)]
        device = next((t.device for t in tensors if on_accelerator(t)), torch.device("cpu"))
        read_here(tensors)
        return torch.stack([wide(n, device) for n in numbers]), list(self._means), list(self._of_loss)


def result_of(
    parts: Sequence[tuple[torch.Tensor, list[str], list[str]]], sums_loss: bool, has_metric: bool
) -> EvaluationResult:
    """Return the result over batches, each in the form of :meth:`MetricSums.result`."""
    total = weighed = samples = 0.0
    metrics: dict[str, float] = {}
    of_loss: dict[str, float] = {}
    for numbers, names, loss_names in parts:
        loss, weight, count, *values = numbers.tolist()
        total, weighed, samples = total + loss, weighed + weight, samples + count
        for sums, named in ((metrics, names), (of_loss, loss_names)):
            for name in named:
                sums[name] = sums.get(name, 0.0) + values.pop(0)
    divisor = 1.0 if sums_loss else weighed or math.nan
    means = {name: value / samples for name, value in metrics.items()}
    return EvaluationResult(
        total / divisor,
        None if not has_metric else means[""] if list(means) == [""] else means,
        int(samples),
        {name: value / divisor for name, value in of_loss.items()},
    )


def read_here(tensors: Iterable[Any]) -> None:
    """Record for the allocator that the caller's stream reads what the last stage's lane has computed."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and on_accelerator(tensor):
            used_on(current_stream(tensor.device), [tensor])


_Sum: TypeAlias = "torch.Tensor | float"  # float64


def _wide(value: Any) -> _Sum:
    """Return a number, or a tensor of one element, to be summed."""
    return value.detach().double().reshape(()) if isinstance(value, torch.Tensor) else float(value)
