"""What isolated pipelines publish at each step: updates of the reference, and results of their batches.

Each process has its own copy of the reference. The processes of one host publish in shared memory and read it
there; where pipelines are on several hosts, one process of each rank speaks for its host::

    stage makes step t    writes its update to one of two slots, raises its count of steps, rings all bells
    one host              all have published t: the updates count, in the order of pipelines, in every process alike
    several hosts         the speakers sum what their hosts have published (avgpipe.fault.speaker), and write the sum
                          into shared memory; step t counts once the sums of all ranks are there

Step t counts for a pipeline once all its stages have published it; otherwise stages would differ in which
pipelines have a part in the reference. Two slots are enough: no stage publishes step t + 2 before all on its host
have applied t. Where runs span hosts, a gradient is published before its own step, which waits for the step before
(rule mean-gradient, :class:`avgpipe.runtime.route.StepKind`): so the sums of t + 1 begin as soon as those of t are
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import torch

from avgpipe.errors import PipelineError
from avgpipe.fault.membership import Known, Membership
from avgpipe.fault.roster import Term
from avgpipe.fault.slots import Like, ProcessMemory
from avgpipe.links.link import Key, Mailbox, Message
from avgpipe.ranks.environment import named
from avgpipe_ext.ring import Bell, Memory

_KEPT = 4  # epochs of which a process remembers the first step


@lru_cache(maxsize=2)
def _is_alone(turn: int, known: Known) -> bool:
    """Whether one host alone has a part in a step; asked again and again while it is under way."""
    # Terms of a lost host count in steps that were summed with it, though it does not speak any more.
    return len({term.host for term in known.roster.counting(turn).values()}) <= 1


@dataclass(frozen=True)
class Published:
    """What counts in a step, at one stage replica.

    Attributes:
        pipelines: those that count, in ascending order.
        values: what each has published beside tensors.
        updates: each one's update of the reference that has one, or their sum alone; unchanged until
            this process has applied it.
        buffers: each one's averaged buffers, or their sum alone.
    """

    pipelines: list[int]
    values: list[Any]
    updates: list[list[torch.Tensor]]
    buffers: list[list[torch.Tensor]]

    def mean_buffers(self) -> list[list[torch.Tensor]]:
        """Return buffers whose mean is that of all pipelines."""
        if len(self.buffers) == len(self.pipelines):
            return self.buffers
        return [[total / len(self.pipelines) for total in total_of] for total_of in self.buffers]


class Processes:
    """The processes of one term on this host, whose memory is open here."""

    def __init__(self, facts: Mapping[int, Any], like: Mapping[int, Like]) -> None:
        self.ranks = {rank: ProcessMemory.open(of["memory"], like) for rank, of in facts.items()}
        self._bells: list[Bell] = []
        for of in facts.values():
            path, size, offset = of["bell"]
            self._bells.append(Bell(Memory.open(path, size), offset))

    def published(self) -> int:
        """Return how many steps all of them have published since the pipeline joined."""
        return min(memory.published() for memory in self.ranks.values())

    def ring(self) -> None:
        for bell in self._bells:
            bell.ring()
        for memory in self.ranks.values():
            memory.speaker_bell.ring()


class TurnExchange:
    """One process's end of the exchange.

    Args:
        like: by stage replica held here, the shapes of what is published for it.
        bell: where others ring for this process: a path, bytes, and an offset.
        wire: dtype in which updates go to other hosts; None: their own.

    Attributes:
        known: the newest of the coordinator's decisions for which this process is prepared.
        next_turn: the first step that has not ended.
        turns: by step that has ended, the values of the pipelines that count in it; the caller removes each that it
            has handled.
        batches: returns the number of the loader's batches begun.
    """

    def __init__(
        self,
        membership: Membership,
        mailbox: Mailbox,
        like: Mapping[int, Like],
        bell: list[Any],
        wire: torch.dtype | None = None,
    ) -> None:
        self.membership, self._mailbox, self.like, self.wire = membership, mailbox, like, wire
        self.own = ProcessMemory.create(like, membership.spans_hosts)
        self._facts = {"memory": self.own.facts, "bell": bell}
        self.batches: Callable[[], int] = lambda: membership.batches
        self._there: dict[int, Processes] = {}  # of terms on this host, by their numbers
        self._first = self.next_turn = 0  # the first step, and the first one that has not ended
        self.known = membership.known
        self.turns: dict[int, dict[int, Any]] = {}
        # Steps published by lost terms that still count, and the first step whose sum, made by one of them, does not.
        self._caps: dict[int, tuple[int, int]] = {}
        self._valid_from: list[tuple[int, int]] = []  # first steps of epochs, and these
        self._epoch = 0
        self._is_broken = False  # the epoch has ended, and the next one is not known
        self._speaker: Any = None
        self._halted: list[Any] = []  # speakers of earlier epochs
        mailbox.sources.append(self._collect)
        membership.serve(self)

    def enter(self, digests: Mapping[str, str]) -> int:
        """Become a member; return the first step."""
        self._first = self.next_turn = self.membership.enter(digests, self._facts)
        return self.next_turn

    @property
    def address(self) -> str:
        """The address of this host towards other hosts."""
        return self.membership.here or self.known.here or "127.0.0.1"

    # ---- for the membership, in its thread ---------------------------------------------------------------------------

    def position(self) -> list[int]:
        """Return the loader's batches begun, steps ended, and steps published since the pipeline joined."""
        return [self.batches(), self.next_turn, self.own.published()]

    def failed(self, failure: PipelineError) -> None:
        """Note that the connection is lost."""
        self._mailbox.fail(failure)
        self._mailbox.bell.ring()

    def adopt(self, known: Known) -> list[int]:
        """Prepare for a roster; return the terms whose memory cannot be opened."""
        there, unseen = dict[int, Processes](), list[int]()
        for term in known.roster.terms:
            if term.number in self._there:
                there[term.number] = self._there[term.number]
            elif term.host == self.membership.host and not term.has_ended:
                try:
                    there[term.number] = Processes(known.facts[term.number], self.like)
                except OSError:
                    unseen.append(term.number)
        self._there = there
        if known.epoch != self._epoch:
            self._epoch = known.epoch
            self._valid_from = [*self._valid_from[1 - _KEPT :], (known.resume, known.epoch)]
        ended = {term.number for term in known.roster.terms if term.has_ended}
        self._caps = {number: cap for number, cap in self._caps.items() if number not in ended}
        self.known, self._is_broken = known, False
        if self._speaker is None and len({t.host for t in known.roster.terms if not t.was_lost}) > 1:
            self._speaker = named("avgpipe.fault.speaker:Speaker")(self, known)
        self._mailbox.bell.ring()
        self.own.speaker_bell.ring()
        return unseen

    def freeze(self, lost: Sequence[int], breaks: bool) -> tuple[int, dict[int, int]]:
        """Take no more of lost groups than now; return the steps whose sums are whole, and what they published.

        ``breaks``: abandon the sum that is under way.
        """
        self._is_broken = self._is_broken or breaks
        if breaks and self._speaker is not None:
            self._halt_speaker()
        for number in lost:
            if (there := self._there.get(number)) is not None and number not in self._caps:
                memory = there.ranks[self.membership.rank]
                first = next(t for t in count(self.next_turn) if not self._has_sums(memory, t))
                self._caps[number] = there.published(), first
        whole = next(t for t in count(self.next_turn) if not self._is_whole(t, [self.membership.rank]))
        return whole, {n: self._caps[n][0] for n in lost if n in self._caps}

    def _halt_speaker(self) -> None:
        self._speaker.halt()
        self._halted, self._speaker = [*self._halted[-1:], self._speaker], None

    # ---- publishing --------------------------------------------------------------------------------------------------

    def publish(
        self,
        place: int,
        turn: int,
        values: Any,
        updates: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
    ) -> None:
        """Publish a step of a stage replica; every step once, in order.

        ``updates``: all tensors of the update, or none.
        """
        self.own.slot(place, turn).write(values, updates, buffers)
        self.own.counts[place].ring()
        self.ring()

    def may_publish(self, turn: int) -> bool:
        """Whether the memory of a step is free: the step two before it, if any, is applied everywhere here."""
        there = ((term, self._there.get(term.number)) for term in self.known.roster.present)
        rank = self.membership.rank
        return all(
            found is None or term.first + found.ranks[rank].applied() >= turn - 1 for term, found in there
        )

    def note_applied(self, place: int, turn: int) -> None:
        """Note that a stage replica has applied, or needs no more, all steps before ``turn``."""
        applied = self.own.applied_counts[place]
        for _ in range(self._first + applied.count(), turn):
            applied.ring()
        self.ring()

    def may_sum(self, turn: int) -> bool:
        """Whether the sums of a step may begin: it is published here, and the step before is whole for all ranks."""
        is_next = turn <= self.next_turn or self._is_whole(turn - 1, self.known.facts[self.membership.group])
        return is_next and self.all_near_published(turn) and self.may_publish(turn)

    def ring(self) -> None:
        """Wake the processes of this host."""
        for term in self.known.roster.present:
            if term.number in self._there:
                self._there[term.number].ring()

    # ---- reading -----------------------------------------------------------------------------------------------------

    @staticmethod
    def key(pipeline: int, place: int, turn: int) -> Key:
        """Return the key of a stage replica's message that a step has ended; its value is a `Published`."""
        return Key(Message.REFERENCE_UPDATE, pipeline, place, place, turn, -1)

    def near(self, turn: int) -> dict[int, Term]:
        """Return the terms on this host that count in a step, by pipeline."""
        counting = self.known.roster.counting(turn)
        return {i: term for i, term in counting.items() if term.host == self.membership.host}

    def all_near_published(self, turn: int) -> bool:
        """Whether all pipelines of this host that count in a step have published it."""
        return all(
            term.number in self._there and turn < term.first + self._published(term)
            for term in self.near(turn).values()
        )

    def _published(self, term: Term) -> int:
        published = self._there[term.number].published()
        cap, _ = self._caps.get(term.number, (published, 0))  # looked at after the count, see freeze()
        return min(published, cap)

    def of(self, term: Term) -> ProcessMemory:
        """Return the memory of the process of a term on this host that has this process's rank."""
        return self._there[term.number].ranks[self.membership.rank]

    def _collect(self) -> None:
        """Deliver the steps that have ended."""
        while self.next_turn < self.membership.begun:
            turn, known = self.next_turn, self.known
            is_whole = self._is_whole(turn, known.facts[self.membership.group])
            # A sum of the next epoch must not complete one of this epoch: looked at after the sums.
            if not is_whole or (self._is_broken and not _is_alone(turn, known)):
                return
            find = self._published_here if _is_alone(turn, known) else self._summed
            for place in self.like:
                published = find(turn, place)
                self._mailbox.put(self.key(self.membership.pipeline, place, turn), published)
                self.turns[turn] = dict(zip(published.pipelines, published.values))
            self.next_turn += 1

    def _published_here(self, turn: int, place: int) -> Published:
        terms = self.near(turn)
        slots = [self.of(term).slot(place, turn) for term in terms.values()]
        values = [slot.read() for slot in slots]
        updates = [slot.updates for slot, value in zip(slots, values) if value["has_update"]]
        return Published([*terms], values, updates, [slot.buffers for slot in slots])

    # ---- sums over hosts ---------------------------------------------------------------------------------------------

    def _is_whole(self, turn: int, ranks: Iterable[int]) -> bool:
        """Whether this host has all that counts in a step, for some ranks."""
        if _is_alone(turn, self.known):
            return self.all_near_published(turn)
        return all(self.whole_sums(turn, rank) is not None for rank in ranks)

    def whole_sums(self, turn: int, rank: int) -> ProcessMemory | None:
        """Return the memory on this host that has the sums of a step whole, for a rank."""
        for number, there in list(self._there.items()):
            memory = there.ranks[rank]
            # The cap is looked at after the memory: freeze() looks at that once more.
            if self._has_sums(memory, turn) and turn < self._caps.get(number, (0, turn + 1))[1]:
                return memory
        return None

    def _has_sums(self, memory: ProcessMemory, turn: int) -> bool:
        """Whether a memory has the sums of a step whole, made in an epoch in which they still count."""
        epoch = memory.whole(turn) if memory.has_sums else -1
        return epoch >= max((of for first, of in self._valid_from if first <= turn), default=0)

    def _summed(self, turn: int, place: int) -> Published:
        memory = self.whole_sums(turn, self.membership.rank)
        assert memory is not None
        sums = memory.sums(place, turn)
        pipelines, values = sums.read()
        has_update = any(value["has_update"] for value in values)
        return Published(pipelines, values, [sums.updates] if has_update else [], [sums.buffers])

    # ---- numbers for the other processes of this pipeline -----------------------------------------------------------

    def note(self, number: float) -> None:
        """Let the other processes of this pipeline read a number."""
        self.own.note = number

    def noted(self) -> list[float]:
        """Return the numbers that all processes of this pipeline have noted; 0.0 for none."""
        return [memory.note for memory in self._there[self.membership.group].ranks.values()]

    def report_late(self) -> bool:
        """Report others that have not published a step in time; False if this cannot be the cause.

        Where all of this pipeline have published a step that has not ended, whatever one of its stages waits
        for, such as the next step's norm, may come from another stage that waits for the end of this step.
        The coordinator ends the late pipelines, or this one; or this process waits and reports again, while
        others compute a result for all.
        """
        turn = self.next_turn
        own = self.known.roster.counting(turn).get(self.membership.pipeline)
        if own is None or turn >= own.first + self._published(own):
            return False
        self.membership.report_late(turn, "" if self._speaker is None else self._speaker.waits_for)
        return True

    def close(self, leaves: bool) -> None:
        """``leaves``: whether this pipeline is done; else it counts as lost."""
        if leaves and self.membership.failure is None:
            self.membership.leave()
        self._mailbox.sources.remove(self._collect)
        if self._speaker is not None:
            self._halt_speaker()
        self.membership.close()
        for speaker in self._halted:
            speaker.join()
