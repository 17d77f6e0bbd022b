"""What isolated pipelines publish at each step: updates of the reference, and results of their batches.

Each process has its own copy of the reference. What a process publishes lies in memory that the launcher
holds, so it outlives the process; the others read it there. Where pipelines are on several hosts, each host
has such memory, and :mod:`avgpipe.fault.mirror` copies what is published on one host to the others::

    stage makes step t    writes its update to one of two slots, raises its count of steps, rings all bells
    all have published t  the published updates count, in the order of pipelines, in every process alike

Step t counts for a pipeline once all its stages have published it; otherwise stages would differ in which
pipelines have a part in the reference. Two slots are enough: no stage publishes step t + 2 before all have
published t + 1, and they have applied t before that.
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
from avgpipe.links.link import Key, Mailbox, Message
from avgpipe_ext.ring import Bell, Memory

_TEXT_BYTES = 8192  # of a slot: its head and the text


class TurnSlot:
    """The slot of a stage replica for every other step: a text, and tensors shaped like ``like``."""

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
        """Write a text and the last ``len(tensors)`` tensors of the slot; the others must not be read then."""
        text = json.dumps(values).encode()
        if len(text) > _TEXT_BYTES - HEAD_BYTES:
            raise PipelineError(
                f"the result of a batch is too long, {len(text)} bytes: return fewer metrics from loss_fn"
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
    """What counts in a step, at one stage replica.

    Attributes:
        pipelines: those that count, in ascending order.
        values: what each has published beside tensors.
        tensors: what each has published; unchanged until this process publishes the next step.
    """

    pipelines: list[int]
    values: list[Any]
    tensors: list[list[torch.Tensor]]


@dataclass(frozen=True)
class Turn:
    """A step that has ended: the values of the pipelines that count in it."""

    number: int
    values: dict[int, Any]


class Other:
    """What another pipeline, or this one, publishes in one term; its memory is mapped at the first use."""

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
        """Return how many steps all its stages have published since it joined."""
        return min(count.count() for count in self._counts)

    def slot(self, place: int, turn: int) -> TurnSlot:
        return self._slots[place][turn % SLOTS]

    def ring(self) -> None:
        for bell in self._bells:
            bell.ring()


class TurnExchange:
    """One process's end of the exchange.

    Args:
        like: by stage replica held here, tensors of the shapes and dtypes that are published for it.
        give: ``give(replica, turn)`` returns the bytes of its state before a step, for a pipeline that joins
            with it.

    Attributes:
        turns: steps that have ended; the caller removes each that it has handled.
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
        self._others: dict[int, Other] = {}  # by the number of a term
        self._next = 0  # the first step that has not ended
        self._asked = Counter[str]()  # by name, the requests between two steps
        self._asked_before = 0  # the later of these two steps
        self._asked_again = Counter[tuple[str, int]]()  # requests of found_before
        self._last: list[Term] = []  # those that counted in the step before
        self.turns: dict[int, Turn] = {}
        self._given: set[tuple[int, int]] = set()  # terms and stage replicas whose state was sent
        mailbox.sources.append(self._collect)
        membership.changed = self._changed

    def enter(self, digests: list[str]) -> int:
        """Become a member; return the first step."""
        self._next = self.membership.enter(digests)
        return self._next

    def _changed(self) -> None:
        """Called in the membership's thread."""
        if self.membership.failure is not None:
            self._mailbox.fail(self.membership.failure)
        self._mailbox.bell.ring()

    # ---- publishing --------------------------------------------------------------------------------------------------

    def publish(self, place: int, turn: int, values: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Publish a step of a stage replica; every step once, in order.

        ``tensors``: all tensors of the slot, or only the last of them.
        """
        self._own[place][turn % SLOTS].write(values, tensors)
        self._counts[place].ring()
        for term in self.membership.known.roster.present:
            self._of(term).ring()

    def _of(self, term: Term) -> Other:
        if term.number not in self._others:
            self._others[term.number] = Other(self.membership.known.neighbours[term.number], self._like)
        return self._others[term.number]

    # ---- reading -----------------------------------------------------------------------------------------------------

    @staticmethod
    def key(pipeline: int, place: int, turn: int) -> Key:
        """Return the key of a stage replica's message that a step has ended; its value is a `Published`."""
        return Key(Message.REFERENCE_UPDATE, pipeline, place, place, turn, -1)

    def _collect(self) -> None:
        """Deliver the steps that have ended."""
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
        """Return the tensors published in the last ended step, if any. No step may be in flight."""
        return [self._of(term).slot(place, self._next - 1).tensors for term in self._last]

    def forget_published(self) -> None:
        """Forget what was published in the last step, because the state has been replaced."""
        self._last = []

    def report_late(self) -> bool:
        """Report others that have not published a step in time; False if this cannot be the cause.

        Where all of this pipeline have published a step that has not ended, whatever one of its stages waits
        for, such as the next step's norm, may come from another stage that waits for the end of this step.
        The coordinator ends the late pipelines, or this one; or this process waits and reports again, while
        others compute a result for all.
        """
        turn = self._next
        own = self.membership.known.roster.counting(turn).get(self.membership.pipeline)
        if own is None or own.first + self._of(own).turns_published() <= turn:
            return False
        self.membership.report_late(turn)
        return True

    def once(self, what: str, batches: int, find: Callable[[], Any]) -> Any:
        """Return the result that one pipeline computes for all between two steps, as JSON returns it.

        Another pipeline computes it if that one is lost. Every process calls this before the same step,
        equally often for each name.

        Args:
            batches: number of the loader's batches before it: the position at which a pipeline that joins
                later asks :meth:`found_before`.
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
        """Return in a list the others' result from after ``batches`` batches; empty if there is none."""
        self._asked_again[what, batches] += 1
        return self.membership.found(what, self._asked_again[what, batches], batches)

    # ---- joining pipelines -------------------------------------------------------------------------------------------

    def hand_over(self, place: int, turn: int) -> None:
        """Send the state of a stage replica before step ``turn`` to the pipelines that join with it.

        Only to those with this donor. The step must have begun: until then a load may change the state.
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
        """Wait for the state that this pipeline begins with, and return it."""
        path, size, length = self.membership.received(f"state {place}")
        return bytes(memoryview(Memory.open(path, size))[:length])

    def close(self) -> None:
        self._mailbox.sources.remove(self._collect)
        self.membership.leave()
        self.membership.close()
