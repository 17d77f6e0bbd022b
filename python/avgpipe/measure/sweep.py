"""Sweeps of micro-batches through all layers, each layer run as if it were a stage.

A layer gets the output of the layer before, detached, and its backward the gradients that the layer behind
has made. So every layer is timed between the others, with caches as they are in training.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from avgpipe.device import current_stream, has_streams, own_stream, timed_event
from avgpipe.errors import StageError, reason
from avgpipe.links.link import tensors_of, wanting_gradients
from avgpipe.model.batch import LossFn, plain, sample_count, to_device
from avgpipe.model.context import Position, mix, seed_generators, set_position
from avgpipe.runtime.compute import run_backward
from avgpipe.runtime.loss import loss_of
from avgpipe.runtime.split_backward import input_backward
from avgpipe.runtime.stage import Stage, writes_to_a_leaf

_ROUNDS = 3, 25  # least and most


class ProfilingClock:
    """Timestamps of the device: on an accelerator events of the current stream, else the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._has_streams = device, has_streams(device)

    def mark(self) -> Any:
        if not self._has_streams:
            return time.perf_counter()
        return timed_event(self._device)

    def settle(self) -> None:
        """Wait for the current stream; afterwards ``seconds`` may be called."""
        if self._has_streams:
            current_stream(self._device).synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3 if self._has_streams else float(end - begin)

    def timed(self, act: Callable[[], object]) -> float:
        """Return the seconds that ``act`` takes."""
        begin = self.mark()
        act()
        end = self.mark()
        self.settle()
        return self.seconds(begin, end)


def repeat(one_round: Callable[[int], None], budget_s: float) -> int:
    """Call with 0, 1, 2, ... until about ``budget_s`` seconds are spent, but at least 3 times and at most 25."""
    fewest, most = _ROUNDS
    begin = time.perf_counter()
    for done in range(most):
        spent_s = time.perf_counter() - begin
        if done >= fewest and spent_s + spent_s / done > budget_s:
            return done
        one_round(done)
        gc.collect(0)  # free the round's garbage while nothing is timed
    return most


def typical(samples: Sequence[Any]) -> Any:
    """Return the mean without a tenth of the samples at either end: of numbers, or of each place of several lists.

    Batches are sums of many times; sums of medians would be below them, as the long tail of times is longer.
    """
    left_out = len(samples) // 10
    return np.sort(samples, axis=0)[left_out : len(samples) - left_out].mean(axis=0).tolist()


@contextmanager
def undisturbed(threads: int) -> Iterator[None]:
    """Inside, torch computes with ``threads`` threads and the garbage collector is off."""
    before, collects = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(threads)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        torch.set_num_threads(before)


class Example(NamedTuple):
    """A micro-batch. ``number``: index of its size."""

    number: int
    inputs: Any
    target: Any


def examples(inputs: Any, target: Any, sizes: Sequence[int], device: torch.device) -> list[Example]:
    """Return the first samples of a batch for each size, repeating a batch that has fewer.

    Raises ValueError for tensors without the samples as dimension 0.
    """
    inputs, target = plain(inputs), plain(target)
    samples = sample_count(inputs, target)

    def rows_of(leaf: Any, size: int) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        rows = (torch.arange(size) % samples).to(leaf.device)
        return leaf.detach().index_select(0, rows).requires_grad_(leaf.requires_grad)

    return [
        Example(n, *to_device(pytree.tree_map(partial(rows_of, size=size), (inputs, target)), device))
        for n, size in enumerate(sizes)
    ]


class Times(NamedTuple):
    """Seconds of each layer in one sweep; ``rest_s``: the second part of a backward in two parts, else empty."""

    forward_s: list[float]
    backward_s: list[float]
    rest_s: list[float]


class Done(NamedTuple):
    """A layer's forward: its inputs and outputs that need gradients."""

    inputs: list[torch.Tensor]
    edges: list[GradientEdge]


Mark = Callable[[], Any]
Marks = list[tuple[Any, Any]]


class Sweep:
    """``stage`` has all layers; ``names`` are their names, for messages. ``loss_fn`` None: a mean of the output.

    For a layer that cannot be timed, StageError names it.
    """

    def __init__(
        self, stage: Stage, names: Sequence[str], loss_fn: LossFn | None, autocast: torch.dtype | None
    ) -> None:
        self.stage, self._names = stage, names
        self._loss_fn, self._autocast = loss_fn or _mean, autocast
        self._clock = ProfilingClock(stage.device)
        self._overwriting: set[int] = set()  # layers that overwrite their input
        # A stage enters autograd's engine once for all its layers, a sweep once for each: subtract the
        # entries.
        self._entry_s = 0.0 if has_streams(stage.device) else _engine_entry_s()
        self._batches = count()

    def times(self, example: Example, *, split: bool = False) -> Times:
        """Time forwards and backwards; ``split``: in two parts, of which ``backward_s`` has the first."""
        marks = self.marked(example, self._clock.mark, split=split)
        self._clock.settle()
        seconds = [self._clock.seconds(*ends) for ends in marks]
        layers = len(self.stage.layers)
        firsts = [max(0.0, s - self._entry_s) for s in seconds[layers : 2 * layers]]
        rests = [max(0.0, s - self._entry_s) for s in seconds[2 * layers :]]
        return Times(seconds[:layers], firsts[::-1], rests[::-1])

    def marked(self, example: Example, mark: Mark, *, split: bool = False) -> Marks:
        """Return marks around each layer's forward, then each backward from the last, then their second parts."""
        with self.in_batch(example):
            done, marks = self._forward(example, mark)
            return marks + self._backward(done, mark, split)

    @contextmanager
    def in_batch(self, example: Example) -> Iterator[None]:
        """Inside, the layers process a micro-batch of a separate batch, whose state is dropped at the end."""
        stage, batch = self.stage, next(self._batches)
        before = set_position(Position(0, batch, example.number))
        if stage.statistics is not None:
            stage.statistics.begin_forward()
        try:
            yield
        finally:
            set_position(before)
            if stage.statistics is not None:
                stage.statistics.drop(batch)
            for carry in stage.carries:
                carry.forget(batch)

    def _forward(self, example: Example, mark: Mark) -> tuple[list[Done], Marks]:
        done, marks = [], []
        value = example.inputs
        for n in range(len(self.stage.layers)):
            inputs, begin, output = self._called(n, value, example, mark)
            edges = [get_gradient_edge(t) for t in wanting_gradients(output)]
            marks.append((begin, mark()))
            self._check(n, inputs, output, edges)
            done.append(Done(inputs, edges))
            value = output
        return done, marks

    def _backward(self, done: list[Done], mark: Mark, split: bool) -> Marks:
        received: list[Any] = [torch.ones((), device=self.stage.device)]
        marks, rests = [], []
        while done:  # frees the values of later layers before the next backward
            layer = done.pop()
            arrived = [(edge, grad) for edge, grad in zip(layer.edges, received) if grad is not None]
            roots, grads = [edge for edge, _ in arrived], [grad for _, grad in arrived]
            begin = mark()
            rest = input_backward(roots, grads, layer.inputs) if split else None
            if rest is None and roots:
                run_backward(roots, grads)
            end = mark()
            marks.append((begin, end))
            if rest is not None:
                rest.run()
                rests.append((end, mark()))
            received = [x.grad for x in layer.inputs]
        return marks + rests

    def uncut(self, example: Example) -> Any:
        """Return the loss, with the graph of all layers."""
        value = example.inputs
        with self.in_batch(example):
            for n in range(len(self.stage.layers)):
                value = self.call(n, value, example)
        return value

    def call(self, n: int, value: Any, example: Example) -> Any:
        """Call layer ``n``, the last one with the loss."""
        layer = self.stage.layers[n]
        where, cast = self.stage.device, self._autocast
        try:
            seed_generators(where, mix(n))
            with nullcontext() if cast is None else torch.autocast(where.type, dtype=cast):
                output = layer(value)
                if n < len(self.stage.layers) - 1:
                    return output
                return loss_of(self._loss_fn, output, example.target).value
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            got = ", ".join(f"{list(t.shape)} {str(t.dtype)[6:]}" for t in tensors_of(value)) or repr(value)
            raise self._untimed(n, f"{reason(error)} (input: {got})") from error

    def _called(
        self, n: int, value: Any, example: Example, mark: Mark
    ) -> tuple[list[torch.Tensor], Any, Any]:
        """Call layer ``n``; return the inputs that need gradients as leaves, the start time, and the output."""
        if n > 0:
            value = pytree.tree_map(_detached, value)
        inputs = wanting_gradients(value)
        if n in self._overwriting:
            value = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, value)
        begin = mark()
        try:
            return inputs, begin, self.call(n, value, example)
        except StageError as error:
            if n == 0 or n in self._overwriting or not writes_to_a_leaf(error):
                raise
        self._overwriting.add(n)
        return self._called(n, value, example, mark)

    def _check(self, n: int, inputs: Sequence[Any], output: Any, edges: Sequence[Any]) -> None:
        if not tensors_of(output):
            raise self._untimed(n, f"it returned no tensor but {type(output).__name__}")
        is_last = n == len(self.stage.layers) - 1
        wanted = inputs or any(p.requires_grad for p in self.stage.layers[n].parameters())
        if not edges and (wanted or is_last):
            raise self._untimed(n, "no gradient flows back from its output" + " or the loss" * is_last)

    def _untimed(self, n: int, why: str) -> StageError:
        return StageError(f"layer {n} ({self._names[n]}) cannot be timed: {why}")


def _engine_entry_s() -> float:
    """Return the seconds of an almost empty backward."""
    x, grad = torch.zeros((), requires_grad=True), torch.zeros(())
    samples = []
    for _ in range(100):
        edge = get_gradient_edge(x.view_as(x))
        begin = time.perf_counter()
        run_backward([edge], [grad])
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def _detached(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _mean(output: Any, target: Any) -> torch.Tensor:
    """Return a default loss."""
    return torch.stack([t.float().mean() for t in wanting_gradients(output)]).sum()


_TURNS = 4  # micro-batches of each replica in a sample


def lane_gain(sweeps: Sequence[Sweep], example: Example, budget_s: float) -> float:
    """Return how much two replicas on one accelerator gain from two streams: the ratio of times, from 1 to 2."""
    device = sweeps[0].stage.device
    streams = [own_stream(device) for _ in sweeps]
    clock = ProfilingClock(device)
    alone, together = list[float](), list[float]()

    def once(number: int) -> None:
        for chosen, samples in (([streams[0]] * len(sweeps), alone), (streams, together)):
            samples.append(clock.timed(partial(_alternate, sweeps, chosen, example)))

    once(0)  # fills the allocator's pools of both streams
    alone.clear()
    together.clear()
    repeat(once, budget_s)
    return min(2.0, max(1.0, statistics.median(alone) / statistics.median(together)))


def _alternate(sweeps: Sequence[Sweep], streams: Sequence[Any], example: Example) -> None:
    """Run the replicas' forwards and backwards in turn; the current stream waits for all of them."""
    current = current_stream(sweeps[0].stage.device)
    for stream in streams:
        stream.wait_stream(current)
    for _ in range(_TURNS):
        losses = []
        for sweep, stream in zip(sweeps, streams):
            with stream:
                losses.append(sweep.uncut(example))
        for loss, stream in zip(losses, streams):
            with stream:
                loss.backward()
    for stream in streams:
        current.wait_stream(stream)
