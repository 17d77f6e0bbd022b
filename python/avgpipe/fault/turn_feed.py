"""Which isolated pipeline trains on which batch, and what is trained on again when one of them was lost.

Every process iterates over all batches, so all know the share of each pipeline; a batch is kept until the
reference has its update. The samples of a lost pipeline in steps in which it does not count are trained on
before the loader's next batches, from the first step after its term: every sample moves the reference once. A
batch is cut into the same micro-batches however many pipelines share it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

import torch
from torch.utils import _pytree as pytree

from avgpipe.device import ReadyOnEvent
from avgpipe.errors import PipelineError
from avgpipe.fault.exchange import TurnExchange
from avgpipe.fault.paces import SharesByPace
from avgpipe.fault.shares import FeedPart, Unfinished
from avgpipe.model.batch import Columns, sample_count, sizes_of
from avgpipe.model.context import Position
from avgpipe.ranks.environment import named
from avgpipe.runtime.compute import Work
from avgpipe.runtime.feed import Batch, BatchResult, Feed, Pairs, Parts, cut, result_of
from avgpipe.runtime.loss import BatchEnd
from avgpipe.runtime.session import Session

if TYPE_CHECKING:
    from avgpipe.fault.turns import Turns

_log = logging.getLogger("avgpipe")
_MARKED_BYTES = 1024
_IN_FLIGHT = 2  # steps, so that a pipeline ahead of the others does not wait


@dataclass(frozen=True)
class Counts:
    """The position of a run of isolated pipelines before a step.

    Attributes:
        batches: the number of batches of the loader.
        results: the number of results; a batch that was trained on in several steps has several.
        largest: samples of the largest batch so far.
    """

    batches: int
    results: int
    largest: int = 0


class TurnFeed(Feed):
    """The feed of one of several isolated pipelines; see :class:`avgpipe.runtime.feed.Feed`.

    Args:
        session: whose batches it feeds.
        enter: becomes a member of the run, and returns the run's position; None at its beginning.
        paces: decides on the shares of a batch; None: they are equal.

    Attributes:
        next_batch: the number of the next batch of the loader, over the life of the run.
        ended: the number of results so far, over the life of the run.
        is_member: of the run.
        is_placed: whether the caller knows where its first loader begins.
        has_loader: whether it has given one, or a batch.
    """

    def __init__(
        self,
        session: Session,
        exchange: TurnExchange,
        enter: Callable[[], Counts | None],
        paces: SharesByPace | None,
    ) -> None:
        worker, plan, options = session.worker, session.spec.running, session.spec.options
        self._worker, self._plan, self._loader, self._options = worker, plan, session.loader, options
        self._exchange, self._membership, self._paces = exchange, exchange.membership, paces
        (self._pipeline,) = worker.placement.pipelines
        self._is_shared = plan.shares > 1
        self._parts = Parts(plan.micro_batches // options.accumulate, worker)  # of a batch of the loader
        self._columns = Columns()
        self._enter: Callable[[], Counts | None] = enter
        self._verification = session.verification
        self.next_batch: int = self._membership.batches
        exchange.batches = lambda: self.next_batch
        self.begun = self.ended = 0
        self.results: deque[tuple[BatchResult, float]] = deque()
        self._in_flight: deque[int] = deque()  # steps
        self._unfinished = Unfinished(plan.period)
        self._queued_terms: set[int] = set()  # ended terms whose lost parts are queued
        self._lost: deque[FeedPart] = deque()  # queued
        self._left: dict[int, int] = {}  # by pipeline that has left lately, its first batch without an update
        self._before: dict[
            int, tuple[int, int]
        ] = {}  # batches before steps in flight, and samples of the largest
        self._divisor = plan.pipelines  # of the sum of updates of a period
        self.is_member = False
        # The caller's position; before ``next_batch`` where others trained while this pipeline started.
        self._at = self.next_batch
        self.has_loader = self.is_placed = False

    @property
    def is_new(self) -> bool:
        """Whether this pipeline joins a run in which others trained already, and has begun no step yet."""
        is_late = self._membership.is_late if self.is_member else self._membership.has_begun
        return is_late and self.begun == 0

    @property
    def is_behind(self) -> bool:
        """Whether the caller's script is at a batch that the others have trained on already."""
        return self.is_new and (not self.has_loader or self._at < self.next_batch)

    @property
    def place(self) -> int:
        """The position of the caller's script in batches; one that has not asked starts at its beginning."""
        return self._at if self.has_loader or self.is_placed else 0

    def count_batches(self) -> int:
        """Return ``next_batch`` for the caller, whose first loader begins there then."""
        if not self.has_loader:
            self._at, self.is_placed = self.next_batch, True
        return self.next_batch

    def resume(self) -> None:
        """Continue at ``next_batch``, which the caller knows from :meth:`enter` or a load."""
        self._at, self.is_placed = self.next_batch, True

    @property
    def next_turn(self) -> int:
        return self._membership.begun

    @property
    def is_empty(self) -> bool:
        return not (self._in_flight or self._has_losses)

    @property
    def _has_losses(self) -> bool:
        """Whether lost parts of ended steps still have to be trained on."""
        return bool(self._lost) or self._unfinished.are_missing

    def takes_more(self) -> bool:
        return not self.results and len(self._in_flight) < _IN_FLIGHT

    def before(self, turn: int) -> Counts:
        """Return the position before ``turn``; all earlier steps have ended."""
        new = [self._results_of(ended) for number, ended in self._exchange.turns.items() if number < turn]
        batches, largest = self._before.get(turn, (self.next_batch, self._parts.largest))
        return Counts(batches, self.ended + sum(new), largest)

    def _results_of(self, ended: dict[int, Any]) -> int:
        """Return how many results a step has that is not noted yet, by what was published with it."""
        sizes = [values["part"][2] for values in ended.values() if values["part"] is not None]
        return int(any(sizes)) if self._is_shared else len(sizes)

    # ---- beginning ---------------------------------------------------------------------------------------------------

    def fetch(self) -> bool:
        """Begin the next step, with lost parts or else the loader's next batches; False if there are none.

        Also if a pipeline joins with that step, and others are in flight. It gets the state before the step, with what
        the caller's code that follows the last one has set in optimizers, and may evaluate before.
        """
        start = time.perf_counter()
        self.has_loader = True
        self.enter()
        if self._at > self.next_batch:
            with self._worker.running():
                raise PipelineError(
                    f"the loader begins with batch {self._at}, and the run is only at batch {self.next_batch}: "
                    "call enter() before the loader is made, and have it begin with batch number pipeline.batches"
                )
        while self._at < self.next_batch:
            if self._loader.next() is None:
                return False
            self._at += 1
        if not self._has_losses and (self._membership.has_stopped or not self._loader.has_more):
            if not self._membership.has_stopped:
                with self._worker.running():
                    self._worker.alike.end(self.next_batch)
            self.end()
            return False
        self._worker.scheduler.note_host("loader", self._membership.begun, start, time.perf_counter())
        return self._begin_turn()

    def begin(self, given: Pairs, copied: ReadyOnEvent | None) -> None:
        """Begin a step with a batch that all pipelines share, whatever the plan's ``batch``."""
        self.has_loader = True
        self.enter()
        if self._at != self.next_batch:
            with self._worker.running():
                raise PipelineError(
                    f"step() was given batch {self._at}, and the run is at batch {self.next_batch}: call enter() "
                    "before the first step, and begin with batch number pipeline.batches"
                )
        self._begin_turn((given, copied))

    def enter(self) -> None:
        """Become a member of the run, if this pipeline is none yet."""
        if self.is_member:
            return
        counts = self._enter()
        if counts is not None:
            self.next_batch, self.ended, self._parts.largest = counts.batches, counts.results, counts.largest
        self.is_member = True

    def _part_of(self, given: Pairs, copied: ReadyOnEvent | None, is_shared: bool) -> FeedPart:
        self._worker.look(self.next_batch, given)
        dims = self._options.batch_dims
        counts = [sample_count(inputs, targets, dims=dims) for inputs, targets in given]
        for one, samples in zip(given, counts):
            self._columns.check(one, samples)
        pieces = cut(given, copied, counts, [*map(self._parts.of, counts)], self._options)
        self.next_batch += 1
        return FeedPart(self.next_batch - 1, 0, *pieces, _mark(given), copied, is_shared)

    def _begin_turn(self, batch: Batch | None = None) -> bool:
        """Begin a step: with queued lost parts, else ``batch`` cut for all, else the loader's batches. See fetch().

        Lost parts have steps of their own, so the distribution does not depend on when a loader is asked.
        """
        with self._worker.running():
            turn = self._membership.begin(not self._in_flight)
            if turn is None:
                return False
            self._queue_lost(turn)
            members = self._membership.known.roster.members(turn)
            self._before[turn] = self.next_batch, self._parts.largest
            if self._is_shared and turn % self._plan.period == 0:
                self._divisor = len(members)
            most, found = 1 if self._is_shared or batch is not None else len(members), list[FeedPart]()
            if self._lost:
                found = [self._lost.popleft() for _ in range(min(most, len(self._lost)))]
            elif self._membership.stops_at(turn):
                pass
            elif batch is not None:
                found = [self._part_of(*batch, is_shared=True)]
            else:
                while len(found) < most and (following := self._loader.next()) is not None:
                    found.append(self._part_of(*following, self._is_shared))
                self._warn_of_length(found)
            if found and most == 1:
                (whole,) = found
                found = whole.shares(self._counts(turn, members, len(whole.sizes)))
                found = [part for part in found if part.sizes or self._is_shared]
            parts = dict(zip(members, found))
            self._unfinished.begin(turn, parts)
            self._in_flight.append(turn)
            self._start(turn, parts)
        self.begun += 1
        self._at = self.next_batch
        return True

    def _counts(self, turn: int, members: list[int], micro_batches: int) -> list[int]:
        """Return how many of a batch's micro-batches each member of a step gets."""
        if self._paces is None:
            return sizes_of(micro_batches, len(members))
        terms = self._membership.known.roster.terms
        numbers = {term.pipeline: term.number for term in terms if term.first <= turn < term.end}
        return self._paces.counts(turn, [numbers[i] for i in members], micro_batches)

    def _queue_lost(self, turn: int) -> None:
        """Queue the lost parts of pipelines whose terms have ended before this step."""
        roster = self._membership.known.roster
        ended = [term for term in roster.terms if term.end <= turn and term.number not in self._queued_terms]
        for term in ended:
            part = self._unfinished.of(term.published).get(term.pipeline)
            if not term.was_lost:
                self._left[term.pipeline] = self.next_batch if part is None else part.batch
            self._lost.extend(self._unfinished.take(term))
        for term in (term for term in roster.terms if term.cut_from == turn):
            self._lost.extend(self._unfinished.take(replace(term, published=term.cut, end=term.published)))
        self._queued_terms = {term.number for term in roster.terms if term.end <= turn}

    def _warn_of_length(self, found: list[FeedPart]) -> None:
        """Warn of pipelines that have left, if there are batches of the loader after their last ones."""
        for i, batch in self._left.items() if found and not self._worker.world.rank else []:
            _log.warning(
                "pipeline %d has left at batch %d, and the loader here has more, which the others train on without "
                "it. If its loader has ended, give all pipelines one loader, without a sampler or shard by pipeline",
                *(i, batch),
            )
        self._left.clear()

    def _start(self, turn: int, parts: dict[int, FeedPart]) -> None:
        part = parts.get(self._pipeline)
        published: dict[str, Any] = {"part": None if part is None else part.place, "divisor": self._divisor}
        if self._paces is not None:
            published |= self._paces.published(turn)
        if part is None:
            work = Work(turn, 0, [], [], idles=True, is_step=bool(parts), names=published)
        else:
            if (modes := self._options.loss_modes) is not None:
                modes.train()
            weights = part.weigh(self._divisor, self._options.sums_loss)
            work = Work(
                turn, len(part.sizes), part.inputs, part.targets, weights, part.copied, names=published
            )
            if self._options.cuda_graphs:
                work.form = named("avgpipe.runtime.graphs:form_of")((part.inputs, part.targets))
            if self._is_shared:
                work.draws = Position(0, turn, part.first)
        if part is not None and self._verification is not None:
            work.is_kept = self._verification.keeps(self.next_batch - 1, self._pipeline)
        for row in self._worker.rows:
            row.start(work)

    # ---- ending ------------------------------------------------------------------------------------------------------

    def finish_oldest(self, prefetch: bool = False) -> None:
        """Run until the oldest step has ended. ``prefetch``: fetch the loader's next batch meanwhile.

        If none has begun, train on what was lost.
        """
        if not self._in_flight:
            self._begin_turn()
        turn, worker = self._in_flight[0], self._worker
        lanes = list(worker.lanes.values())
        left = [*lanes]
        awaited = [self._exchange.key(self._pipeline, worker.held[0], turn)]

        def ended() -> bool:
            while left and left[-1].has_ended(turn):
                left.pop()
            return not left and turn in self._exchange.turns

        with self._running() as fetch:
            # What it waits for may have arrived since it looked.
            worker.scheduler.run_until(ended, lambda: ended() or (prefetch and fetch()), awaited)
            if prefetch:
                fetch()
            for lane in lanes:
                cast("Turns", lane.remote).apply()
                lane.finish(turn)
            self._note(turn, self._exchange.turns.pop(turn))
        self._in_flight.popleft()
        del self._before[turn]
        if worker.pace is not None:
            worker.pace.note()

    def _note(self, turn: int, ended: dict[int, Any]) -> None:
        """Note the results of a step; lost parts are kept until they are queued."""
        parts = self._unfinished.of(turn)
        if self._paces is not None:
            counting, own = self._membership.known.roster.counting(turn), parts.get(self._pipeline)
            paces = {counting[i].number: values.get("pace") for i, values in ended.items()}
            self._paces.end(turn, 0 if own is None else len(own.sizes), paces)
        ends: list[tuple[int, FeedPart, BatchEnd]] = []
        for i, values in ended.items():
            part, published = parts.pop(i, None), values["part"]
            if published != (None if part is None else part.place):
                self._report_mismatch(i, turn, published, part)
            if part is not None and published is not None:
                ends.append((i, part, BatchEnd(*values["end"])))
                self._worker.notice.loss(ends[-1][2].loss, part.batch, i)
        self._unfinished.end(turn, ended)
        samples = sum(part.samples for _, part, _ in ends)
        if not self._is_shared:
            for i, part, end in ends:
                self.results.append(result_of(end, part.batch, i, part.samples, self._options))
        elif samples:  # else all pipelines that had samples are lost
            whole = BatchEnd.whole([end for _, _, end in ends], self._options.sums_loss)
            self.results.append(result_of(whole, ends[0][1].batch, None, samples, self._options))
        self.ended += self._results_of(ended)

    def _report_mismatch(self, i: int, turn: int, published: Any, part: FeedPart | None) -> None:
        """Report that pipeline ``i`` has another loader; raise unless it is the only one that joined later.

        In that case pipeline ``i`` finds the same, and ends.
        """
        place = None if part is None else part.place
        found = f"in step {turn} pipeline {i} has trained on {_named(published)}, and the loader here has "
        found += f"{_named(place)}: all must iterate over the same loader"
        terms = self._membership.known.roster.counting(turn)
        if i not in terms or terms[i].donor is None or terms[i].first <= terms[self._pipeline].first:
            raise PipelineError(found)
        _log.warning("%s; it joined later, and ends", found)


def _named(place: Any) -> str:
    if place is None:
        return "nothing"
    batch, first, count, mark = place
    return f"micro-batches {first} to {first + count - 1} of batch {batch} (whose first sample has checksum {mark:08x})"


def _mark(given: Pairs) -> int:
    """Return a checksum of the first bytes of the first sample, as far as they are on the host."""
    mark = 0
    for tensor in pytree.tree_leaves(given):
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.device.type == "cpu"
            and tensor.layout is torch.strided
        ):
            sample = tensor.detach()[:1] if tensor.dim() else tensor.detach()
            first = sample.reshape(-1)[: _MARKED_BYTES // tensor.element_size()].contiguous()
            mark = crc32(first.view(torch.uint8).numpy().data, mark)
    return mark
