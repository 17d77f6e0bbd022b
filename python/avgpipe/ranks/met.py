"""The ranks of one pipeline after their rendezvous: reports of failures, and collectives on the CPU side.

Rendezvous and transport are torch.distributed's. Each pipeline has a gloo group of its own, so its messages
can mix neither with the caller's nor with those of another pipeline.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from avgpipe.errors import PeerLost, PipelineError, PipelineTimeout, reason, text_of
from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.rendezvous import Board, named_apart, private_store, replacements
from avgpipe.ranks.world import Notice, World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

_PREEMPTED = "preempted"  # name of a text
_PASS_TAG = 2**30  # no link uses it
_NO_TAG = 2**21  # which no message has
_AT_ONCE = timedelta(milliseconds=1)
_MOST_BYTES = 2**30  # of a rank's value in gather


class Met(World):
    """Several ranks, after their rendezvous.

    Args:
        timeout_s: limit of every wait.
        members: the group that has these ranks, by their numbers in it; None: the default group.
    """

    def __init__(self, timeout_s: float, members: dist.ProcessGroup | None = None) -> None:
        super().__init__(timeout_s)
        self._limit = timedelta(seconds=timeout_s)
        self._connections, self._meanwhile = 0, replacements()
        self._members = members
        self.rank, self.size = dist.get_rank(members), dist.get_world_size(members)
        deadline = time.monotonic() + timeout_s
        store = private_store() or dist.distributed_c10d._get_default_store()
        store = named_apart(store)
        if members is not None:  # other groups have pipelines of their own
            place = "ranks-" + "-".join(map(str, dist.get_process_group_ranks(members)))
            store = dist.PrefixStore(place, store)  # type: ignore[attr-defined]
        board = Board.beside(store, self.rank, self.size, timeout_s)
        number = board.count(f"pipelines/{self.rank}", timeout_s)  # all ranks make the same ones
        own = dist.PrefixStore(f"pipeline-{number}", board.store)  # type: ignore[attr-defined]
        self._board = Board(own, self.rank, self.size)
        self._board.meet(
            "Pipeline" if number == 1 else f"Pipeline number {number}", deadline, self._meanwhile
        )
        self.group = self.connect(lambda: self.new_group(range(self.size), "gloo"))

    def new_group(self, ranks: Iterable[int], backend: str, options: Any = None) -> dist.ProcessGroup:
        """Make a group of some ranks, with longer timeouts than ours. All ranks call this, in one order.

        ``options``: the backend's own.
        """
        limit = timedelta(seconds=self.timeout_s + LIMITS.group_spare_s)
        if self._members is None:
            made = dist.new_group(list(ranks), timeout=limit, backend=backend, pg_options=options)
        else:  # ranks outside of the pipeline's group do not call this
            of_all = [dist.get_global_rank(self._members, rank) for rank in ranks]
            made = dist.new_group(
                of_all, timeout=limit, backend=backend, pg_options=options, use_local_synchronization=True
            )
        return cast("dist.ProcessGroup", made)

    def connect(self, make: Callable[[], T]) -> T:
        """Return the result of ``make``, which connects all ranks; PeerLost names those that fail to."""
        self._connections += 1
        place = f"connection {self._connections}"
        return self._board.connect(make, place, self.timeout_s, self._meanwhile)

    def beside(self) -> World:
        """Return a world of the same ranks with another group, for another thread. Every rank calls this."""
        threads = copy.copy(self)
        threads.group = self.connect(lambda: self.new_group(range(self.size), "gloo"))
        return threads

    def store(self) -> Any:
        """Return this pipeline's store by a connection of its own, since its calls may wait for a rank."""
        store = Board.beside(self._board.store, self.rank, self.size, self.timeout_s).store
        store.set_timeout(self._limit)
        return store

    def pass_on(self, tensor: torch.Tensor, source: int, target: int) -> None:
        """Send a CPU tensor from rank ``source`` into that of ``target``, of the same size; others return."""
        if self.group is None or self.rank not in (source, target):
            return
        with self._explaining():
            work = (
                self.group.send([tensor], target, _PASS_TAG)
                if self.rank == source
                else self.group.recv([tensor], source, _PASS_TAG)
            )
            work.wait(self._limit)

    def disconnect(self) -> None:
        if self.group is not None:  # else it was lost while they connected
            break_off(self.group, (self.rank + 1) % self.size)

    # ---- failures ------------------------------------------------------------------------------------------------

    def report(self, failure: BaseException) -> None:
        """Report this rank's failure to all ranks. Only the first is kept: later ones follow from it."""
        with suppress(RuntimeError):  # the store ended with its holder; peers notice the closed connection
            self._board.put_first(
                "failure", f"rank {self.rank}: {type(failure).__name__}: {text_of(failure)}"
            )
            if self._spares is not None and not isinstance(failure, PeerLost | PipelineTimeout):
                self._spares.give_up()

    def reported(self) -> PeerLost | None:
        """Return the error that names the first failure reported by another rank; None if there is none."""
        with suppress(RuntimeError):
            first = self._board.get("failure")
            if first is not None and not first.startswith(f"rank {self.rank}:"):
                return PeerLost(f"rank {self.rank} stops because of {first}")
        return None

    def is_first(self, what: str) -> bool:
        """Return whether this rank is the first to call this with ``what``."""
        try:
            return self._board.put_first(what, str(self.rank)) == str(self.rank)
        except RuntimeError:
            return True

    def first(self, name: str, text: str) -> str:
        """Return the text of this name: ``text``, unless another rank has put one before.

        RuntimeError where the store does not answer.
        """
        return self._board.put_first(name, text)

    def note_doing(self, doing: str) -> None:
        """Publish what this rank is doing."""
        with suppress(RuntimeError):  # as in report
            self._board.put(f"doing/{self.rank}", f"{time.time():.3f} {doing}")

    def note_pace(self, pace: str) -> None:
        """Publish this rank's pace, for the first rank."""
        with suppress(RuntimeError):  # as in report
            self._board.put(f"pace/{self.rank}", pace)

    def paces(self) -> list[str | None]:
        """Return the published pace of each rank; empty where the store does not answer."""
        with suppress(RuntimeError):
            return [self._board.get(f"pace/{rank}") for rank in range(self.size)]
        return []

    def last_seen(self, rank: int) -> str:
        """Return what ``rank`` was last seen doing."""
        try:
            text = self._board.get(f"doing/{rank}")
        except RuntimeError as error:
            return f"rank {rank} cannot be asked: {reason(error)}"
        if text is None:
            return f"rank {rank} has not reported yet"
        at, _, doing = text.partition(" ")
        return f"rank {rank} was last seen {max(0.0, time.time() - float(at)):.0f} s ago: {doing}"

    def note(self, name: str, text: str) -> None:
        """Put a text where all ranks can read it; RuntimeError where the store does not answer."""
        self._board.put(name, text)

    def noted(self, name: str) -> str | None:
        return self._board.get(name)

    def lost(self, peer: int, doing: str) -> PeerLost:
        """Return the error for a broken connection to ``peer``, which names the rank that failed first."""
        return self.reported() or PeerLost(
            f"{self.name(peer)} died or closed its connection; seen by rank {self.rank} when {doing}"
        )

    # ---- collectives on CPU memory -------------------------------------------------------------------------------

    def barrier(self) -> None:
        with self._explaining():
            dist.barrier(self.group, async_op=True).wait(self._limit)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Return the tensor of rank ``source`` on every rank, on the device of this rank's own tensor."""
        buffer = tensor.detach().cpu().contiguous()
        with self._explaining():
            dist.broadcast(buffer, group_src=source, group=self.group, async_op=True).wait(self._limit)
        return buffer.to(tensor.device)

    def gather(self, value: Any) -> list[Any]:
        """Return a value of every rank, in rank order, as JSON returns it."""
        with self._explaining():
            return gather(value, self.group, self._limit)

    def require_same(self, what: str, text: str) -> None:
        """Refuse, on every rank, a ``text`` that differs between ranks."""
        digests = self.gather(hashlib.sha256(text.encode()).hexdigest())
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if different:
            texts = self.gather(text)
            theirs = texts[different[0]]
            shown = " and ".join(
                f"rank {rank} has {_around(texts[rank], _first_difference(texts[0], theirs))}"
                for rank in (0, different[0])
            )
            raise ValueError(
                f"the {what} differs between ranks: ranks {different} disagree with rank 0: {shown}; every rank must "
                "build the same"
            )

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Where a collective fails, raise an error with the first report, or the ranks without answer."""
        start = time.monotonic()
        try:
            yield
        except PipelineError:
            raise
        except RuntimeError as error:
            raise self._cause(error, time.monotonic() - start) from error

    def _cause(self, error: RuntimeError, waited_s: float) -> PipelineError:
        what = transport_reason(error)
        if (loss := self.reported()) is not None:
            return loss
        spares = self._spares if waited_s >= self.timeout_s else None
        if spares is not None:
            spares.note_wait()

        def is_replaced() -> bool:
            return spares is not None and spares.are_coming()

        try:
            missing = self._board.missing("here", time.monotonic() + LIMITS.roll_call_s, is_replaced)
        except RuntimeError as silence:
            return PeerLost(
                f"rank {self.rank} is cut off from the others, or the holder of the store died, rank 0 or "
                f"the launcher: {reason(silence)}; {what}"
            )
        if (loss := self.reported()) is not None:
            return loss
        if is_replaced():
            return PipelineTimeout(
                f"rank {self.rank} waited {self.timeout_s:g} s for a rank that is to be replaced: {what}"
            )
        if not missing:
            others = ", ".join(self.name(rank) for rank in range(self.size) if rank != self.rank)
            return PipelineError(
                f"rank {self.rank} has no working connection to {others}, though all of them reach the store: "
                f"{what}"
            )
        names = ", ".join(map(self.name, sorted(missing)))
        if waited_s < self.timeout_s:
            return PeerLost(f"{names} died or closed its connection; seen by rank {self.rank}: {what}")
        seen = "; ".join(self.last_seen(rank) for rank in sorted(missing))
        return PipelineTimeout(
            f"rank {self.rank} waited {self.timeout_s:g} s for {names}, which does not answer; {seen}"
        )


def gather(value: Any, group: dist.ProcessGroup | None = None, limit: timedelta | None = None) -> list[Any]:
    """Return a small value of every rank of ``group`` (None: the default), in rank order, as JSON returns it.

    Values travel as bytes in tensors: nothing received is unpickled. Every wait ends after ``limit``, or
    after the group's own timeout.
    """
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")

    def all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
        own = tensor.to(device)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        work = dist.all_gather(parts, own, group=group, async_op=True)
        work.wait() if limit is None else work.wait(limit)
        return parts

    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [int(size) for size in all_gather(torch.tensor([len(own)]))]
    if not 0 < min(sizes) <= max(sizes) <= _MOST_BYTES:
        raise PipelineError(f"ranks would gather {sizes} bytes: each gives 1 to {_MOST_BYTES}")
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(own)] = own
    return [json.loads(part[:size].cpu().numpy().tobytes()) for part, size in zip(all_gather(padded), sizes)]


def break_off(group: Any, other: int) -> None:
    """Close all connections of a group of gloo at once: what is under way ends with an error, here and elsewhere.

    Destroying the group does not, as long as anything refers to it. A receive whose time is up does. ``other``: a
    rank of the group, not this one.
    """
    with suppress(RuntimeError):
        group.recv([torch.empty(1)], other, _NO_TAG).wait(_AT_ONCE)


def is_of_transport(error: BaseException) -> bool:
    """Whether a collective of torch.distributed has failed."""
    is_gloo = isinstance(error, RuntimeError) and "gloo" in text_of(error)
    return not isinstance(error, PipelineError) and (isinstance(error, dist.DistError) or is_gloo)


def transport_reason(error: BaseException) -> str:
    """Return gloo's message in an error, without its source position and advice."""
    text = str(error).split("This is typically")[0].split("\n")[0]
    return text.rpartition(".cc:")[2].partition("] ")[2].strip() or text.strip()


# ---- watching ----------------------------------------------------------------------------------------------------


class Watchdog:
    """A thread that publishes what this rank is doing, and reports the failure of others to this rank.

    It works while the main thread computes, waits, or hangs in a user's layer. A process of this host is
    watched by its descriptor, which becomes readable when it ends, for whatever cause.

    Args:
        waits: of the main thread for other ranks: ``fail(error, source=None)`` ends those for one, or all.
        doing: returns what the main thread is doing.
        processes: process ids of the ranks on this host, by rank.
        pace: of this rank, as a text: published too, and compared with that of the others on the first rank.
        looks: functions to call repeatedly.
    """

    def __init__(
        self,
        world: Met,
        waits: Any,
        doing: Callable[[], str],
        processes: Mapping[int, int],
        pace: Any = None,
        looks: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._world, self._waits, self._doing = world, waits, doing
        self._pace, self._looks = pace, looks
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}  # by descriptor
        for rank, process in processes.items():
            try:
                self._ranks[os.pidfd_open(process)] = rank
            except ProcessLookupError:
                self._lost(rank)
        self._wake_read, self._wake_write = os.pipe()
        for descriptor in (*self._ranks, self._wake_read):
            self._poll.register(descriptor, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="avgpipe-watchdog", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        noted = seen = pace = ""
        noted_at = float("-inf")
        while True:
            for descriptor, _ in self._poll.poll(1000 * LIMITS.tick_s):
                if descriptor == self._wake_read:
                    return
                self._poll.unregister(descriptor)
                self._lost(self._ranks[descriptor])
            doing = self._doing()
            # Short activities are published seldom: a store may keep all that was ever written.
            if doing != noted and (doing == seen or time.monotonic() > noted_at + LIMITS.note_s):
                self._world.note_doing(doing)
                noted, noted_at = doing, time.monotonic()
            seen = doing
            if self._pace is not None and pace != self._pace.reading:
                pace = self._pace.reading
                self._world.note_pace(pace)
                if self._world.rank == 0:
                    self._pace.compare(self._world.paces())
            for look in self._looks:
                look()
            if (loss := self._world.reported()) is not None:
                self._waits.fail(loss)

    def _lost(self, rank: int) -> None:
        """End the waits for a rank that has ended; other waits continue."""
        self._waits.fail(self._world.lost(rank, "watching its process"), rank)

    def close(self) -> None:
        os.write(self._wake_write, b"x")
        self._thread.join(LIMITS.watchdog_end_s)
        for descriptor in (*self._ranks, self._wake_read, self._wake_write):
            os.close(descriptor)


# ---- preemption -----------------------------------------------------------------------------------------------------


class Preemption(Notice):
    """Decides where several ranks stop that will be ended soon, without a collective; each asks at the same places.

    A rank that learns of its preemption, from a signal or from the others' store, publishes the next place that
    it has not passed, goes on to that place, and waits there until all ranks have published theirs. All stop at
    the greatest. A thread publishes and reads the places, so that a rank which waits for another one's work
    delays no rank.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._lock = threading.Lock()
        self._place: int | None = None  # at which this rank asked last
        self._announced: int | None = None  # the next place, which it has not passed
        self._is_written = False
        self._agreed = threading.Event()
        self._stop = 0  # the place at which all stop

    @property
    def is_known(self) -> bool:
        """Whether this process will be ended, or knows that another one will."""
        return self.is_noticed or self._announced is not None

    def is_due(self, place: int) -> bool:
        """Whether to stop at ``place``, a number that grows; the same on all ranks that ask there.

        PeerLost or PipelineTimeout where another rank does not publish its place.
        """
        with self._lock:
            self._place, announced = place, self._announced
        if announced is None or place < announced:
            return False
        self._await()
        return place >= self._stop

    def _await(self) -> None:
        deadline = time.monotonic() + self._world.timeout_s
        while not self._agreed.wait(LIMITS.preempt_look_s):
            if (loss := self._world.reported()) is not None:
                raise loss
            if time.monotonic() > deadline:
                raise PipelineTimeout(
                    f"rank {self._world.rank} waited {self._world.timeout_s:g} s for the place at which the "
                    "others can stop before they are ended: every rank must read pipeline.preempted"
                )

    def look(self) -> None:
        """Publish this rank's place, and read those of the others; called repeatedly by a thread."""
        if self._agreed.is_set() or self._place is None:
            return
        with suppress(RuntimeError):  # the store does not answer: next time
            if self._announced is None:
                if not (self.is_noticed or self._world.noted(_PREEMPTED)):
                    return
                with self._lock:
                    self._announced = self._place + 1
            if not self._is_written:
                self._world.note(_PREEMPTED, "yes")
                self._world.note(f"{_PREEMPTED}/{self._world.rank}", str(self._announced))
                self._is_written = True
            places = [self._world.noted(f"{_PREEMPTED}/{rank}") for rank in range(self._world.size)]
            if None not in places:
                self._stop = max(int(place) for place in places if place is not None)
                self._agreed.set()


_SHOWN = 60  # characters on each side of a difference


def _first_difference(a: str, b: str) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _around(text: str, place: int) -> str:
    """Return the text around a position, on one line."""
    first, end = max(0, place - _SHOWN), place + _SHOWN
    shown = " ".join(text[first:end].split())
    return f"{'...' if first else ''}{shown}{'...' if end < len(text) else ''}"


# ---- the ranks of a mesh ---------------------------------------------------------------------------------------------


def members_of(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group of the ranks of a pipeline; None: all ranks.

    Raises:
        TypeError: not a mesh or group, such as torch's value for a rank that is in no group.
        ValueError: both were given, the mesh has several dimensions, or this rank is not in it.
    """
    if mesh is not None and group is not None:
        raise ValueError("mesh and group both say which ranks this pipeline has: give one of the two")
    if mesh is not None:
        return _of_mesh(mesh)
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a torch.distributed process group that this rank is in, not {group!r}"
        )
    return group


def _of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    names = getattr(mesh, "mesh_dim_names", None)
    if not hasattr(mesh, "get_group"):
        raise TypeError(
            f"mesh must be a torch.distributed.device_mesh.DeviceMesh, as device_mesh['pp'], not {mesh!r}"
        )
    if mesh.ndim != 1:
        which = f"mesh[{names[-1]!r}]" if names else "a mesh with mesh_dim_names, by name"
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions ({', '.join(names) if names else 'without names'}), and a pipeline "
            f"takes the one along which its stages lie: pass it alone, such as {which}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in {mesh}: make its Pipeline with the mesh that it is in"
        )
    return mesh.get_group()


def whole_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that ``mesh`` is a dimension of."""
    # Private, and the only way back: the tests run it under the oldest torch and the newest.
    return mesh._get_root_mesh()
