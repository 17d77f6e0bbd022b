"""Feeds a pipeline: fetches the caller's batches, one ahead, and keeps those in flight and their results."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from avgpipe.device import ReadyOnEvent
from avgpipe.model.batch import Columns, loss_weights, pair, sample_count, share_out, sizes_of, split
from avgpipe.model.context import CallerGenerators, GivenBack, Position
from avgpipe.plan import Plan
from avgpipe.ranks.environment import named
from avgpipe.runtime.compute import BatchState, Work
from avgpipe.runtime.loss import BatchEnd
from avgpipe.runtime.options import TrainingOptions
from avgpipe.runtime.route import loss_key
from avgpipe.runtime.worker import Worker

if TYPE_CHECKING:
    from avgpipe.model.batch import LossWeights
    from avgpipe.runtime.integrity import Verification

_log = logging.getLogger("avgpipe")


@dataclass(frozen=True)
class BatchResult:
    """A finished batch; the same on every rank, except for ``lr``.

    Attributes:
        loss: of the whole batch, before its update.
        batch: counted over the life of the pipeline.
        pipeline: the one that trained on it; None if all shared it.
        samples: how many it has; summed over all batches of the loader that were accumulated into one update.
        metrics: by name, what the loss function returned beside the loss, over the whole batch as the loss is.
        grad_norm: norm of the gradients of all stages, before clipping; None unless ``clip_grad_norm``,
            ``skip_nonfinite`` or ``loss_scale`` needs it. Of a batch that pipelines share, the mean of the
            norms of their gradients, each an estimate of the whole batch's.
        lr: learning rate of the batch's update: that of the first parameter group of the first stage with an
            optimizer on this rank, or of the last stage if the rank has no part in the batch; None without an
            optimizer there.
        skipped: whether at least one pipeline left the update out, because gradients were not finite.
    """

    loss: float
    batch: int
    pipeline: int | None
    samples: int
    metrics: dict[str, float] = field(default_factory=dict, hash=False)
    grad_norm: float | None = None
    lr: float | None = None
    skipped: bool = False


class InFlight(NamedTuple):
    """A batch that has begun.

    Attributes:
        weights: by pipeline with a part in it, the weight of the part's loss, unless the loss function
            returns it.
    """

    batch: int
    samples: int
    weights: dict[int, float]


class Parts:
    """How many micro-batches each batch is split into: fewer for a short last one of an epoch.

    BatchNorm cannot train on a micro-batch of one sample; on one device it would get the whole short batch.

    Attributes:
        most: as many as all but a short one have.
        largest: samples of the largest batch so far.
    """

    def __init__(self, most: int, worker: Worker) -> None:
        self.most, self._normalises, self.largest = most, worker.model.normalises, 0

    def of(self, samples: int) -> int:
        parts, full = min(self.most, samples), self.largest or samples
        self.largest = max(full, samples)
        is_short = self._normalises and samples < full and full // self.most > 1
        return max(1, min(parts, samples // 2)) if is_short else parts


class Feed(Protocol):
    """Begins batches, finishes them in order, and keeps their results.

    Attributes:
        next_batch: the number of the next batch to begin, over the life of the pipeline.
        begun: batches begun by this object.
        results: of finished batches that the caller has not taken yet, each with the weight of its loss.
    """

    next_batch: int
    begun: int
    results: deque[tuple[BatchResult, float]]
    _worker: Worker
    _loader: Prefetch

    @property
    def next_turn(self) -> int:
        """The number of the next step of every pipeline."""

    @property
    def is_empty(self) -> bool:
        """Whether no batch is in flight."""

    def takes_more(self) -> bool:
        """Whether another batch begins before the caller gets the next result."""

    def fetch(self) -> bool:
        """Begin the loader's next batch; if there is none, end and return False."""

    def begin(self, given: Pairs, copied: ReadyOnEvent | None) -> None:
        """Begin a batch."""

    def finish_oldest(self, prefetch: bool = False) -> None:
        """Run until the oldest batch has ended. ``prefetch``: fetch the loader's next batch meanwhile."""

    def drain(self, prefetch: bool = False) -> None:
        """Finish all batches. ``prefetch``: see :meth:`finish_oldest`."""
        self.end()
        while not self.is_empty:
            self.finish_oldest(prefetch)
        with self._worker.running():
            self._worker.settle(self.next_turn)
        self._worker.scheduler.pause()

    def end(self) -> None:
        """Let the pipelines run empty, as no other batch follows for now."""
        with self._worker.running():
            for row in self._worker.rows:
                row.drain()

    @contextmanager
    def _running(self) -> Iterator[Callable[[], bool]]:
        """Yield a function that fetches the loader's next batch."""
        scheduler, device = self._worker.scheduler, self._worker.device
        with self._worker.running() as modes, CallerGenerators(device) as generators:

            def fetch() -> bool:
                start = time.perf_counter()
                fetched = self._loader.fetch(partial(GivenBack, generators, modes))
                scheduler.note_host("loader", self.next_turn - 1, start, time.perf_counter())
                return fetched

            yield fetch

    def count_batches(self) -> int:
        """Return ``next_batch``, for the caller."""

    def resume(self) -> None:
        """Continue from another ``next_batch``."""


class BatchFeed(Feed):
    """The feed of one run of the loader's batches.

    A batch is what one update uses: with ``accumulate``, several consecutive batches of the loader.

    Args:
        plan: for these batches; ``micro_batches`` is the number for the whole of each.
        verification: decides for which batches stages keep inputs; None: for none.

    """

    def __init__(
        self,
        worker: Worker,
        plan: Plan,
        loader: Prefetch,
        options: TrainingOptions,
        verification: Verification | None = None,
    ) -> None:
        self._worker, self._plan, self._loader, self._options = worker, plan, loader, options
        self._verification = verification
        self._most_in_flight, self._shares = plan.batches_in_flight, plan.shares
        if worker.streams is not None:
            # Otherwise the device would idle while the host reads a loss and begins the next batch.
            self._most_in_flight = max(2, self._most_in_flight)
        # The first batches run one at a time: what the caller changes between two of them then affects the
        # next.
        self._flushes = plan.build_schedule().flush
        is_alone = not self._flushes or (self._shares > 1 and worker.streams is None)
        self._alone = plan.warmup_rounds or 0 if is_alone else 0
        self.parts = Parts(plan.micro_batches // options.accumulate, worker)  # of a batch of the loader
        self._columns = Columns()
        self._sums_loss = options.sums_loss
        # The latest batches that have begun.
        self.kept: list[Pairs] | None = [] if options.copies and worker.world.size > 1 else None
        self.next_batch = self.begun = 0
        self.results: deque[tuple[BatchResult, float]] = deque()
        self._in_flight: deque[InFlight] = deque()  # oldest first

    @property
    def next_turn(self) -> int:
        return self.next_batch

    def count_batches(self) -> int:
        return self.next_batch

    def resume(self) -> None:
        pass

    @property
    def is_empty(self) -> bool:
        return not self._in_flight

    @property
    def next_result(self) -> int:
        """The first batch whose result the caller has not got."""
        return self.next_batch - len(self._in_flight) - len(self.results)

    def takes_more(self) -> bool:
        """Whether another batch begins before the caller gets the next result.

        Counts as if batches in flight finished one by one, even where all had to finish, for a copy of the
        state: how many batches have begun when a result is returned must not depend on timing.
        """
        return self.next_batch - self.next_result < (
            1 if self.next_batch <= self._alone else self._most_in_flight
        )

    def begin(self, given: Pairs, copied: ReadyOnEvent | None) -> None:
        """Begin a batch. ``given``: batches of the loader, split one by one, so their shapes may differ."""
        plan, batch = self._plan, self.next_batch
        with self._worker.running():
            self._worker.look(batch, given)
        if self.kept is not None:
            self.kept.append(given)
        is_whole = self.parts.most == 1
        dims = self._options.batch_dims
        counts = [sample_count(inputs, targets, is_whole, dims) for inputs, targets in given]
        if not is_whole:
            for one, samples in zip(given, counts):
                self._columns.check(one, samples)
        if counts[0] < self.parts.most and not self.begun and not self._worker.world.rank:
            _log.warning(
                "the first batch has %d samples, which make %d micro-batches and not %d: stages idle more; use larger "
                "batches or fewer micro_batches if the others are as short",
                counts[0],
                counts[0],
                self.parts.most,
            )
        parts = [*map(self.parts.of, counts)]
        form = named("avgpipe.runtime.graphs:form_of")(given) if self._options.cuda_graphs else None
        inputs, targets, sizes, weights = cut(given, copied, counts, parts, self._options)
        work = Work(batch, len(sizes), inputs, targets, weights, copied, form=form)
        shares = (
            enumerate(self._share_out(work, weights))
            if self._shares > 1
            else [(batch % plan.pipelines, work)]
        )
        works = dict(shares)
        if (modes := self._options.loss_modes) is not None:
            modes.train()
        with self._worker.running():
            for pipeline, part in works.items():
                if self._verification is not None:
                    part.is_kept = self._verification.keeps(batch, pipeline)
                for row in self._worker.rows_of(pipeline):
                    row.start(part)
        self.next_batch += 1
        self.begun += 1
        totals = {i: part.weights.total for i, part in works.items() if part.weights is not None}
        self._in_flight.append(InFlight(batch, sum(counts), totals))
        if batch < self._alone and not self._flushes:
            self.end()

    def _share_out(self, whole: Work, weights: LossWeights) -> Iterator[Work]:
        """Split a batch into the pipelines' shares; they draw the random numbers of a single pipeline."""
        counts = sizes_of(whole.micro_batches, self._plan.pipelines)
        first = 0
        for count, own in zip(counts, share_out(weights, counts, self._sums_loss)):
            part = slice(first, first + count)
            yield replace(
                whole,
                micro_batches=count,
                inputs=whole.inputs[part],
                targets=whole.targets[part],
                weights=own,
                draws=Position(0, whole.batch, first),
            )
            first += count

    def fetch(self) -> bool:
        """Begin the loader's next batch; if there is none, end and return False."""
        start = time.perf_counter()
        batch = self._loader.next()
        if batch is None:
            with self._worker.running():
                self._worker.alike.end(self.next_batch)
            self.end()
            return False
        self._worker.scheduler.note_host("loader", self.next_batch, start, time.perf_counter())
        self.begin(*batch)
        return True

    def finish_oldest(self, prefetch: bool = False) -> None:
        """Run until the oldest batch has ended. ``prefetch``: fetch the loader's next batch meanwhile."""
        batch, samples, weights = self._in_flight[0]
        worker = self._worker
        scheduler, mailbox = worker.scheduler, worker.mailbox
        lanes = {i: [lane for row in worker.rows_of(i) for lane in row.lanes.values()] for i in weights}
        messages = {
            i: loss_key(worker.placement, worker.world.rank, i, batch) for i, own in lanes.items() if not own
        }
        left = [lane for own in lanes.values() for lane in own]

        def ended() -> bool:
            while left and left[-1].has_ended(batch):  # asked before every step
                left.pop()
            return not left and all(key in mailbox for key in messages.values())

        with self._running() as fetch:
            scheduler.run_until(ended, fetch if prefetch else lambda: False, list(messages.values()))
            if worker.streams is not None:
                # All steps are only issued. Issue what the other batches can run, and prepare the next one,
                # before the host waits for this one's loss from the device.
                scheduler.run_until(scheduler.stalled)
            if prefetch:
                fetch()  # before returning to the caller, whether there was time or not: see Prefetch
            received = {i: mailbox.take(key) for i, key in messages.items()}
            states = {i: [lane.finish(batch) for lane in own] for i, own in lanes.items()}
            worker.wait_for_device()
        self._in_flight.popleft()
        if worker.pace is not None:
            worker.pace.note()
        ends = []
        for i, weight in weights.items():
            end = _end_of(states[i], weight) if states[i] else BatchEnd.received(received[i], weight)
            ends.append(end)
            for lane in lanes[i] if worker.streams is not None else ():
                lane.update.learn(batch, end.grad_norm)
            worker.notice.loss(end.loss, batch, i)
        whole = BatchEnd.whole(ends, self._sums_loss)
        pipeline = None if self._shares > 1 else next(iter(weights))
        self.results.append(result_of(whole, batch, pipeline, samples, self._options))


def result_of(
    end: BatchEnd, batch: int, pipeline: int | None, samples: int, options: TrainingOptions
) -> tuple[BatchResult, float]:
    """Return a result, and the weight of its loss."""
    norm = end.grad_norm
    is_skipped = norm is not None and options.skips and not math.isfinite(norm)
    result = BatchResult(end.loss, batch, pipeline, samples, end.metrics, norm, end.lr, is_skipped)
    return result, end.weight


def _end_of(states: list[BatchState], weight: float) -> BatchEnd:
    """Return the end of a batch from the states of stages here: each of them knows the loss and the norm."""
    lr = next((state.lr for state in states if state.lr is not None), None)
    return BatchEnd.of(states[-1].outcome, states[-1].metrics, states[-1].norm, lr, weight)


Pairs = list[tuple[Any, Any]]  # of (inputs, targets)
Batch = tuple[Pairs, ReadyOnEvent | None]


def cut(
    given: Pairs, copied: ReadyOnEvent | None, counts: list[int], parts: list[int], options: TrainingOptions
) -> tuple[list[Any], list[Any], list[int], LossWeights]:
    """Split pairs into micro-batches; return inputs, targets, samples and weights of these, each in one list.

    ``counts`` and ``parts``: of each pair, its samples and its micro-batches.
    """

    def pieces(pairs: Pairs, n: int) -> list[Any]:
        dims = options.batch_dims.targets if n else options.batch_dims.inputs
        return [piece for of, p, c in zip(pairs, parts, counts) for piece in split(of[n], p, c, dims)]

    sizes = list(chain.from_iterable(map(sizes_of, counts, parts)))
    targets = pieces(given, 1)
    weights = loss_weights(options.loss_fn, targets, sizes, options.loss_weight)
    if copied is not None:
        given, targets = copied.value, pieces(copied.value, 1)
    return pieces(given, 0), targets, sizes, weights


def _autocasts() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


_LEFT = 4  # abandoned iterators with a batch ahead that are remembered, as they may be passed again


class Prefetch:
    """Yields ``count`` pairs at a time of loaders opened in turn, with what ``copy`` returned for them.

    At the end of a loader there may be fewer. An exception of the loader loses the pairs that were fetched
    with it.

    Fetching happens in the scheduler's thread, when it would wait otherwise, so loaders need not be
    thread-safe and their calls keep their order. :meth:`next` raises what a loader raises, in the place where
    it would be raised without prefetching. A batch is always ahead when a result is returned, whether there
    was time to fetch it or not: what the loader and the caller draw from one generator must not depend on
    timing.

    Batches that a caller gives, or that are given back, go before fetched ones.
    """

    def __init__(self, copy: Callable[[Pairs], ReadyOnEvent | None], count: int = 1) -> None:
        self._copy, self._count = copy, count
        self._source: Iterator[Any] = iter(())
        self._loader: Any = None
        self._state: Any = None  # of the loader, before the newest batch was fetched from it
        self._ahead: list[Any] = []  # batches given back, then a batch, or the exception raised instead
        self._given: list[Pairs] = []
        self._is_open = True  # whether batches in ``_given`` are from the loader
        self._left: deque[tuple[Iterator[Any], list[Any]]] = deque(maxlen=_LEFT)
        self._ended = False

    def open(self, loader: Iterable[Any]) -> None:
        self._put_ahead()
        source, self._is_open = iter(loader), True
        self._loader, self._state = loader, None
        # An iterator that is passed again continues with the batch that was already fetched from it.
        if source is not self._source:
            if self._ahead:
                self._left.append((self._source, self._ahead))
            ahead = next((ahead for left, ahead in self._left if left is source), [])
            self._left = deque((item for item in self._left if item[0] is not source), _LEFT)
            self._source, self._ahead = source, ahead
        self._ended = False

    def give(self, batches: list[Pairs]) -> None:
        """Yield these next, and nothing more until a loader is opened."""
        self._put_ahead()
        self._given, self._is_open = batches, False

    def give_back(self, batches: list[Pairs]) -> None:
        """Yield the batches that were yielded last once more, next."""
        self._given = batches + self._given

    def _put_ahead(self) -> None:
        """Keep batches that were given back for the loader that they are from."""
        if self._is_open:
            self._ahead[:0] = [(pairs, None) for pairs in self._given]
        self._given = []

    def fetch(self, outside: Callable[[], AbstractContextManager[None]] = nullcontext) -> bool:
        """Fetch a batch inside ``outside()``, unless one is ahead; return whether there was one to fetch."""
        if self._ahead or self._ended or not self._is_open:
            return False
        with outside():
            self._fetch()
        return True

    def _fetch(self) -> None:
        state_dict = getattr(self._loader, "state_dict", None)
        try:
            # The state to restart from: the batch that is fetched now may never be trained on.
            self._state = state_dict() if callable(state_dict) else None
            was = _autocasts()
            pairs = [pair(batch) for batch in islice(self._source, self._count)]
            if _autocasts() and not was:
                if isinstance(self._source, Generator):
                    self._source.close()  # so that code after the refusal does not run under autocast
                raise ValueError(
                    "the loader has left torch.autocast on, as a generator does that yields inside of it: which layers "
                    "it affects would depend on when batches are fetched. Yield outside of it, and train with "
                    "extensions=[avgpipe.Precision(autocast=torch.bfloat16)] if that is what you want"
                )
            self._ended = len(pairs) < self._count
            if pairs:
                self._ahead.append((pairs, self._copy(pairs)))
        except Exception as error:
            self._ahead.append(error)
            self._ended = True

    def state(self, loader: Any) -> Any:
        """Return the state of ``loader`` after the batches that were taken from it here."""
        state_dict = getattr(loader, "state_dict", None)
        if not callable(state_dict):
            raise TypeError(
                f"a {type(loader).__name__} has no state_dict: use a loader that has one, such as torchdata's "
                "StatefulDataLoader, or skip pipeline.batches batches of the same order"
            )
        if self._loader is not None and self._loader is not loader:
            raise ValueError(
                f"train was given a {type(self._loader).__name__} and not this {type(loader).__name__}, whose position "
                "is unknown: pass the loader itself to train"
            )
        return self._state if self._ahead else state_dict()

    @property
    def has_more(self) -> bool:
        """Whether there is another batch, or an exception raised instead."""
        if self._given or not self._is_open:
            return bool(self._given)
        if not self._ahead and not self._ended:
            self._fetch()
        return bool(self._ahead)

    def next(self) -> Batch | None:
        """Return the next batch, or None at the end."""
        if not self.has_more:
            return None
        batch = (self._given.pop(0), None) if self._given else self._ahead.pop(0)
        if isinstance(batch, BaseException):
            raise batch
        pairs, copied = batch
        # A batch that was not fetched has no copy on the device yet.
        return pairs, self._copy(pairs) if copied is None else copied
