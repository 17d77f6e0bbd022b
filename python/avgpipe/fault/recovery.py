"""Recovery after a rank was replaced: all ranks restore a copy of their state and repeat later batches."""

from __future__ import annotations

import gc
import logging
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from avgpipe.checkpoint.snapshot import may_run
from avgpipe.device import generators_of
from avgpipe.errors import CheckpointError, PeerLost, PipelineError, PipelineTimeout
from avgpipe.fault.copies import StateCopies
from avgpipe.fault.generation import next_generation, restored, waited_for
from avgpipe.fault.loop_options import LoopOptions, NotingFeed
from avgpipe.model.context import CallerGenerators, CallerModes
from avgpipe.ranks.environment import generation, is_replaceable
from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.rendezvous import private_store
from avgpipe.runtime.loading import find_parameters, set_requires_grad
from avgpipe.runtime.policy import Policy
from avgpipe.runtime.session import LOST, Session
from avgpipe.runtime.spec import Spec

T = TypeVar("T")
_log = logging.getLogger("avgpipe")
_REFUSALS = CheckpointError, ValueError  # raised on all ranks, which can all go on


def _nothing() -> None:
    pass


class _Call(NamedTuple):
    """A call of the user's that a process which replaces another makes, too.

    Attributes:
        name: such as ``once('best')``.
        found: its result for that process, in a list: a copy, as the caller may change its own. [None] for a save;
            empty if all make it again together.
        repeat: makes it again.
    """

    name: str
    found: list[Any]
    repeat: Callable[[], None] = _nothing


class Recovery(Policy):
    """Keeps copies of each process's state in its neighbour's memory, from which a lost process is replaced.

    Args:
        asked: the user's ``avgpipe.Copies``.
    """

    def __init__(self, asked: Any) -> None:
        self._asked = asked
        self._copies = StateCopies(asked.every_s)
        self._options = LoopOptions()
        self._called = -1  # batches before the last call that no new process makes; -1: there is none
        self._has_begun = False  # a batch
        self._first = self._loads = 0  # the number of the first one; loads so far
        self._calls: list[_Call] = []  # before the first batch
        self._ahead: list[_Call] = []  # those of others that this process has not made yet
        # Calls after the first batch that need not be made again, by their places: how many results came before the
        # call, and its number among the calls there.
        self._found: dict[tuple[int, int], _Call] = {}
        self._made = 0  # the others have made all calls after fewer results than this
        self._pending: dict[tuple[int, int], str] = {}  # by place, calls during which a rank was lost
        self._place, self._name = (0, 0), ""  # of the last call
        self._value: list[Any] = []  # what once() has found in it
        self._is_calling = self._is_finding = False
        self._set_flags: list[tuple[list[str], bool]] = []  # by requires_grad_
        self._largest: dict[int, int] = {}  # by batches before a copy, samples of the largest

    def check(self, spec: Spec) -> None:
        self._makes_group = not dist.is_initialized()
        self._generators = [(g, g.get_state()) for g in generators_of(spec.device)]

    def opened(self, session: Session) -> None:
        if not session.world.rank and not is_replaceable():
            _log.warning("no process will use what Copies keeps: start with avgpipe run --spares")
        self._copies.attach(session.worker)
        self._options.attach(session.worker)

    def make_feed(self, session: Session) -> NotingFeed:
        spec = session.spec
        given = session.worker, spec.running, session.loader, spec.options, session.verification
        return NotingFeed(self._options, *given)

    def begin(self, session: Session) -> None:
        if generation():  # this rank, or another one, replaces one
            try:
                with session.worker.running():
                    self._go_back(session, _feed(session), math.inf)
                self._train_again(session, 0)
            except LOST as loss:
                self._recover(session, loss, math.inf)

    def settle(self) -> None:
        self._copies.settle()

    def froze(self, names: Sequence[str], flag: bool) -> None:
        self._set_flags.append(([*names], flag))

    def loaded(self, session: Session) -> None:
        feed = _feed(session)
        if feed.kept is not None:
            self._loads += 1
            self._options.loaded(self._has_begun)
            self._copies.forget()
            feed.kept.clear()
            self._found.clear()  # batches may count from an earlier one again
            self._pending.clear()
            self._made = 0
            if self._has_begun:
                self._called = feed.next_batch
            else:
                self._first = feed.next_batch

    # ---- copies ------------------------------------------------------------------------------------------------------

    def before_batch(self, session: Session) -> None:
        """Take a copy of the state before the next batch, if all are to take one."""
        if not session.loader.has_more:
            return
        self._has_begun, self._ahead = True, []
        if session.world.size == 1:
            self._found = {}
            return
        feed, copies, plan = _feed(session), self._copies, session.spec.running
        copies.collect()
        # Not within a round, which step() makes of one batch of the caller.
        if not copies.is_due(feed.next_batch) or feed.next_batch % plan.batches_per_round:
            return
        if copies.must_wait(plan.batches_in_flight) or not may_run(plan, feed.next_batch):
            feed.drain()
        with session.settling():
            copies.begin(session.spec.model, session.worker, feed.next_batch, plan.batches_in_flight)
            session.settle()
        assert feed.kept is not None
        oldest = copies.oldest
        del feed.kept[: len(feed.kept) - (feed.next_batch - oldest)]
        self._largest = {n: count for n, count in self._largest.items() if n >= oldest}
        self._largest[feed.next_batch] = feed.parts.largest
        if oldest > self._first:
            self._calls = []
        self._found = {place: found for place, found in self._found.items() if place[0] > oldest}
        self._options.forget(feed.earliest(oldest))

    # ---- going back --------------------------------------------------------------------------------------------------

    def call(self, session: Session, name: str, act: Callable[[], T], given: Sequence[Any]) -> T:
        """Return the result of a user's call, which is repeated if a rank was replaced meanwhile."""
        if self._is_calling:  # from within a function that once() calls
            return act()
        _feed(session).note()
        self._place, self._name = self._following(session), _named(name, given)
        self._compare()
        if self._ahead and self._ahead[0].found == [None]:
            return cast(T, self._take())
        self._is_calling = True
        try:
            return self._call(session, act, given)
        finally:
            self._is_calling = False

    def _call(self, session: Session, act: Callable[[], T], given: Sequence[Any]) -> T:
        # A repeated call must draw the same random numbers, such as a loader's seed.
        begin = [(g, g.get_state()) for g in generators_of(session.spec.device)]
        again = None if any(isinstance(value, Iterator) for value in given) else partial(_repeat, act, begin)
        count, before = len(self._calls), (self._loads, len(self._set_flags))
        place, name = self._place, self._name
        while True:
            # Of a call that others have made, and this process makes as it goes the same way again.
            known = self._found.get(place)
            if known and known.found == [None]:
                return cast(T, None)
            self._value = []
            try:
                found = act()
            except LOST as loss:
                if again is None:
                    raise  # the iterator is partly consumed
                del self._calls[count:]
                self.recover(session, loss, in_call=True)
                _set(begin)
            except _REFUSALS:  # on every rank; all continue
                self._note_call(session, count, [], again)
                raise
            else:
                if known is None:
                    changes_nothing = found is None and self._loads == before[0]
                    keeps_flags = len(self._set_flags) == before[1]
                    if self._has_begun and (self._value or (changes_nothing and keeps_flags)):
                        self._found[place] = _Call(name, self._value or [None])
                    self._note_call(session, count, [None] if changes_nothing else [], again)
                return found

    def _compare(self) -> None:
        """Raise PipelineError if this process, which replaces another, makes another call than the others."""
        (results, _), known = self._place, self._ahead[0] if self._ahead else self._found.get(self._place)
        name = known.name if known else self._pending.get(self._place)
        if results >= self._made if name is None else name == self._name:
            return
        others = "made no further call" if name is None else f"called {name}"
        raise PipelineError(
            f"this process replaces another one, and calls {self._name} after {results} results, where the others "
            f"have {others}: a script must make the same calls as theirs after each result. What it remembers, such "
            "as the best loss so far, a subclass of avgpipe.Copies passes on by give() and take()"
        )

    def _following(self, session: Session) -> tuple[int, int]:
        """Return the place of the next call."""
        results, (last, number) = _feed(session).next_result, self._place
        return results, number + 1 if results == last else 0

    def _note_call(
        self, session: Session, count: int, found: list[Any], again: Callable[[], None] | None
    ) -> None:
        """Note that all ranks have made a call, which a restart from an earlier batch would repeat.

        ``count``: noted calls before it. ``found``: see :class:`_Call`. ``again``: makes it again, if it can be.
        """
        self._copies.ask_for_one()
        if self._has_begun:
            if self._place not in self._found:
                self._called = max(self._called, session.feed.next_batch)
        elif len(self._calls) == count:  # else once() has noted its result
            if found or again is not None:
                self._ahead = self._ahead[1:]
                self._calls.append(_Call(self._name, found, again or _nothing))
            else:
                self._called = session.feed.next_batch + 1

    def once(self, session: Session, what: str, find: Callable[[], Any]) -> Any:
        if self._ahead and self._ahead[0].found:
            return self._take()
        if known := self._found.get(self._place):
            return deepcopy(known.found[0])
        if self._is_finding:  # the result of the call around it has this one
            return find()
        self._is_finding = True
        try:
            found = find()
        finally:
            self._is_finding = False
        if self._has_begun:
            self._value = [deepcopy(found)]
        else:
            self._calls.append(_Call(self._name, [deepcopy(found)]))
        return found

    def _take(self) -> Any:
        """Return what a call found that the others have made before."""
        self._calls.append(self._ahead.pop(0))
        return deepcopy(self._calls[-1].found[0])

    def recover(self, session: Session, loss: PeerLost | PipelineTimeout, in_call: bool = False) -> None:
        """Restore a copy of the state that all ranks have, and repeat the batches up to the last result.

        The rank that replaces a lost one does the same by itself, with as many batches begun. A stopped rank
        counts as lost. Raises ``loss`` where no rank is replaced, or no memory has what was lost.
        """
        feed: NotingFeed | None = getattr(session, "feed", None)
        if feed is None:  # it is not open yet; begin() follows
            self._await_generation(session, loss, has_waited=True)
            self._draw_as_at_first()
        else:
            feed.note()
            returned = feed.next_result
            self._made = returned + (not in_call)
            self._recover(session, loss, max(0, returned - in_call), returned)

    def _recover(
        self, session: Session, loss: PeerLost | PipelineTimeout, latest: float, returned: int = 0
    ) -> None:
        """Go back to a state after at most ``latest`` batches; repeat those whose results were ``returned``."""
        before = _feed(session)
        has_waited = isinstance(loss, PipelineTimeout) or loss.has_waited
        while True:
            self._await_generation(session, loss, has_waited)
            worker = session.worker
            self._options.release()
            worker.forget()  # its memory must be free before the next worker is made
            traceback.clear_frames(loss.__traceback__)
            gc.collect()
            try:
                # Functions that make initial weights may draw from the caller's generators.
                with CallerGenerators(session.spec.device), CallerModes():
                    self._draw_as_at_first()
                    session.open()
                    if worker.preemption.is_known:
                        session.worker.preemption.notice()
                    with session.worker.running():
                        self._go_back(session, before, latest)
                before = _feed(session)
                if not self._has_begun:
                    for call in [*self._calls]:
                        if not call.found:  # a new process makes no other one
                            call.repeat()
                self._train_again(session, returned)
                return
            except LOST as another:  # one more rank is lost, or stopped while all meet
                loss, has_waited = another, True

    def _draw_as_at_first(self) -> None:
        """Have initial weights drawn once more as when the first session was opened."""
        _set(self._generators)

    def _await_generation(self, session: Session, loss: PeerLost | PipelineTimeout, has_waited: bool) -> None:
        """Close what there is, and wait for the next generation; raise ``loss`` where none follows."""
        if not is_replaceable() or not self._makes_group:
            raise loss
        notice_s = LIMITS.stopped_notice_s if isinstance(loss, PipelineTimeout) else LIMITS.lost_notice_s
        if has_waited:
            private_store().set(waited_for(generation()), "")
        self._close(session)
        try:
            next_generation(private_store(), notice_s)
        except PeerLost as refusal:
            raise loss from refusal

    def _close(self, session: Session) -> None:
        """Close a session, of which there may only be a part."""
        self._copies.collect()
        if (saving := getattr(session, "saving", None)) is not None:
            try:
                saving.close(LIMITS.save_end_s)
            except PipelineError as unsaved:
                _log.warning("a checkpoint was not written: %s", unsaved)
        if (worker := getattr(session, "worker", None)) is not None:
            worker.close(LIMITS.lost_links_s)
        if (world := getattr(session, "world", None)) is not None:
            world.disconnect()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _go_back(self, session: Session, before: NotingFeed, latest: float) -> None:
        """Restore a copy from after at most ``latest`` batches, or begin again, and continue from there."""
        assert before.kept is not None
        world, worker, model = session.world, session.worker, session.spec.model
        # A new rank has made none of these calls, which all came before the copy.
        self._set_flags = max(world.gather(self._set_flags), key=len)
        for names, flag in self._set_flags:
            set_requires_grad(worker, find_parameters(model, names), flag)
        has_all = self._called < 0 and len(before.kept) == before.next_batch - self._first
        batches = self._copies.go_back(world, model, worker, self._called, latest, has_all)
        calls = max(world.gather([call[:2] for call in self._calls]), key=len)
        self._has_begun = batches > 0
        self._first = self._first if batches else 0
        self._ahead = [] if batches else [_Call(*call) for call in calls[len(self._calls) :]]
        # A process whose script continues from there makes calls after later results, and none before.
        later = [(*place, *call[:2]) for place, call in self._found.items() if place[0] > batches]
        rows = [row for rows in world.gather(later) for row in rows]
        self._found = {(at, number): _Call(*call) for at, number, *call in rows}
        self._made = max(world.gather(self._made))
        waiting = world.gather([*self._place, self._name] if self._is_calling else None)
        self._pending = {(row[0], row[1]): row[2] for row in waiting if row is not None}
        given = world.gather(None if latest == math.inf else self._asked.give(batches))
        if latest == math.inf:
            self._asked.take(next((value for value in given if value is not None), None))
        private_store().set(restored(generation()), "")
        count = max(0, before.next_batch - batches)  # none where this rank is new
        session.loader.give_back(before.kept[len(before.kept) - count :])
        feed = session.feed = self.make_feed(session)
        feed.next_batch, feed.parts.largest = batches, max(world.gather(self._largest.get(batches, 0)))
        self._largest = {batches: feed.parts.largest}
        if batches and feed.earliest(batches) < batches:  # else a copy has all that was set before it
            self._options.share(world, feed.earliest(batches), batches, latest == math.inf)
        session.resume()

    def _train_again(self, session: Session, returned: int) -> None:
        """Repeat the caller's training, on new ranks too, up to the results that the caller had."""
        feed, options = _feed(session), self._options
        options.begin_again(feed.earliest(feed.next_batch) if self._has_begun else 0, feed.next_batch)
        while feed.next_result < returned:
            options.repeat(feed.following)
            session.train_on()
            if session.feed.results:
                session.feed.results.popleft()
        options.repeat(math.inf)  # the caller has made all changes so far


def _named(name: str, given: Sequence[Any]) -> str:
    """Return a call as it is named to users; a call of once() by what it finds, too."""
    what = next((value for value in given if isinstance(value, str)), None) if name == "once" else None
    return f"{name}()" if what is None else f"{name}({what!r})"


def _set(states: Sequence[tuple[torch.Generator, torch.Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


def _repeat(act: Callable[[], object], begin: Sequence[tuple[torch.Generator, torch.Tensor]]) -> None:
    """Make a call again, with the random numbers that it drew the first time."""
    now = [(generator, generator.get_state()) for generator, _ in begin]
    _set(begin)
    try:
        with suppress(*_REFUSALS):
            act()
    finally:
        _set(now)


def _feed(session: Session) -> NotingFeed:
    assert isinstance(session.feed, NotingFeed)
    return session.feed
