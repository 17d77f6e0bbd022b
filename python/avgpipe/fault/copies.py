"""Copies of each process's state in memory: its own, and its neighbour's, to replace a lost process.

At intervals, between two batches, each process copies the state of its stages, and sends the copy to the
process with the next number, piece by piece, in time that it would spend waiting. Two copies are kept of
each, as the newest may not be complete where it is needed. The process that replaces a lost one gets its
state from the neighbour, and the others restore their own::

    batches  0 ......... B0 ......... B1 ....x          x: a process is lost
    copies               own, sent    own, in flight
    then     all at B0 again; batches B0 ... x again; on
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from avgpipe.checkpoint.load import restore
from avgpipe.checkpoint.snapshot import Snapshot, unpacked
from avgpipe.errors import CheckpointError, PipelineError, reason
from avgpipe.links.link import Key
from avgpipe.model.model import Model
from avgpipe.ranks.world import World
from avgpipe.runtime.route import copy_key
from avgpipe.runtime.worker import Worker

_log = logging.getLogger("avgpipe")
_PIECE_BYTES = 1 << 20
_KEPT = 2
_AGREE = 8  # copies between two agreements, once the interval is steady
_CHANGE = 1.25  # of the interval, within which it is steady
_SHARE = 0.75  # of the time: a copy counts once it has arrived, and batches vary


class Received:
    """A packed copy of the neighbour's state, received piece by piece.

    Attributes:
        batches: batches before it; None once it can no longer be restored.
        sizes: of its parts, in bytes, received first; empty where the copy was left out.
    """

    def __init__(self, batches: int | None = None) -> None:
        self.batches = batches
        self.sizes: list[int] | None = None
        self.pieces: list[torch.Tensor] = []

    def add(self, piece: torch.Tensor) -> None:
        if self.sizes is not None:
            self.pieces.append(piece)
        else:
            self.sizes = piece.tolist()

    @property
    def messages(self) -> int:
        """The number of messages received."""
        return len(self.pieces) + (self.sizes is not None)

    @property
    def is_whole(self) -> bool:
        sizes = self.sizes or []
        return bool(sizes) and sum(map(len, self.pieces)) == sum(sizes)

    @property
    def is_awaited(self) -> bool:
        """Whether more messages will arrive."""
        return self.batches is not None and self.sizes != [] and not self.is_whole


class Intervals:
    """The number of batches between two copies, the same on all ranks.

    Args:
        every_s: the seconds between two copies.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._batch_s: float | None = None

    def after(self, passed: int, elapsed_s: float) -> int:
        """Return the next number of batches; ``passed`` of them took ``elapsed_s`` since the last copy.

        A pause, or a copy on request, says little about the time of a batch: the number at most doubles or
        halves. So it also grows from the first batches, which may be slow.
        """
        if not passed:
            return 1
        batch_s = max(elapsed_s, 1e-3) / passed
        if self._batch_s is not None:
            batch_s = min(max(batch_s, self._batch_s / 2), self._batch_s * 2)
        self._batch_s = batch_s
        return max(1, round(self._every_s / batch_s))


def _left_out(number: int) -> str:
    """Name of the note that a rank had no room for a copy, which can then not be restored."""
    return f"copies/{number}/left out"


class StateCopies:
    """The copies that one process holds.

    Args:
        every_s: about how many seconds of work are lost at most.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._worker: Worker | None = None
        self._begin_again(Snapshot(), None)

    def _begin_again(self, own: Snapshot, received: Received | None) -> None:
        """Begin, or continue from a copy, with what a new rank has: no other copies, and no intervals."""
        self._own = [Snapshot(), own]  # the oldest first
        # Of the process before, by their numbers.
        self._theirs: dict[int, Received] = {} if received is None else {0: received}
        self._sending: list[tuple[Key, torch.Tensor]] = []
        self._interval, self._late = 1, 0  # batches between copies; by which the last copy must be sent
        self._is_steady, self._count = False, 0  # since the last recovery; number of copies since then
        self._intervals = Intervals(_SHARE * self._every_s)
        self.ask_for_one()

    def attach(self, worker: Worker) -> None:
        """Use another worker's links from now on."""
        self._worker, self._sending = worker, []
        worker.scheduler.background = self.send_piece

    @property
    def _batches(self) -> list[int]:
        """Batches before the copies of this process's own state, ascending."""
        return [snapshot.batches for snapshot in self._own if snapshot.contents]

    # ---- taking and sending ------------------------------------------------------------------------------------------

    def is_due(self, batches: int) -> bool:
        """Whether a copy is due before the next batch, on all ranks alike; send late pieces of the last."""
        if batches >= self._late:
            self._send_all()
        return batches >= self._due

    def _send_all(self) -> None:
        while self.send_piece():
            pass

    def _receive_all(self) -> None:
        """Wait for the rest of the newest copy of the process before; no batch may be in flight."""
        self.collect()
        newest = self._theirs.get(self._count)
        while self._worker is not None and newest is not None and newest.is_awaited:
            key = copy_key(self._worker.placement, self._worker.world.rank, self._count)
            self._worker.scheduler.wait_for([key._replace(micro_batch=newest.messages)])
            self.collect()

    def ask_for_one(self) -> None:
        """Have a copy taken before the next batch."""
        self._due = 0  # batches before the next copy
        # Time and batches of the last agreement; None after a pause, which says nothing about batches.
        self._agreed: tuple[float, int] | None = None

    def forget(self) -> None:
        """Drop all copies, because other weights were loaded; have one taken before the next batch."""
        self._own = [Snapshot() for _ in range(_KEPT)]
        for received in self._theirs.values():  # what is in flight still arrives
            received.batches = None
        self._sending = []
        self.ask_for_one()

    @property
    def _agrees(self) -> bool:
        """Whether the ranks agree on the interval at the copy that is due; no batch may be in flight then."""
        return self._agreed is None or not (self._is_steady and self._count % _AGREE)

    def must_wait(self, in_flight: int) -> bool:
        """Whether the copy that is due must wait for the batches in flight, ``in_flight`` at most."""
        return self._must_meet(in_flight) or self._own[-1].is_under_way

    def _must_meet(self, in_flight: int) -> bool:
        """Whether no rank may take the copy that is due before all have received the one before.

        Two are kept, this one among them, so the one before must be complete everywhere. It was sent by the
        middle of the batches between the two at the latest, and another rank is behind this one by no more
        than the batches in flight.
        """
        return self._agrees or self._interval < 2 * (in_flight + 1)

    def settle(self) -> None:
        """Finish the copy in progress; no batch may be in flight."""
        self._own[-1].finish()

    def begin(self, model: Model, worker: Worker, batches: int, in_flight: int) -> None:
        """Take a copy of the state after ``batches`` batches: see :meth:`Snapshot.begin`. Collective."""
        world = worker.world
        self._send_all()
        now = time.monotonic()
        elapsed = 0.0
        if self._must_meet(in_flight):
            self._receive_all()  # pieces of the process before may still be queued there
            elapsed = max(world.gather(0.0 if self._agreed is None else now - self._agreed[0]))
        if self._agrees:
            if self._agreed is not None:
                found = self._intervals.after(batches - self._agreed[1], elapsed)
                self._is_steady = 1 / _CHANGE <= found / self._interval <= _CHANGE
                self._interval = found
            self._agreed = now, batches
        if self._keeps_oldest(world):
            snapshot = self._own.pop()
            self._theirs.pop(self._count, None)
        else:
            snapshot = self._own.pop(0)
        self._own.append(snapshot)
        number = self._count = self._count + 1
        self._due = batches + self._interval
        self._late = batches + self._interval // 2
        self._theirs[number] = Received(batches)
        for old in sorted(self._theirs)[:-_KEPT]:
            del self._theirs[old]

        def send() -> None:
            try:
                snapshot.whole()
                parts = snapshot.packed()
            except CheckpointError:  # no copy can ever be taken
                raise
            except (MemoryError, RuntimeError) as error:
                _log.warning("the copy in memory before batch %d is left out: %s", batches, reason(error))
                world.note(_left_out(number), "")
                parts = []
            pieces = [torch.tensor([len(part) for part in parts])]
            pieces += [piece for part in parts for piece in torch.split(part, _PIECE_BYTES)]
            key = copy_key(worker.placement, (world.rank + 1) % world.size, number)
            self._sending = [(key._replace(micro_batch=m), piece) for m, piece in enumerate(pieces)]

        snapshot.begin(model, worker, batches, send)

    def _keeps_oldest(self, world: World) -> bool:
        """Whether the next copy replaces the newest, which a rank has left out.

        All ranks decide the same: it was noted before any rank reaches this. Not twice in a row, because
        batches are kept since the oldest copy.
        """
        newest, before = (
            world.noted(_left_out(number)) is not None for number in (self._count, self._count - 1)
        )
        return newest and not before

    def send_piece(self) -> bool:
        """Send one more piece, if there is one."""
        if not self._sending or self._worker is None:
            return False
        key, value = self._sending.pop(0)
        self._worker.links[key.target].send(key, value)
        return True

    def collect(self) -> None:
        """Receive the pieces of the process before that have arrived."""
        if (worker := self._worker) is None:
            return
        worker.mailbox.collect()
        for number, received in self._theirs.items():
            key = copy_key(worker.placement, worker.world.rank, number)
            while (following := key._replace(micro_batch=received.messages)) in worker.mailbox:
                received.add(worker.mailbox.take(following))

    @property
    def oldest(self) -> int:
        """Batches before the oldest copy: later ones may be needed again."""
        return min([*self._batches, self._own[-1].batches])  # the newest may be in progress, or left out

    # ---- restoring ---------------------------------------------------------------------------------------------------

    def go_back(
        self, world: World, model: Model, worker: Worker, earliest: int, latest: float, has_all: bool = False
    ) -> int:
        """Restore the newest state that all ranks can have; return the batches before it. Collective.

        Before the first copy is whole that is the initial state, in which ``worker`` is: 0 batches. PipelineError
        where there is none.

        Args:
            earliest: batches before the last call that a new rank cannot make; -1 if there is none.
            latest: batches after which a new rank would miss what this one does; infinity on a new one.
            has_all: whether this rank has all batches and calls since the beginning.
        """
        theirs = [of.batches for of in self._theirs.values() if of.is_whole and of.batches is not None]
        said = world.gather([self._batches, theirs, earliest, latest, has_all])
        lacking = [rank for rank, (own, *_) in enumerate(said) if not own]
        common = [own for own, *_ in said if own]
        common += [said[(rank + 1) % world.size][1] for rank in lacking]
        usable = set.intersection(*map(set, common)) if common else set()
        _, _, begins, ends, have_all = zip(*said)
        is_there, usable = bool(usable), {n for n in usable if max(begins) <= n <= min(ends)}
        if not usable and all(have_all):
            self._begin_again(Snapshot(), None)
            return 0
        if not usable:
            what = f"no memory has a copy of what rank {', '.join(map(str, lacking))} held"
            if len(lacking) == world.size:
                what = "no copy is whole yet, and a call before the first batch cannot be repeated"
            elif is_there:
                calls = "calls between batches, such as load() and predict()"
                what = f"no copy has been taken since {calls}, which a new process would not make"
            raise PipelineError(f"{what}: go on from a checkpoint")
        batches: int = max(usable)
        contents = next((own.contents for own in self._own if own.contents and own.batches == batches), None)
        for rank in lacking:
            given = self._pass_on(world, rank, batches)
            contents = given if world.rank == rank else contents
        assert contents is not None
        restore(contents, model, worker)
        # Keep this copy until there are newer ones: a rank may be lost before.
        self._begin_again(Snapshot.of(batches, contents), self._theirs_of(batches))
        return batches

    def _theirs_of(self, batches: int) -> Received | None:
        whole = (of for of in self._theirs.values() if of.is_whole and of.batches == batches)
        return next(whole, None)

    def _pass_on(self, world: World, rank: int, batches: int) -> dict[int, dict[str, Any]] | None:
        """Send a lost rank's state to the process that has its number now, where it is returned."""
        donor = (rank + 1) % world.size
        received = self._theirs_of(batches) or Received()
        sizes: list[int] = world.gather(received.sizes or [])[donor]
        if world.rank not in (donor, rank):
            return None
        whole = (
            torch.cat(received.pieces) if world.rank == donor else torch.empty(sum(sizes), dtype=torch.uint8)
        )
        world.pass_on(whole, donor, rank)
        # Each in memory of its own, as it was: a view of the whole may begin anywhere.
        return unpacked([part.clone() for part in torch.split(whole, sizes)])  # type: ignore[no-any-return]
