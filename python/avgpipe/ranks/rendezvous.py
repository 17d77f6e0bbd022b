"""How the ranks of a run find each other: by a store of torch.distributed, and then as its default process group.

The commands' own workers share a file in a folder that is closed to other users, so nothing listens for them. Under
torchrun, or with MASTER_ADDR and MASTER_PORT, it is torch's TCPStore, which anybody who reaches its port may write to.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from avgpipe.errors import PeerLost, reason
from avgpipe.ranks.board import Board, Silence, Task
from avgpipe.ranks.meeting import STORE_FILE

_POLL_S = 0.02
_LOOK_S = 0.5  # between looks whether another rank has failed to connect
_ROLL_CALL_S = 2.0  # within which all who are there have looked
_END_S = 2.0

T = TypeVar("T")


def is_launched() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def attempt() -> str:
    """Of torchrun, which keeps one store while it starts workers again: what dead ones have written must not count."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def private_store() -> Any:
    """That of a launcher of ours; None if there is none."""
    path = os.environ.get(STORE_FILE)
    return None if path is None or os.environ.get("TORCHELASTIC_RUN_ID") else dist.FileStore(path)  # type: ignore[attr-defined]


def open_store(timeout_s: float) -> Any:
    """Of the ranks that a launcher has started. PeerLost if nobody holds it."""
    store = private_store() or _tcp_store(timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    return dist.PrefixStore(f"avgpipe/attempt-{attempt()}", store)  # type: ignore[attr-defined]


def _tcp_store(timeout_s: float) -> Any:
    """As torch's own rendezvous makes it, but ranks that do not come are found by :func:`meet`, which names them."""
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


def join(timeout_s: float, backend: str | None = None) -> None:
    """Make the default process group of the ranks that a launcher has started; PeerLost names who does not come."""
    deadline = time.monotonic() + timeout_s
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = open_store(timeout_s)
    board = Board.beside(store, timeout_s)
    meet(board, "start", rank, range(size), deadline)
    limit = timedelta(seconds=timeout_s)
    connect(
        lambda: dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit),
        *(board, "start", rank, range(size), timeout_s),
    )


def meet(board: Board, place: str, rank: int, others: Iterable[int], deadline: float) -> None:
    """Wait for ``others`` at ``place``, until ``deadline`` of the monotonic clock; PeerLost names who is missing.

    A store that answers late, as on a busy host, is asked again.
    """
    begin = time.monotonic()
    missing, is_here = set(others), False
    try:
        while True:
            try:
                if not is_here:
                    board.put(f"{place}/{rank}", "here")
                    is_here = True
                missing = {other for other in missing if board.get(f"{place}/{other}") is None}
                if not missing:
                    return
            except Silence:
                if time.monotonic() > deadline:
                    raise
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
    except RuntimeError as error:
        raise PeerLost(f"rank {rank} cannot meet the others at its {place}: {reason(error)}") from error
    raise PeerLost(
        f"rank {rank} has waited {time.monotonic() - begin:.0f} s at its {place} for {_names(missing)}, which died "
        "before, or does not come here"
    )


def connect(
    make: Callable[[], T],
    board: Board,
    place: str,
    rank: int,
    others: Iterable[int],
    limit_s: float,
) -> T:
    """What ``make`` returns, which all ranks call after they have met, to connect to each other.

    PeerLost names who died or stands still meanwhile: those who neither have connected nor noticed that it failed.
    """
    task, begin = Task(make), time.monotonic()
    reason_why = f"not done after {limit_s:g} s"
    try:
        while not task.ends_within(_LOOK_S):
            if time.monotonic() > begin + limit_s:
                break
            if (told := _look(board, f"{place}/failed")) is not None:
                reason_why = told
                break
        else:
            made = task.result()
            with suppress(RuntimeError):  # for those for whom it failed, if there are any
                board.put(f"{place}/done/{rank}", "")
            return made
    except RuntimeError as error:
        reason_why = reason(error)
    missing = _missing(board, place, rank, others, reason_why)
    task.ends_within(
        _END_S
    )  # by its own limit: a thread that comes back while Python ends aborts the process
    who = _names(missing) if missing else "the others, who are all there"
    fate = ", which died or stands still" if missing else ""
    raise PeerLost(f"rank {rank} cannot connect to {who}{fate}: {reason_why}")


def _missing(board: Board, place: str, rank: int, others: Iterable[int], why: str) -> set[int]:
    """Who does not answer the call of those for whom connecting failed; all who are asked, where nobody can be."""
    missing = set(others) - {rank}
    try:
        board.put_first(f"{place}/failed", why)
        board.put(f"{place}/done/{rank}", "")
        deadline = time.monotonic() + _ROLL_CALL_S
        while missing and time.monotonic() < deadline:
            missing = {other for other in missing if board.get(f"{place}/done/{other}") is None}
            time.sleep(_POLL_S)
    except RuntimeError:
        pass
    return missing


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in sorted(ranks))


def _look(board: Board, name: str) -> str | None:
    try:
        return board.get(name)
    except RuntimeError:
        return None
