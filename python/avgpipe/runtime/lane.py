"""One pipeline's walk through its schedule on one stage.

Steps are the schedule's F m and B m, and those around the update, see :mod:`avgpipe.runtime.update`. Where no batch
needs an update at once, updates are a walk of their own, beside that of forwards and backwards: they may have to wait
for other stages, as for the norm of all gradients.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from avgpipe.errors import StageError
from avgpipe.runtime.backward import run_backward
from avgpipe.runtime.batch import LossFn, to_device
from avgpipe.runtime.context import Position
from avgpipe.runtime.exchange import Exchange
from avgpipe.runtime.graphs import StageGraphs
from avgpipe.runtime.group_sum import GroupSum
from avgpipe.runtime.links.channel import Link
from avgpipe.runtime.mailbox import Mailbox
from avgpipe.runtime.memory import SavedBytes
from avgpipe.runtime.message import Key, tensors_of, wanting_gradients
from avgpipe.runtime.order import Order
from avgpipe.runtime.replica import Replica
from avgpipe.runtime.skips import join, part
from avgpipe.runtime.split_backward import input_backward
from avgpipe.runtime.stage_sum import StageSum
from avgpipe.runtime.steps import Place, Step
from avgpipe.runtime.streams import Handed, LaneStream
from avgpipe.runtime.update import Update
from avgpipe.runtime.work import Progress, Saved, Work
from avgpipe.schedule.stream import Step as Act


@dataclass(frozen=True)
class TrainingOptions:
    """What all lanes share."""

    loss_fn: LossFn
    clip_grad_norm: float | None
    autocast: torch.dtype | None
    recompute: str
    cuda_graphs: bool = False
    skip_nonfinite: bool = False

    @property
    def needs_norm(self) -> bool:
        """Of the gradients of all stages."""
        return self.clip_grad_norm is not None or self.skip_nonfinite


class Walk:
    """Steps of a lane, one after another. ``missing``: what the next one still waits for; ``advance`` performs it."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.step: Step | None = None  # the next one
        self._queue: deque[Step] = deque()

    def add(self, step: Step) -> None:
        if self.step is None:
            self.step = step
        else:
            self._queue.append(step)

    def ready(self) -> bool:
        return self.step is not None and self.lane.ready(self.step)

    def missing(self) -> list[Key]:
        """Messages that the next step still waits for."""
        return self.lane.missing(self.step) if self.step is not None else []

    def advance(self) -> None:
        assert self.step is not None
        self.lane.advance(self.step)
        self.step = self._queue.popleft() if self._queue else None


class Lane:
    """``shared``: for every other stage, which of this stage's parameters it holds too (indices into the arena,
    in an order that both agree on). ``links``: by seat. ``summing``: see :class:`StageSum`.
    ``exchange``: with spread pipelines of other processes. ``stream``: where the steps run, None for a CPU.
    """

    def __init__(
        self,
        replica: Replica,
        place: Place,
        options: TrainingOptions,
        order: Order,
        mailbox: Mailbox,
        links: Mapping[int, Link],
        shared: dict[int, list[int]],
        summing: GroupSum | None = None,
        exchange: Exchange | None = None,
        stream: LaneStream | None = None,
    ) -> None:
        self.replica, self._options, self._order, self.stream = replica, options, order, stream
        self.place, self.exchange = place, exchange
        self._messages, self._take_key, self._links = mailbox.messages, mailbox.take, links
        self.pipeline, self.stage = replica.pipeline, replica.stage.index
        self._device = replica.stage.device
        self._layers = StageGraphs(replica.stage) if options.cuda_graphs else replica.stage.forward
        self._first, self._last = place.first, place.last
        self._arrivals, self._departures = place.skips
        self._sum = StageSum(replica, place, summing, self._send, mailbox.take)
        how = options.clip_grad_norm, options.skip_nonfinite
        self._update = Update(replica, place, shared, *how, self._send, mailbox.take)
        self._hand: dict[int, Progress] = {}  # by batch, oldest first
        self._computing = Walk(self)
        self._updates_late = order.updates_late
        self._updating = Walk(self) if self._updates_late else self._computing
        self.walks = [self._computing, self._updating] if self._updates_late else [self._computing]
        self.sent_at: float | None = None  # when the last step began to send, on the clock time.perf_counter
        self.measures = False  # whether the next forward counts what is held for its backward
        self.held_bytes = 0  # what one micro-batch holds, as counted

    # ---- taking on a batch ---------------------------------------------------------------------------------------

    @property
    def batch(self) -> int | None:
        """The oldest batch in hand."""
        return next(iter(self._hand), None)

    def start(self, work: Work) -> None:
        version = self._order.version()
        acts = self._order.begin(work.batch, work.micro_batches)
        self._hand[work.batch] = Progress(work, version, self._order.own(work.micro_batches))
        self._enqueue(acts)
        self.replica.stage.train()
        if self.stream is not None:
            self.stream.begin(work.copied)

    def drain(self) -> None:
        """No other batch comes for now."""
        self._enqueue(self._order.end())

    def _enqueue(self, acts: Iterable[Act]) -> None:
        for step in self.place.steps(acts, self._order.urgency):
            (self._computing if step.kind in "FBIW" else self._updating).add(step)

    def has_ended(self, batch: int) -> bool:
        now = self._hand[batch]
        return now.updated and now.loss is not None

    def finish(self, batch: int) -> torch.Tensor:
        """The loss of a batch that has ended."""
        now = self._hand.pop(batch)
        if self.stream is not None:
            self.stream.end()
        assert now.loss is not None
        return now.loss

    @property
    def skipped(self) -> int:
        """Updates that ``skip_nonfinite`` has left out."""
        return self._update.skipped

    def resume(self, batches: int) -> None:
        """The weights were replaced; no batch is in hand, and ``batches`` have begun in all."""
        self._order.resume(self.replica.updates)
        if self.exchange is not None:
            self.exchange.resume(batches)

    # ---- readiness -----------------------------------------------------------------------------------------------

    def missing(self, step: Step) -> list[Key]:
        found = [k for k in step.needs if k not in self._messages]
        return found if found or self.exchange is None else self.exchange.missing()

    def ready(self, step: Step) -> bool:
        for key in step.needs:
            if key not in self._messages:
                return False
        if self.exchange is not None:
            self.exchange.collect()
        if self._updates_late and step.kind not in "FB" and self._hand[step.batch].backwards_left:
            return False
        if step.kind == "U":
            return self.replica.settled and self.replica.ready
        if not step.begins:
            return True
        return self.replica.settled and self.replica.has_made(self._hand[step.batch].version)

    def _send(self, kind: str, to: int, step: Step, value: Any) -> None:
        if self.sent_at is None:
            self.sent_at = time.perf_counter()
        key = Key(kind, self.pipeline, self.place.seat, to, step.batch, step.micro_batch)
        self._links[to].send(key, value)

    def _take(self, step: Step) -> Any:
        """The message that a step waited for, of several the first."""
        message = self._messages.pop(step.needs[0])
        return message.received() if isinstance(message, Handed) else message

    def _take_skipped(self, step: Step) -> list[Any]:
        """The messages that came past other stages, which a step names behind its neighbour's."""
        return [self._take_key(key) for key in step.needs[1:]]

    # ---- steps ---------------------------------------------------------------------------------------------------

    def advance(self, step: Step) -> None:
        """Perform a step; what it needs must be there."""
        now = self._hand[step.batch]
        self.sent_at = None
        if self.stream is None:
            self._perform(now, step)
        else:
            place = self.place.seat, self.pipeline, step.batch, step.micro_batch, step.kind
            with self.stream.step(place, step.begins):
                self._perform(now, step)

    def _perform(self, now: Progress, step: Step) -> None:
        kind = step.kind
        if kind == "F":
            self.replica.show(now.version)
            self._forward(now, step)
        elif kind in "BI":
            self.replica.show(now.version)
            self._backward(now, step)
        elif kind == "W":
            self.replica.show(now.version)
            now.deferred.pop(step.micro_batch).run()
        else:
            with self._gradients_of(now):
                self._perform_update(now, step)
        if self._updates_late and kind == "B" and now.backwards_left == 0:
            now.grads = self.replica.take_grads()  # before the next batch adds its own

    @contextmanager
    def _gradients_of(self, now: Progress) -> Iterator[None]:
        """Parameters have the gradients of this batch inside, where those of a later one may be there already."""
        if not self._updates_late:
            yield
            return
        newer = self.replica.take_grads()
        self.replica.put_grads(now.grads)
        yield
        now.grads = self.replica.take_grads()
        self.replica.put_grads(newer)

    def _perform_update(self, now: Progress, step: Step) -> None:
        kind = step.kind
        if kind == "A":
            self._sum.begin(now, step)
        elif kind == "G":
            self._sum.finish(now, step)
        elif kind == "T":
            self._update.send_shared(now, step)
        elif kind == "S":
            self._update.sum_shared(now, step)
        elif kind == "N":
            self._update.norm(now, step)
        elif kind == "U":
            others = [p.version for p in self._hand.values() if not p.updated and p is not now]
            self._update.update(now, step, min([*others, self._order.version()]))
            now.updated = True
            for _, seat in self.place.others if self.exchange is not None else ():
                self._send("V", seat, step, self.replica.update)
            for seat in self.place.tells_the_loss:
                self._send("L", seat, step, now.loss)
        else:
            now.loss = self._take(step)

    def _forward(self, now: Progress, step: Step) -> None:
        m = step.micro_batch
        value = to_device(now.work.inputs[m], self._device) if self._first else self._take(step)
        inputs, arrived = wanting_gradients(value), []
        if self._arrivals:
            parts = self._take_skipped(step)
            value = join(value, self._arrivals, parts)
            arrived = [wanting_gradients(values) for values in parts]
            del parts
        run = self._measured_run if self.measures else self._run
        autocast = self._options.autocast
        if autocast is None:
            output = run(now, m, value)
        else:
            with torch.autocast(self._device.type, dtype=autocast):
                output = run(now, m, value)
        del value  # the message's memory is free again once nothing needs it
        if self._last:
            edges = _edges(output)
            now.saved[m] = Saved(inputs, edges, [self._seed(now, m, output)] if edges else [], arrived)
        elif not self._departures:
            now.saved[m] = Saved(inputs, _edges(output), None, arrived)
            self._send("F", self.place.at(self.stage + 1, m), step, output)
        else:
            output, parts = part(output, self._departures)
            now.saved[m] = Saved(inputs, _edges(output), None, arrived, _edges(parts))
            self._send("F", self.place.at(self.stage + 1, m), step, output)
            for route, values in zip(self._departures, parts):
                self._send("X", self.place.at(route.stage, m), step, values)

    def _run(self, now: Progress, m: int, value: Any) -> Any:
        place = Position(self.pipeline, now.work.batch, m)
        run = self.replica.stage.recomputed if self._recomputes(now, m) else self._layers
        output = run(value, place)
        return self._loss(now, m, output) if self._last else output

    def _measured_run(self, now: Progress, m: int, value: Any) -> Any:
        """As _run, counting what the micro-batch holds until its backward."""
        self.measures = False
        saved = SavedBytes(w.untyped_storage().data_ptr() for w in self.replica.arena.weights)
        with saved.counting():
            output = self._run(now, m, value)
            for tensor in () if self._first else tensors_of(value):
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
        loss = scalar_loss(self._options.loss_fn, output, to_device(now.work.targets[m], self._device))
        now.losses.append((loss.detach(), factor))
        return loss

    def _seed(self, now: Progress, m: int, loss: torch.Tensor) -> torch.Tensor:
        """The gradient of the batch's loss by a micro-batch's."""
        return torch.full((), now.work.weights.factors[m], dtype=loss.dtype, device=loss.device)

    def _backward(self, now: Progress, step: Step) -> None:
        m = step.micro_batch
        saved = now.saved.pop(m)
        roots, grads = saved.outputs, saved.grads
        if grads is None:
            # Gradients of the outputs that wanted one, and after the last backward the loss.
            received = self._take(step)
            if len(received) > len(saved.outputs):
                now.loss = received.pop()
            if self._departures:
                roots = [*roots, *saved.departed]
                received = [*received, *chain.from_iterable(self._take_skipped(step))]
            pairs = [(edge, g) for edge, g in zip(roots, received) if g is not None]
            roots, grads = [p[0] for p in pairs], [p[1] for p in pairs]
            del received, pairs
        now.backwards_left -= 1
        if now.backwards_left == 0:
            self._sum.last_backward()
        if step.kind == "I":
            now.deferred[m] = input_backward(roots, grads, saved.all_inputs)
        elif roots:
            run_backward(roots, grads)
        if now.backwards_left == 0 and self._last:
            now.sum_losses()
        if not self._first:
            message = [x.grad for x in saved.inputs]
            if now.backwards_left == 0 and not self.place.placement.is_replicated:
                # the batch's loss rides on its last gradient, so that every stage learns it without a message more
                message.append(now.loss)
            self._send("B", self.place.at(self.stage - 1, m), step, message)
        for route, tensors in zip(self._arrivals, saved.arrived):
            self._send("Y", self.place.at(route.stage, m), step, [x.grad for x in tensors])


def _edges(value: Any) -> list[GradientEdge]:
    """Where the gradients of a value's tensors go in."""
    return [get_gradient_edge(t) for t in wanting_gradients(value)]


def scalar_loss(loss_fn: LossFn, output: Any, target: Any) -> torch.Tensor:
    """The loss of a micro-batch, refused unless it is a scalar tensor."""
    loss = loss_fn(output, target)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise StageError(
            f"loss_fn returned {got}; it must return a scalar tensor, the mean or sum over the samples"
        )
    return loss
