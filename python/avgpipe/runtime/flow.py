"""The batches that are under way: which begin, how far they are, and what they come to."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from avgpipe.device import Handed
from avgpipe.plan import Plan
from avgpipe.runtime.batch import LossFn, loss_weights, sample_count, sizes_of, split
from avgpipe.runtime.lane import Lane
from avgpipe.runtime.loader import Prefetch
from avgpipe.runtime.rng import CallerGenerators
from avgpipe.runtime.steps import loss_key
from avgpipe.runtime.work import Work
from avgpipe.runtime.worker import Worker
from avgpipe.schedule.replicated import warm_up

_log = logging.getLogger("avgpipe")


@dataclass(frozen=True)
class BatchResult:
    """What a batch came to; alike on every rank. ``loss`` is that of the whole batch before its update."""

    loss: float
    batch: int  # counted over the life of the pipeline
    pipeline: int
    samples: int


class InHand(NamedTuple):
    """A batch that is under way. ``weight``: of its loss among others, unless its loss function says it."""

    batch: int
    samples: int
    micro_batches: int
    weight: float


class Flow:
    """``running()``: a context in which the worker may run, and where failures are told to the other ranks."""

    def __init__(
        self,
        worker: Worker,
        plan: Plan,
        loader: Prefetch,
        loss_fn: LossFn,
        loss_weight: Callable[[Any], Any] | None,
        running: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._worker, self._plan, self._loader = worker, plan, loader
        self._loss_fn, self._loss_weight, self._running = loss_fn, loss_weight, running
        self.next_batch = 0
        self.begun = 0  # by this object
        self.in_hand: deque[InHand] = deque()  # oldest first
        self.results: deque[BatchResult] = deque()
        self.weight = 0.0  # of the newest result's loss among others

    def takes_more(self) -> bool:
        """Whether the oldest batch cannot end, or a pipeline has nothing to do, unless another batch begins."""
        hand = self.in_hand
        if self._plan.weights == "flush":
            return len(hand) < self._plan.pipelines
        return not hand or sum(h.micro_batches for h in hand) < hand[0].micro_batches + self._ahead - 1

    @property
    def _ahead(self) -> int:
        """Without a flush, the micro-batches that stages run ahead of their backwards."""
        replication = self._plan.replication or [1] * self._plan.stages
        return max(r * warm_up(replication, k) for k, r in enumerate(replication))

    def begin(self, inputs: Any, targets: Any, copied: Handed | None) -> None:
        batch, pipeline = self.next_batch, self.next_batch % self._plan.pipelines
        samples = sample_count(inputs, targets)
        parts = self._plan.micro_batches
        if samples < parts and not self.begun and not self._worker.world.rank:
            _log.warning(
                "the first batch has %d samples, which make %d micro-batches and not %d: stages idle more; use larger "
                "batches or fewer micro_batches if the others are as short",
                *(samples, samples, parts),
            )
        parts = min(parts, samples)  # as a short last batch does
        answers = split(targets, parts)
        sizes = sizes_of(samples, parts)
        weights = loss_weights(self._loss_fn, answers, sizes, self._loss_weight)
        if copied is not None:
            inputs, targets = copied.value
            answers = split(targets, parts)
        work = Work(batch, parts, split(inputs, parts), answers, weights, copied)
        if isinstance(self._loss_fn, nn.Module):
            self._loss_fn.train()
        with self._running():
            for lane in self._lanes_of(pipeline):
                lane.start(work)
        self.next_batch += 1
        self.begun += 1
        self.in_hand.append(InHand(batch, samples, parts, weights.total))
        if self._is_too_short(parts):
            self.end()

    def _is_too_short(self, micro_batches: int) -> bool:
        """Whether a batch makes so few that without a flush those behind it would meet wrong versions: too early for
        the one that they run on, or not the same on all replicas of a stage.
        """
        plan = self._plan
        if plan.weights == "flush":
            return False
        uneven = any(micro_batches % r for r in plan.replication or ())
        return uneven or (plan.weights == "double-buffer" and micro_batches < plan.stages)

    def end(self) -> None:
        """No other batch comes for now: the pipelines run dry."""
        with self._running():
            for lane in self._worker.lanes.values():
                lane.drain()

    def drain(self) -> None:
        """Finish all."""
        self.end()
        while self.in_hand:
            self.finish_oldest()
        with self._running():
            self._worker.settle(self.next_batch)
        self._worker.scheduler.pause()

    def fetch(self) -> bool:
        """Begin the loader's next batch; False, and the end of all, if there is none."""
        start = time.perf_counter()
        batch = self._loader.next()
        if batch is None:
            self.end()
            return False
        self._worker.scheduler.note_host("loader", self.next_batch, start, time.perf_counter())
        self.begin(*batch)
        return True

    def finish_oldest(self, prefetch: bool = False) -> None:
        """Until the oldest batch's result is there. ``prefetch``: fetch the loader's next batch meanwhile."""
        batch, samples = self.in_hand[0].batch, self.in_hand[0].samples
        worker, pipeline = self._worker, batch % self._plan.pipelines
        lanes, scheduler, mailbox = self._lanes_of(pipeline), worker.scheduler, worker.mailbox
        told = loss_key(worker.placement, worker.seats[0], pipeline, batch)

        def ended() -> bool:
            return all(lane.has_ended(batch) for lane in lanes) if lanes else told in mailbox

        with self._running(), CallerGenerators(worker.device) as generators:

            def fetch() -> bool:
                start = time.perf_counter()
                fetched = self._loader.fetch(generators.given_back)
                scheduler.note_host("loader", self.next_batch - 1, start, time.perf_counter())
                return fetched

            scheduler.run_until(ended, fetch if prefetch else lambda: False, [] if lanes else [told])
            if worker.streams is not None:
                # All is only issued. Issue what the other batches can do, and see to the next one, before the host
                # waits for the device to tell this one's loss.
                scheduler.run_until(scheduler.stalled)
            if prefetch:
                fetch()  # before the caller goes on, had there been time or not: see Prefetch
            losses: list[torch.Tensor] = [lane.finish(batch) for lane in lanes] or [mailbox.take(told)]
        hand, numbers = self.in_hand.popleft(), losses[0].reshape(-1).tolist()  # the host waits for them
        loss, self.weight = numbers[0], numbers[2] if len(numbers) > 1 else hand.weight
        worker.notice.loss(loss, batch, pipeline)
        self.results.append(BatchResult(loss, batch, pipeline, samples))

    def _lanes_of(self, pipeline: int) -> list[Lane]:
        """Those of this process; none where spread pipelines have other workers."""
        return [lane for lane in self._worker.lanes.values() if lane.pipeline == pipeline]
