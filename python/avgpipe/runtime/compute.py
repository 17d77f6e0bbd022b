"""The forwards and backwards of micro-batches on one stage: what they take, keep and send."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from avgpipe.errors import StageError
from avgpipe.links.message import Key, tensors_of, wanting_gradients
from avgpipe.runtime.backward import run_backward
from avgpipe.runtime.batch import to_device
from avgpipe.runtime.context import Position
from avgpipe.runtime.graphs import StageGraphs
from avgpipe.runtime.loss import MeanCheck, loss_of
from avgpipe.runtime.memory import SavedBytes
from avgpipe.runtime.options import TrainingOptions
from avgpipe.runtime.replica import Replica
from avgpipe.runtime.skips import join, part
from avgpipe.runtime.split_backward import input_backward
from avgpipe.runtime.steps import Place, Step
from avgpipe.runtime.work import Progress, Saved

_KEPT_SEEDS = 64


class Compute:
    """``send``: a kind, seat, step and value. ``take``: a message. ``last_backward``: called before the last one of a
    batch.
    """

    def __init__(
        self,
        replica: Replica,
        place: Place,
        options: TrainingOptions,
        send: Callable[[str, int, Step, Any], None],
        take: Callable[[Key], Any],
        last_backward: Callable[[], None],
    ) -> None:
        self._replica, self._place, self._options = replica, place, options
        self._send, self._take, self._last_backward = send, take, last_backward
        self._device, self._on_cpu = replica.stage.device, replica.stage.device.type == "cpu"
        self._layers = StageGraphs(replica.stage) if options.cuda_graphs else replica.stage.forward
        self._arrivals, self._departures = place.skips
        self._check = MeanCheck(options.loss_fn) if place.last and options.may_be_no_mean else None
        self._seeds: dict[tuple[float, torch.dtype], torch.Tensor] = {}  # most micro-batches have the same
        self.measures = False  # whether the next forward counts what is held for its backward
        self.held_bytes = 0  # what one micro-batch holds, as counted

    def forward(self, now: Progress, step: Step) -> None:
        m = step.micro_batch
        value = (
            to_device(now.work.inputs[m], self._device) if self._place.first else self._take(step.needs[0])
        )
        inputs, arrived = wanting_gradients(value), []
        if self._arrivals:
            parts = self._taken_past(step)
            value = join(value, self._arrivals, parts)
            arrived = [wanting_gradients(values) for values in parts]
            del parts
        measures = self.measures and self._replica.stage.inputs.known  # the first forward holds copies
        run = self._measured_run if measures else self._run
        autocast = self._options.autocast
        if autocast is None:
            output = run(now, m, value)
        else:
            with torch.autocast(self._device.type, dtype=autocast):
                output = run(now, m, value)
        del value  # the message's memory is free again once nothing needs it
        if self._place.last:
            edges = _edges(output)
            now.saved[m] = Saved(inputs, edges, [self._seed(now, m, output)] if edges else [], arrived)
        elif not self._departures:
            now.saved[m] = Saved(inputs, _edges(output), None, arrived)
            self._send("F", self._place.at(self._place.stage + 1, m), step, output)
        else:
            output, parts = part(output, self._departures)
            now.saved[m] = Saved(inputs, _edges(output), None, arrived, _edges(parts))
            self._send("F", self._place.at(self._place.stage + 1, m), step, output)
            for route, values in zip(self._departures, parts):
                self._send("X", self._place.at(route.stage, m), step, values)

    def _taken_past(self, step: Step) -> list[Any]:
        """The messages that came past other stages, which a step names behind its neighbour's."""
        return [self._take(key) for key in step.needs[1:]]

    def _run(self, now: Progress, m: int, value: Any) -> Any:
        place = Position(self._replica.pipeline, now.work.batch, m)
        run = self._replica.stage.recomputed if self._recomputes(now, m) else self._layers
        output = run(value, place)
        return self._loss(now, m, output) if self._place.last else output

    def _measured_run(self, now: Progress, m: int, value: Any) -> Any:
        """As _run, counting what the micro-batch holds until its backward."""
        self.measures = False
        saved = SavedBytes(w.untyped_storage().data_ptr() for w in self._replica.arena.weights)
        with saved.counting():
            output = self._run(now, m, value)
            for tensor in () if self._place.first else tensors_of(value):
                saved.count(tensor)  # held in any case: its gradient is wanted
        self.held_bytes = saved.bytes
        return output

    def _recomputes(self, now: Progress, m: int) -> bool:
        how = self._options.recompute
        return how == "always" or (how == "except-last" and m < now.work.micro_batches - 1)

    def _loss(self, now: Progress, m: int, output: Any) -> torch.Tensor | None:
        """This micro-batch's loss; None when nothing in it counts."""
        factor = now.work.weights.factors[m]
        if factor == 0.0:  # a mean over nothing is 0/0, and so would its gradient be
            return None
        target = to_device(now.work.targets[m], self._device)
        loss, count = loss_of(self._options.loss_fn, output, target)
        if count is not None:
            if self._options.weighs:
                raise StageError(
                    "loss_fn returns (sum, count), which says what it weighs: leave out loss_weight"
                )
            now.counts.append(count)
            factor = 1.0
        elif self._check is not None:
            # Asked on the CPU alone, where nobody waits for the answer.
            if self._on_cpu and math.isnan(loss.item()) and self._check.counts_nothing(output):
                now.without_loss += 1
                return None
            if not self._check.done and now.work.micro_batches > 1:
                self._check.look(now.work.batch, output, target)
        now.losses.append((loss.detach(), factor))
        return loss

    def _seed(self, now: Progress, m: int, loss: torch.Tensor) -> torch.Tensor:
        """The gradient of the batch's loss by a micro-batch's, as far as it is known; times the scale."""
        weights = now.work.weights
        # A sum over what all micro-batches count is divided by the samples until that is known.
        factor = (1 / weights.total if now.counts else weights.factors[m]) * now.loss_scale
        seed = self._seeds.get((factor, loss.dtype))
        if seed is None:
            if len(self._seeds) == _KEPT_SEEDS:
                self._seeds.clear()
            seed = torch.full((), factor, dtype=loss.dtype, device=loss.device)
            self._seeds[factor, loss.dtype] = seed
        return seed

    def backward(self, now: Progress, step: Step) -> None:
        m = step.micro_batch
        saved = now.saved.pop(m)
        roots, grads = saved.outputs, saved.grads
        if grads is None:
            # Gradients of the outputs that wanted one, and after the last backward what is told of the batch.
            received = self._take(step.needs[0])
            if len(received) > len(saved.outputs):
                now.told = received.pop()
            if self._departures:
                roots = [*roots, *saved.departed]
                received = [*received, *chain.from_iterable(self._taken_past(step))]
            pairs = [(edge, g) for edge, g in zip(roots, received) if g is not None]
            roots, grads = [p[0] for p in pairs], [p[1] for p in pairs]
            del received, pairs
        now.backwards_left -= 1
        if now.backwards_left == 0:
            self._last_backward()
        if step.kind == "I":
            now.deferred[m] = input_backward(roots, grads, saved.all_inputs)
        elif roots:
            run_backward(roots, grads)
        if now.backwards_left == 0 and self._place.last:
            now.part = now.sum_losses()
            if not self._place.peers:
                now.tell(now.part)
        if not self._place.first:
            message = [x.grad for x in saved.inputs]
            if now.backwards_left == 0 and not self._place.placement.is_replicated:
                # the batch's loss rides on its last gradient, so that every stage learns it without a message more
                message.append(now.told)
            self._send("B", self._place.at(self._place.stage - 1, m), step, message)
        for route, tensors in zip(self._arrivals, saved.arrived):
            self._send("Y", self._place.at(route.stage, m), step, [x.grad for x in tensors])


def _edges(value: Any) -> list[GradientEdge]:
    """Where the gradients of a value's tensors go in."""
    return [get_gradient_edge(t) for t in wanting_gradients(value)]
