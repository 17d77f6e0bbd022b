"""How the ranks of a run find each other: by a store of torch.distributed, and then as its default process group.

The commands' own workers share a file in a folder that is closed to other users, so nothing listens for them. Under
torchrun, or with MASTER_ADDR and MASTER_PORT, it is torch's TCPStore, which anybody who reaches its port may write to.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from avgpipe.errors import PeerLost, reason
from avgpipe.runtime.board import Board, Unanswered, within
from avgpipe.runtime.meeting import STORE_FILE

_POLL_S = 0.02
_LEAST_S = 5.0  # that connecting may take, however late the last rank came


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
    meet(Board(store), "start", rank, range(size), deadline, lambda other: f"rank {other}")
    connect(
        lambda: dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        ),
        rank,
        deadline,
    )


def meet(
    board: Board, place: str, rank: int, others: Iterable[int], deadline: float, name: Callable[[int], str]
) -> None:
    """Wait for ``others`` at ``place``, until ``deadline`` of the monotonic clock; PeerLost names who is missing."""
    begin = time.monotonic()
    try:
        board.put(f"{place}/{rank}", "here")
        missing = set(others)
        while missing := {other for other in missing if board.get(f"{place}/{other}") is None}:
            if time.monotonic() > deadline:
                names = ", ".join(map(name, sorted(missing)))
                raise PeerLost(
                    f"rank {rank} has waited {time.monotonic() - begin:.0f} s at its {place} for {names}, which died "
                    "before, or does not come here"
                )
            time.sleep(_POLL_S)
    except RuntimeError as error:
        if isinstance(error, PeerLost):
            raise
        raise PeerLost(f"rank {rank} cannot meet the others at its {place}: {reason(error)}") from error


def connect(make: Callable[[], Any], rank: int, deadline: float) -> Any:
    """A process group, which ``make`` makes on every rank."""
    try:
        return within(max(_LEAST_S, deadline - time.monotonic()), make)
    except (Unanswered, RuntimeError) as error:
        raise PeerLost(
            f"rank {rank} cannot connect to the others, of which one may have died: {reason(error)}"
        ) from error
