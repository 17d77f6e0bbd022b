"""How the ranks of a run find each other: by a store of torch.distributed, and then as its default process group.

The commands' own workers share a file in a folder that is closed to other users, so nothing listens for them. Under
torchrun, or with MASTER_ADDR and MASTER_PORT, it is torch's TCPStore, which anybody who reaches its port may write to.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as Unanswered
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import torch.distributed as dist

from avgpipe.errors import PeerLost, reason
from avgpipe.ranks.process import STORE_FILE, generation

_ANSWER_S = 2.0  # a store that takes longer is held to be cut off
_LONGEST = 4000  # characters of a text
_POLL_S = 0.02
_LOOK_S = 0.5  # between looks whether another rank has failed to connect
ROLL_CALL_S = 2.0  # within which ranks that live notice that something failed, and say that they are there
_END_S = 2.0

T = TypeVar("T")


# ---- what ranks write for each other ---------------------------------------------------------------------------------


def _nothing() -> None:
    pass


class Silence(RuntimeError):
    """A store has not answered in time; it may later."""


class Board:
    """Texts by name in a store of torch.distributed, which all of ``size`` ranks read; this process is ``rank``.

    The store is asked in a thread of its own: its host may stand still or be cut off, and its calls then never return.
    Every method raises RuntimeError where the store is gone, and Silence where it does not answer.
    """

    def __init__(self, store: Any, rank: int = 0, size: int = 1) -> None:
        self.store, self._rank, self._size = store, rank, size
        self._unanswered: Future[Any] | None = None

    @classmethod
    def beside(cls, store: Any, rank: int, size: int, timeout_s: float) -> Board:
        """Use a connection of its own: what others ask ``store`` meanwhile, and wait for, would keep it."""
        try:
            store = in_thread(store.clone).result(timeout_s)
        except NotImplementedError:  # a store of another maker: itself
            pass
        except (RuntimeError, Unanswered) as error:
            why = f"not done after {timeout_s:g} s" if isinstance(error, Unanswered) else reason(error)
            raise PeerLost(f"nobody answers who holds the store, rank 0 or the launcher: {why}") from error
        return cls(store, rank, size)

    def put(self, name: str, text: str) -> None:
        self._ask(lambda: self.store.set(name, _plain(text)))

    def put_first(self, name: str, text: str) -> str:
        """Put a text unless there is one of that name already; return the one that is there then."""
        return self._ask(lambda: str(self.store.compare_set(name, "", _plain(text)).decode()))

    def get(self, name: str) -> str | None:
        def look() -> str | None:
            return str(self.store.get(name).decode()) if self.store.check([name]) else None

        return self._ask(look)

    def count(self, name: str, limit_s: float) -> int:
        """Return how often this was called with ``name``, now included."""
        return self._ask(lambda: int(self.store.add(name, 1)), limit_s)

    def missing(self, place: str, deadline: float, meanwhile: Callable[[], object] = _nothing) -> set[int]:
        """Say that this rank is at ``place``, and wait for all until ``deadline``; return those that did not say so.

        A store that answers late, as on a busy host, is asked again. ``meanwhile`` is called between the questions, and
        ends the wait by True.
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
            time.sleep(_POLL_S)

    def meet(self, place: str, deadline: float, meanwhile: Callable[[], object] = _nothing) -> None:
        """Wait for all at ``place`` until ``deadline`` of the monotonic clock; PeerLost names who is missing."""
        begin = time.monotonic()
        try:
            missing = self.missing(place, deadline, meanwhile)
        except RuntimeError as error:
            what = f"rank {self._rank} cannot meet the others at its {place}"
            raise PeerLost(f"{what}: {reason(error)}") from error
        if missing:
            raise PeerLost(
                f"rank {self._rank} has waited {time.monotonic() - begin:.0f} s at its {place} for {_names(missing)}, "
                "which died before, or does not come here"
            )

    def connect(self, make: Callable[[], T], place: str, limit_s: float) -> T:
        """Return what ``make`` returns, which all ranks call after they have met, to connect to each other.

        PeerLost names who died or stands still meanwhile: those who neither have connected nor noticed that it failed.
        """
        task, deadline, why = in_thread(make), time.monotonic() + limit_s, None
        while why is None and not wait([task], _LOOK_S).done:
            if time.monotonic() > deadline:
                why = f"not done after {limit_s:g} s"
            else:
                with suppress(RuntimeError):
                    why = self.get(f"{place}/failed")
        if why is None:
            try:
                made = task.result()
            except RuntimeError as error:
                why = reason(error)
            else:
                with suppress(RuntimeError):  # for those for whom it failed, if there are any
                    self.put(f"{place}/done/{self._rank}", "here")
                return made
        missing = set(range(self._size)) - {self._rank}
        with suppress(RuntimeError):  # who cannot ask misses all
            self.put_first(f"{place}/failed", why)
            missing = self.missing(f"{place}/done", time.monotonic() + ROLL_CALL_S)
        wait([task], _END_S)  # by its own limit: a thread that ends while Python does aborts the process
        fate = f"{_names(missing)}, which died or stands still" if missing else "others, who are all there"
        raise PeerLost(f"rank {self._rank} cannot connect to {fate}: {why}")

    def _ask(self, question: Callable[[], T], limit_s: float = _ANSWER_S) -> T:
        if self._unanswered is not None and not self._unanswered.done():
            raise Silence("the store does not answer")
        asked = in_thread(question)
        try:
            return asked.result(limit_s)
        except Unanswered:
            self._unanswered = asked
            raise Silence("the store does not answer") from None


def in_thread(action: Callable[[], T]) -> Future[T]:
    """Run ``action`` in a thread, which is left to itself if it never ends."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="avgpipe-task", daemon=True).start()
    return future


def _plain(text: str) -> str:
    """Leave out what UTF-8 cannot say, as half of a surrogate pair, and what is too long for a message."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in sorted(ranks))


# ---- the store and the process group ---------------------------------------------------------------------------------


def private_store() -> Any:
    """Return the store of a launcher of ours; None if there is none."""
    path = os.environ.get(STORE_FILE)
    return None if path is None or os.environ.get("TORCHELASTIC_RUN_ID") else dist.FileStore(path)  # type: ignore[attr-defined]


def open_store(timeout_s: float) -> Any:
    """Return the store of the ranks that a launcher has started; PeerLost if nobody holds it."""
    store = private_store() or _tcp_store(timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    return named_apart(store)


def named_apart(store: Any) -> Any:
    """Return a store for names of ours, those of this generation of ranks alone where some may be replaced."""
    name = "avgpipe" if generation() == 0 else f"avgpipe-{generation()}"
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _tcp_store(timeout_s: float) -> Any:
    """As torch's own rendezvous makes it, but ``Board.meet`` finds ranks that do not come, and names them."""
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
            f"rank {rank} has found nobody who holds the store at {host}:{port} within {timeout_s:g} s, which is for "
            f"rank 0 or the launcher: {reason(error)}"
        ) from error


def join(timeout_s: float, backend: str | None = None, size: int | None = None) -> None:
    """Make the default process group of the ranks that a launcher has started; PeerLost names who does not come.

    Args:
        timeout_s: limit of every wait, and of the group's own waits later.
        backend: of torch.distributed; None: its own choice.
        size: how many of the ranks take part, from the first on; None: all. 1: this process alone, whatever its rank.
    """
    limit = timedelta(seconds=timeout_s)
    if size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)  # type: ignore[attr-defined]
        return
    deadline = time.monotonic() + timeout_s
    rank, size = int(os.environ["RANK"]), size or int(os.environ["WORLD_SIZE"])
    store, meanwhile = open_store(timeout_s), _nothing
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun, which may start workers again
        asking = Board.beside(store, rank, size, timeout_s)
        number, meanwhile = _number_of_start(asking, rank, size, deadline)
        store = dist.PrefixStore(f"start-{number}", store)  # type: ignore[attr-defined]
    board = Board.beside(store, rank, size, timeout_s)
    board.meet("start", deadline, meanwhile)
    board.connect(
        lambda: dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit),
        *("start", timeout_s),
    )


def meet_at_the_end() -> None:
    """Wait for all ranks of the default process group before this one ends: the store may live in it.

    PeerLost where another one has failed there, or does not come within the time limit of the group.
    """
    if not dist.is_initialized():
        return
    try:
        dist.barrier()
    except RuntimeError as error:
        raise PeerLost(
            f"rank {dist.get_rank()} was done, but another one has failed, or was not done in time"
        ) from error


def _number_of_start(board: Board, rank: int, size: int, deadline: float) -> tuple[str, Callable[[], None]]:
    """Return a number for the processes that start together now, and what to do while they meet.

    torchrun keeps one store while it starts workers again, where what the dead have written must not count. Its own
    count of attempts does not tell, for an agent does not count where it ended its worker because another one's had
    failed. So rank 0 counts its starts, and tells the others. Each asks by a name that nobody had before, which no
    process can have answered that was dead by then::

        rank 0    starts += 1, is n        asks/r, is name    answers/name = n         meet as start n
        rank r    asks/r = name                               answers/name, is n       meet as start n
    """
    if rank == 0:
        number = str(board.count("starts", max(_ANSWER_S, deadline - time.monotonic())))
        return number, partial(_answer, board, range(1, size), set(), number)
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
                "or does not come here"
            )
        time.sleep(_POLL_S)
    return found, _nothing


def _answer(board: Board, others: Iterable[int], answered: set[str], number: str) -> None:
    """Tell each rank that asks the number of this start."""
    for rank in others:
        name = board.get(f"asks/{rank}")
        if name is not None and name not in answered:
            board.put(f"answers/{name}", number)
            answered.add(name)
