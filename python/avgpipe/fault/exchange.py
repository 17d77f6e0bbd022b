"""What isolated pipelines tell each other, turn by turn: their updates of the reference, and how their batches ended.

Each process has its own copy of the reference. What one tells lies in memory that the launcher holds, so it stays when
its process dies; the others read it there. Where pipelines are on several hosts, each host has such memory, and
:mod:`avgpipe.fault.mirror` has what was told on one come to the others::

    step of turn t        the update goes to one of two slots, then the count of turns told rises, then all bells ring
    all have told turn t  what they told counts, in the order of pipelines, in every process alike

A turn counts for a pipeline once all of its stages have told it, or stages would differ in who has a part in the
reference. Two slots are enough: nobody tells turn t + 2 before all have told t + 1, for which they have taken in t.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from avgpipe.errors import PipelineError
from avgpipe.fault.membership import Membership, Neighbour
from avgpipe.fault.mirror import HEAD_BYTES, SLOTS, bells_at, published_by, read_head, write_head
from avgpipe.fault.roster import Term
from avgpipe.links.codec import padded
from avgpipe.links.link import Mailbox
from avgpipe.links.message import Key, Message
from avgpipe_ext.ring import Bell, Memory

_TEXT_BYTES = 8192  # of a slot: its head and the text


class TurnSlot:
    """Where one stage replica of a pipeline tells every other turn: a text, and tensors like those it is made for."""

    def __init__(self, memory: Memory, number: int, like: Sequence[torch.Tensor]) -> None:
        self._memory = memory
        first = offset = number * self.bytes_of(like)
        self._slot = memoryview(memory)[offset : offset + self.bytes_of(like)]
        offset += _TEXT_BYTES
        self.tensors: list[torch.Tensor] = []
        self._ends: list[int] = [_TEXT_BYTES]  # of the tensors before each, and of all
        for tensor in like:
            size = tensor.numel() * tensor.element_size()
            flat = (
                torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
                if size
                else tensor
            )
            self.tensors.append(flat.view(tensor.shape) if size else torch.empty_like(tensor, device="cpu"))
            offset += padded(size)
            self._ends.append(offset - first)

    @staticmethod
    def bytes_of(like: Sequence[torch.Tensor]) -> int:
        return _TEXT_BYTES + sum(padded(t.numel() * t.element_size()) for t in like)

    def write(self, values: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Write a text, and the last of the tensors, as many as there are; those before are nobody's to read then."""
        text = json.dumps(values).encode()
        if len(text) > _TEXT_BYTES - HEAD_BYTES:
            raise PipelineError(
                f"how a batch has ended takes {len(text)} bytes to tell: return fewer metrics from loss_fn"
            )
        first = len(self.tensors) - len(tensors)
        for mine, value in zip(self.tensors[first:], tensors, strict=True):
            mine.copy_(value)
        text_end = HEAD_BYTES + len(text)
        self._slot[HEAD_BYTES:text_end] = text
        write_head(self._slot, text_end, self._ends[first], self._ends[-1])

    def read(self) -> Any:
        text_end, *_ = read_head(self._slot)
        return json.loads(bytes(self._slot[HEAD_BYTES:text_end]))


@dataclass(frozen=True)
class Published:
    """What counts in a turn, at one stage replica.

    Attributes:
        pipelines: those that count, in ascending order.
        values: what each has told beside tensors.
        tensors: what each has told; they stay as they are until this process tells the next turn.
    """

    pipelines: list[int]
    values: list[Any]
    tensors: list[list[torch.Tensor]]


@dataclass(frozen=True)
class Turn:
    """A turn that has ended: who counts in it, and with what."""

    number: int
    values: dict[int, Any]


class Other:
    """What another pipeline, or this one, tells while it stays: mapped when it is first asked for."""

    def __init__(self, about: Neighbour, like: Mapping[int, Sequence[torch.Tensor]]) -> None:
        published = Memory.open(*about.published)
        self._counts = [Bell(published, place * Bell.BYTES) for place in range(about.places)]
        self._slots = {
            place: [TurnSlot(memory, n, tensors) for n in range(SLOTS)]
            for place, tensors in like.items()
            for memory in [Memory.open(*about.memory[published_by(place)])]
        }
        self._bells = bells_at(about.bells)

    def turns_published(self) -> int:
        """Return how many turns all of its stages have told since it has entered."""
        return min(count.count() for count in self._counts)

    def slot(self, place: int, turn: int) -> TurnSlot:
        return self._slots[place][turn % SLOTS]

    def ring(self) -> None:
        for bell in self._bells:
            bell.ring()


class TurnExchange:
    """One process's part of it.

    Args:
        like: by stage replica held here, tensors like those that are told of it.
        give: ``give(replica, turn)`` returns the bytes of its state before a turn, for a pipeline that comes with it.

    Attributes:
        turns: that have ended, until somebody has seen to it.
    """

    def __init__(
        self,
        membership: Membership,
        mailbox: Mailbox,
        like: Mapping[int, Sequence[torch.Tensor]],
        give: Callable[[int, int], bytes],
    ) -> None:
        self.membership, self._mailbox, self._give = membership, mailbox, give
        self._like = {place: list(tensors) for place, tensors in like.items()}
        self._counts = {place: Bell(membership.published, place * Bell.BYTES) for place in like}
        self._own: dict[int, list[TurnSlot]] = {}
        for place, tensors in self._like.items():
            memory = membership.memory(published_by(place), SLOTS * TurnSlot.bytes_of(tensors))
            self._own[place] = [TurnSlot(memory, n, tensors) for n in range(SLOTS)]
        self._others: dict[int, Other] = {}  # by the number of a stay
        self._next = 0  # the first turn of which is not known who counts in it
        self._asked = Counter[str]()  # how often something was asked for once, between two turns
        self._asked_before = 0  # the second of them
        self._asked_again = Counter[tuple[str, int]]()  # that the others have found, before so many batches
        self._last: list[Term] = []  # those that counted in the turn before
        self.turns: dict[int, Turn] = {}
        self._given: set[tuple[int, int]] = set()  # stays that have got the state of a stage replica
        mailbox.sources.append(self._collect)
        membership.changed = self._changed

    def enter(self, digests: list[str]) -> int:
        """Become a member; return the first turn."""
        self._next = self.membership.enter(digests)
        return self._next

    def _changed(self) -> None:
        """Called in the membership's thread."""
        if self.membership.failure is not None:
            self._mailbox.fail(self.membership.failure)
        self._mailbox.bell.ring()

    # ---- telling -----------------------------------------------------------------------------------------------------

    def publish(self, place: int, turn: int, values: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Tell of a stage replica's step; of each turn once, and in their order.

        ``tensors``: all of those told, or only the last of them.
        """
        self._own[place][turn % SLOTS].write(values, tensors)
        self._counts[place].ring()
        for term in self.membership.known.roster.present:
            self._of(term).ring()

    def _of(self, term: Term) -> Other:
        if term.number not in self._others:
            self._others[term.number] = Other(self.membership.known.neighbours[term.number], self._like)
        return self._others[term.number]

    # ---- learning ----------------------------------------------------------------------------------------------------

    @staticmethod
    def key(pipeline: int, place: int, turn: int) -> Key:
        """Name the message that a turn has ended, which each stage replica gets; it has a Told."""
        return Key(Message.REFERENCE_UPDATE, pipeline, place, place, turn, -1)

    def _collect(self) -> None:
        """Find which turns have ended."""
        while self._next < self.membership.begun:
            turn, roster = self._next, self.membership.known.roster
            terms = roster.counting(turn)
            if any(term.first + self._of(term).turns_published() <= turn for term in terms.values()):
                return
            values: list[Any] = []
            for place in self._like:
                slots = [self._of(term).slot(place, turn) for term in terms.values()]
                values = [slot.read() for slot in slots]
                published = Published(list(terms), values, [slot.tensors for slot in slots])
                self._mailbox.put(self.key(self.membership.pipeline, place, turn), published)
            self.turns[turn] = Turn(turn, dict(zip(terms, values)))
            self._last = list(terms.values())
            self._next += 1
            known = {term.number for term in roster.terms}
            self._others = {number: other for number, other in self._others.items() if number in known}

    def last_published(self, place: int) -> list[list[torch.Tensor]]:
        """Return what was told in the last turn that has ended; empty if none has. No turn may be under way."""
        return [self._of(term).slot(place, self._next - 1).tensors for term in self._last]

    def forget_published(self) -> None:
        """Forget what was told in the last turn, as the state is another one now."""
        self._last = []

    def report_late(self) -> bool:
        """Tell the coordinator of others that have not told a turn in time; whether that may be what is awaited.

        Where all of this pipeline have told a turn that has not ended, whatever one of its stages waits for, such as
        the next turn's norm, may come from another one that waits for the end of this turn. The coordinator ends who is
        late, or this pipeline; or has this process wait and complain again, while others find something for all.
        """
        turn = self._next
        own = self.membership.known.roster.counting(turn).get(self.membership.pipeline)
        if own is None or own.first + self._of(own).turns_published() <= turn:
            return False
        self.membership.report_late(turn)
        return True

    def once(self, what: str, batches: int, find: Callable[[], Any]) -> Any:
        """Return what one pipeline finds, as JSON has it, and all others learn, between two turns.

        Another one does it if that one is lost. Every process calls this at the same turn, for each thing as often.

        Args:
            batches: of the loader, before it: where one that comes later has got to when it asks :meth:`found_before`.
        """
        turn = self.membership.begun
        if turn != self._asked_before:
            self._asked, self._asked_before = Counter(), turn
        self._asked[what] += 1
        name = what, self._asked[what], turn
        known = self.membership.once(*name, batches)
        if known:
            return known[0]
        value = find()
        self.membership.done(*name, value)
        return value

    def found_before(self, what: str, batches: int) -> list[Any]:
        """Return in a list what the others have found before so many batches, long ago; empty if they have not."""
        self._asked_again[what, batches] += 1
        return self.membership.found(what, self._asked_again[what, batches], batches)

    # ---- those that come ---------------------------------------------------------------------------------------------

    def hand_over(self, place: int, turn: int) -> None:
        """Give the state of a stage replica before ``turn`` to those that come with it and are to have it from here.

        The turn must have begun: until then the caller may change the state, as by a load.
        """
        if turn >= self.membership.begun:
            return
        for term in self.membership.known.roster.joining(turn):
            if term.donor == self.membership.pipeline and (term.number, place) not in self._given:
                self._given.add((term.number, place))
                state = self._give(place, turn)
                name = f"state {place}"
                memory = self.membership.memory(name, len(state))
                memoryview(memory)[: len(state)] = state
                self.membership.hand_over(term.number, name, [memory.path, memory.bytes, len(state)])

    def received(self, place: int) -> bytes:
        """Return the state that this pipeline begins with, once it is there."""
        path, size, length = self.membership.received(f"state {place}")
        return bytes(memoryview(Memory.open(path, size))[:length])

    def close(self) -> None:
        self._mailbox.sources.remove(self._collect)
        self.membership.leave()
        self.membership.close()
