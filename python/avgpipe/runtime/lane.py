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
from typing import Any

import torch

from avgpipe.device import LaneStream
from avgpipe.links.link import Link, Mailbox
from avgpipe.links.message import Key
from avgpipe.runtime.compute import Compute
from avgpipe.runtime.exchange import Exchange
from avgpipe.runtime.group_sum import GroupSum
from avgpipe.runtime.nonfinite import NonfiniteNotice
from avgpipe.runtime.options import TrainingOptions
from avgpipe.runtime.order import Order
from avgpipe.runtime.replica import Replica
from avgpipe.runtime.stage_sum import StageSum
from avgpipe.runtime.steps import Place, Step
from avgpipe.runtime.update import Update
from avgpipe.runtime.work import Progress, Work
from avgpipe.schedule.stream import Step as Act


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
        notice: NonfiniteNotice,
        summing: GroupSum | None = None,
        exchange: Exchange | None = None,
        stream: LaneStream | None = None,
    ) -> None:
        self.replica, self._order, self.stream = replica, order, stream
        self.place, self.exchange = place, exchange
        self._messages, self._take, self._links = mailbox.messages, mailbox.take, links
        self.pipeline = replica.pipeline
        self._sum = StageSum(replica, place, summing, self._send, mailbox.take)
        self._update = Update(replica, place, shared, options, self._send, mailbox.take, notice)
        self.compute = Compute(replica, place, options, self._send, mailbox.take, self._sum.last_backward)
        self._hand: dict[int, Progress] = {}  # by batch, oldest first
        self._computing = Walk(self)
        self._updates_late = order.updates_late
        self._updating = Walk(self) if self._updates_late else self._computing
        self.walks = [self._computing, self._updating] if self._updates_late else [self._computing]
        self._tells = place.tells_the_loss
        self.sent_at: float | None = None  # when the last step began to send, on the clock time.perf_counter

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
        return now.updated and now.told is not None

    def finish(self, batch: int) -> torch.Tensor:
        """What is told of a batch that has ended: see :class:`Progress`."""
        now = self._hand.pop(batch)
        if self.stream is not None:
            self.stream.end()
        assert now.told is not None
        return now.told

    @property
    def skipped(self) -> int:
        """Updates that ``skip_nonfinite`` has left out."""
        return self._update.skipped

    def resume(self, batches: int) -> None:
        """The weights were replaced; no batch is in hand, and ``batches`` have begun in all."""
        self._order.resume(self.replica.updates)
        if self.replica.loss_scale is not None:
            self.replica.loss_scale.resume(self.replica.updates)
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
            if step.begins and self.replica.loss_scale is not None:
                now.loss_scale = self.replica.loss_scale.at(now.version)
            self.compute.forward(now, step)
        elif kind in "BI":
            self.replica.show(now.version)
            self.compute.backward(now, step)
        elif kind == "W":
            self.replica.show(now.version)
            now.deferred.pop(step.micro_batch).run()
        else:
            with self._gradients_of(now):
                self._perform_update(now, step)
        if self._tells and now.told is not None:
            self._tell(now, step)
        if self._updates_late and kind == "B" and now.backwards_left == 0:
            now.grads = self.replica.take_grads()  # before the next batch adds its own

    def _tell(self, now: Progress, step: Step) -> None:
        """Those who learn the loss by a message of its own, once."""
        if not now.has_told:
            now.has_told = True
            for seat in self._tells:
                self._send("L", seat, step._replace(micro_batch=-1), now.told)

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
        if kind in "TNU" and not now.is_scaled:
            self._update.scale(now)
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
            self.sent_at = None  # the norm is told on before the step, which is no sending
            now.updated = True
            for _, seat in self.place.others if self.exchange is not None else ():
                self._send("V", seat, step, self.replica.update)
        else:
            now.told = self._take(step.needs[0])
