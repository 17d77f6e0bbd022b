"""Rendezvous of the ranks of a run: by a store of torch.distributed, and then as its default process group.

The commands' own workers share a file in a folder that is closed to other users, so nothing listens for them.
Under torchrun, or with MASTER_ADDR and MASTER_PORT, it is torch's TCPStore, to which anybody who reaches its
port may write.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as Unanswered
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar
from uuid import uuid4
from weakref import finalize

import torch.distributed as dist

from avgpipe.errors import PeerLost, reason
from avgpipe.ranks.environment import STORE_FILE, generation, is_replaceable, named
from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.process import report_ready

_LONGEST = 4000  # characters of a text

T = TypeVar("T")


# ---- texts that ranks share ------------------------------------------------------------------------------------------


def _nothing() -> None:
    pass


def replacements() -> Callable[[], object]:
    """Return a function that says whether ranks will meet again without waiting here, as one is to be replaced."""
    return named("avgpipe.fault.generation:Spares")().are_coming if is_replaceable() else _nothing


class Silence(RuntimeError):
    """A store has not answered in time; it may answer later."""


class Board:
    """Texts by name in a store of torch.distributed, which all ``size`` ranks read; this one is ``rank``.

    The store is called in a thread of its own: its host may be stopped or cut off, and its calls then never
    return. The thread is there from the beginning, as a process without memory can start none, and must still
    report its failure. Every method raises RuntimeError where the store has ended, and Silence where it does
    not answer.
    """

    def __init__(self, store: Any, rank: int = 0, size: int = 1) -> None:
        self.store, self._rank, self._size = store, rank, size
        self._unanswered: Future[Any] | None = None
        self._questions: SimpleQueue[_Question | None] = SimpleQueue()
        threading.Thread(
            target=_answer_all, args=[self._questions], name="avgpipe-board", daemon=True
        ).start()
        finalize(self, self._questions.put, None).atexit = False

    @classmethod
    def beside(cls, store: Any, rank: int, size: int, timeout_s: float) -> Board:
        """Return a board with a connection of its own: calls of other threads to ``store`` may block it."""
        try:
            store = in_thread(store.clone).result(timeout_s)
        except NotImplementedError:  # a store of another library is used itself
            pass
        except (RuntimeError, Unanswered) as error:
            why = f"not done after {timeout_s:g} s" if isinstance(error, Unanswered) else reason(error)
            raise PeerLost(f"the store's holder, rank 0 or the launcher, does not answer: {why}") from error
        return cls(store, rank, size)

    def put(self, name: str, text: str) -> None:
        self._ask(lambda: self.store.set(name, _plain(text)))

    def put_first(self, name: str, text: str) -> str:
        """Put a text unless there is one of that name already; return the text that the store then has."""
        return self._ask(lambda: str(self.store.compare_set(name, "", _plain(text)).decode()))

    def get(self, name: str) -> str | None:
        def look() -> str | None:
            return str(self.store.get(name).decode()) if self.store.check([name]) else None

        return self._ask(look)

    def count(self, name: str, limit_s: float) -> int:
        """Return how often this was called with ``name``, this call included."""
        return self._ask(lambda: int(self.store.add(name, 1)), limit_s)

    def missing(self, place: str, deadline: float, meanwhile: Callable[[], object] = _nothing) -> set[int]:
        """Report this rank at ``place``, and wait for all until ``deadline``; return those that did not.

        A store that answers late, as on a busy host, is asked again. ``meanwhile`` is called between the
        requests, and ends the wait by True.
        """
        missing, is_here, is_over = set(range(self._size)), False, False
        while True:
            try:
                if not is_here:
                    self.put(f"{place}/{self._rank}", "here")
                    is_here = True
                is_over = meanwhile() is True
                missing = {rank for rank in missing if self.get(f"{place}/{rank}") is None}
            except Silence:
                if time.monotonic() > deadline:
                    raise
            if not missing or is_over or time.monotonic() > deadline:
                return missing
            time.sleep(LIMITS.meet_poll_s)

    def meet(self, place: str, deadline: float, meanwhile: Callable[[], object] = _nothing) -> None:
        """Wait for all at ``place`` until ``deadline`` of the monotonic clock; PeerLost names missing ranks."""
        begin = time.monotonic()
        try:
            missing = self.missing(place, deadline, meanwhile)
        except RuntimeError as error:
            what = f"rank {self._rank} cannot meet the others at its {place}"
            raise PeerLost(f"{what}: {reason(error)}") from error
        if missing:
            loss = PeerLost(
                f"rank {self._rank} has waited {time.monotonic() - begin:.0f} s at its {place} for {_names(missing)}, "
                "which died before, or does not arrive"
            )
            loss.has_waited = time.monotonic() > deadline
            raise loss

    def connect(
        self,
        make: Callable[[], T],
        place: str,
        limit_s: float,
        meanwhile: Callable[[], object] = _nothing,
    ) -> T:
        """Return the result of ``make``, which all ranks call after they have met, to connect to each other.

        PeerLost names the ranks that died or are stopped meanwhile: those that neither connected nor noticed
        the failure. ``meanwhile``: see :meth:`missing`.
        """
        task, deadline, why = in_thread(make), time.monotonic() + limit_s, None
        is_late = False
        while why is None and not wait([task], LIMITS.connect_look_s).done:
            if is_late := time.monotonic() > deadline:
                why = f"not done after {limit_s:g} s"
            elif meanwhile() is True:
                why = "a rank is to be replaced"
            else:
                with suppress(RuntimeError):
                    why = self.get(f"{place}/failed")
        if why is None:
            try:
                made = task.result()
            except RuntimeError as error:
                why = reason(error)
            else:
                with suppress(RuntimeError):  # for ranks where it failed, if there are any
                    self.put(f"{place}/done/{self._rank}", "here")
                return made
        missing = set(range(self._size)) - {self._rank}
        with suppress(RuntimeError):  # without the store all count as missing
            self.put_first(f"{place}/failed", why)
            missing = self.missing(f"{place}/done", time.monotonic() + LIMITS.roll_call_s)
        # By its own timeout: a thread that ends while Python ends aborts the process.
        if not wait([task], LIMITS.connect_end_s).done and meanwhile() is True:
            atexit.register(wait, [task], limit_s)
        fate = f"{_names(missing)}, which died or is stopped" if missing else "others, though all are there"
        loss = PeerLost(f"rank {self._rank} cannot connect to {fate}: {why}")
        loss.has_waited = is_late
        raise loss

    def _ask(self, question: Callable[[], T], limit_s: float = LIMITS.store_answer_s) -> T:
        if self._unanswered is not None and not self._unanswered.done():
            raise Silence("the store does not answer")
        asked: Future[T] = Future()
        self._questions.put((question, asked))
        try:
            return asked.result(limit_s)
        except Unanswered:
            self._unanswered = asked
            raise Silence("the store does not answer") from None


_Question = tuple[Callable[[], Any], "Future[Any]"]


def _answer(question: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(question())
    except BaseException as error:
        future.set_exception(error)


def _answer_all(questions: SimpleQueue[_Question | None]) -> None:
    while (asked := questions.get()) is not None:
        _answer(*asked)
        del asked  # which may be all that keeps the board


def in_thread(action: Callable[[], T]) -> Future[T]:
    """Run ``action`` in a thread, which is abandoned if it never ends."""
    future: Future[T] = Future()
    threading.Thread(target=_answer, args=(action, future), name="avgpipe-task", daemon=True).start()
    return future


def _plain(text: str) -> str:
    """Replace what UTF-8 cannot encode, such as half of a surrogate pair; cut off text that is too long."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in sorted(ranks))


# ---- the store and the process group ---------------------------------------------------------------------------------


def private_store() -> Any:
    """Return the store of avgpipe's launcher; None if there is none."""
    path = os.environ.get(STORE_FILE)
    return None if path is None or os.environ.get("TORCHELASTIC_RUN_ID") else dist.FileStore(path)  # type: ignore[attr-defined]


def open_store(timeout_s: float) -> Any:
    """Return the store of the ranks that a launcher has started; PeerLost if no process holds it."""
    store = private_store() or _tcp_store(timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    return named_apart(store)


def named_apart(store: Any) -> Any:
    """Return a store with a prefix for avgpipe, and for this generation where ranks may be replaced."""
    name = "avgpipe" if generation() == 0 else f"avgpipe-{generation()}"
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _tcp_store(timeout_s: float) -> Any:
    """Make the store as torch's own rendezvous does; but ``Board.meet`` finds and names missing ranks."""
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except KeyError as error:
        raise ValueError(
            f"RANK and WORLD_SIZE are set, but not {error.args[0]}: start the ranks with torchrun or avgpipe run, or "
            "set MASTER_ADDR and MASTER_PORT"
        ) from None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    holds = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=timeout_s)
    try:
        return dist.TCPStore(host, port, size, holds, limit, wait_for_workers=False, multi_tenant=True)  # type: ignore[attr-defined]
    except RuntimeError as error:
        if holds:
            raise
        raise PeerLost(
            f"rank {rank} found no store at {host}:{port} within {timeout_s:.3g} s, which rank 0 or the launcher "
            f"must hold: {reason(error)}"
        ) from error


def join(timeout_s: float, backend: str | None = None, size: int | None = None) -> None:
    """Make the default process group of the ranks that a launcher has started; PeerLost names missing ranks.

    Args:
        timeout_s: limit of every wait, and of the group's own waits later. At their start ranks wait longer for the
            others, by as long as they themselves have run, at most LIMITS.start_s: under load imports take long.
        backend: of torch.distributed; None: its own choice.
        size: how many of the ranks take part, from the first on; None: all. 1: this process alone, whatever
            its rank.
    """
    limit = timedelta(seconds=timeout_s)
    if size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)  # type: ignore[attr-defined]
        return
    report_ready()
    deadline = time.monotonic() + timeout_s + (0.0 if generation() else min(_start_s(), LIMITS.start_s))
    rank, size = int(os.environ["RANK"]), size or int(os.environ["WORLD_SIZE"])
    store, coming = open_store(deadline - time.monotonic()), replacements()
    meanwhile = coming
    if os.environ.get("TORCHELASTIC_RUN_ID"):  # torchrun, which may restart workers
        asking = Board.beside(store, rank, size, timeout_s)
        number, meanwhile = _number_of_start(asking, rank, size, deadline)
        store = dist.PrefixStore(f"start-{number}", store)  # type: ignore[attr-defined]
    board = Board.beside(store, rank, size, timeout_s)
    board.meet("start", deadline, meanwhile)
    # Torch names a group by its number, also after a group that could not be made. A new rank counts from 0.
    dist.distributed_c10d._world.group_count = 0
    board.connect(
        lambda: dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit),
        *("start", timeout_s, coming),
    )


@cache
def _start_s() -> float:
    """Return how long this process had run when this was first called."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def meet_at_the_end() -> None:
    """Wait for all ranks of the default process group before this one ends, as it may hold the store.

    PeerLost where another rank has failed there, or does not arrive within the group's timeout.
    """
    if not dist.is_initialized():
        return
    try:
        dist.barrier()
    except RuntimeError as error:
        raise PeerLost(
            f"rank {dist.get_rank()} was done, but another rank has failed, or was not done in time"
        ) from error


def _number_of_start(board: Board, rank: int, size: int, deadline: float) -> tuple[str, Callable[[], None]]:
    """Return a number for the processes that start together now, and a function to call while they meet.

    torchrun keeps one store while it restarts workers, where texts of dead workers must not count. Its own
    count of attempts does not help: an agent does not count when it ends its worker because another agent's
    had failed. So rank 0 counts its starts, and passes the number to the others. Each rank asks under a new,
    unique name, which no process that was dead by then can have answered::

        rank 0    starts += 1, is n        asks/r, is name    answers/name = n         meet as start n
        rank r    asks/r = name                               answers/name, is n       meet as start n
    """
    if rank == 0:
        number = str(board.count("starts", max(LIMITS.store_answer_s, deadline - time.monotonic())))
        return number, partial(_answer_others, board, range(1, size), set(), number)
    name, begin = uuid4().hex, time.monotonic()
    is_asked, found = False, None
    while found is None:
        with suppress(Silence):  # a store that answers late is asked again
            if not is_asked:
                board.put(f"asks/{rank}", name)
                is_asked = True
            found = board.get(f"answers/{name}")
        if found is None and time.monotonic() > deadline:
            raise PeerLost(
                f"rank {rank} has waited {time.monotonic() - begin:.0f} s at its start for rank 0, which died before, "
                "or does not arrive"
            )
        time.sleep(LIMITS.meet_poll_s)
    return found, _nothing


def _answer_others(board: Board, others: Iterable[int], answered: set[str], number: str) -> None:
    """Answer each rank that asks with the number of this start."""
    for rank in others:
        name = board.get(f"asks/{rank}")
        if name is not None and name not in answered:
            board.put(f"answers/{name}", number)
            answered.add(name)
