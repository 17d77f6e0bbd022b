"""The processes of a run: who is who, collectives on the CPU side, and what is known of a failure.

Rendezvous and transport are torch.distributed's. Each pipeline has a gloo group of its own, so its messages can neither
mix with the caller's nor with those of another pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from avgpipe.errors import PeerLost, PipelineError, PipelineTimeout, reason
from avgpipe.ranks.board import Board
from avgpipe.ranks.rendezvous import attempt, connect, is_launched, join, meet, private_store
from avgpipe.ranks.texts import gather_texts

T = TypeVar("T")

_ROLL_CALL_S = 2.0  # within which surviving ranks notice a broken collective and say that they are there
# That a group's own limit comes after ours, which says more. Not long: a process cannot end while gloo waits.
SPARE_S = 3.0

_pipelines = 0  # pipelines made so far; alike on all ranks, since every rank makes the same ones


class World:
    """The ranks of one pipeline. ``size`` is 1 outside torch.distributed."""

    def __init__(self, timeout_s: float) -> None:
        global _pipelines
        self.timeout_s = timeout_s
        self.rank, self.size = 0, 1
        self.group: dist.ProcessGroup | None = None
        self._roles: tuple[str, ...] = ()
        self._board: Board | None = None
        if not dist.is_initialized() and is_launched():
            join(timeout_s, "gloo" if not torch.cuda.is_available() else None)
        if not dist.is_initialized():
            return
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size == 1:
            return
        _pipelines += 1
        store = private_store() or dist.distributed_c10d._get_default_store()
        prefix = f"avgpipe/attempt-{attempt()}/pipeline-{_pipelines}"
        self._board = Board.beside(dist.distributed_c10d.PrefixStore(prefix, store), timeout_s)
        deadline = time.monotonic() + timeout_s
        place = "Pipeline" if _pipelines == 1 else f"Pipeline number {_pipelines}"
        meet(self._board, place, self.rank, range(self.size), deadline)
        limit = timedelta(seconds=timeout_s + SPARE_S)
        self._connections = 0
        self.group = self.connect(lambda: dist.new_group(backend="gloo", timeout=limit))

    def connect(self, make: Callable[[], T]) -> T:
        """What ``make`` returns, in which all ranks connect to each other; PeerLost names who does not."""
        if self._board is None:
            return make()
        self._connections += 1
        place = f"connection {self._connections}"
        return connect(make, self._board, place, self.rank, range(self.size), self.timeout_s)

    # ---- failures ------------------------------------------------------------------------------------------------

    def report(self, failure: BaseException) -> None:
        """Tell all ranks why this one fails. The first report stays: what follows is its consequence."""
        if self._board is None:
            return
        try:
            self._board.put_first("failure", f"rank {self.rank}: {type(failure).__name__}: {failure}")
        except RuntimeError:
            pass  # the store went down with the rank that held it; the peers see the closed connection

    def reported(self) -> str | None:
        """The first failure that any rank reported."""
        if self._board is None:
            return None
        try:
            return self._board.get("failure")
        except RuntimeError:
            return None

    def is_first(self, what: str) -> bool:
        """Whether no other rank has asked this of ``what``."""
        try:
            return self._board is None or self._board.put_first(what, str(self.rank)) == str(self.rank)
        except RuntimeError:
            return True

    def tell(self, doing: str) -> None:
        """Let the other ranks know what this one is at."""
        if self._board is not None:
            try:
                self._board.put(f"doing/{self.rank}", f"{time.time():.3f} {doing}")
            except RuntimeError:
                pass  # as above

    def told(self, rank: int) -> str:
        """What ``rank`` was last seen doing."""
        try:
            text = None if self._board is None else self._board.get(f"doing/{rank}")
        except RuntimeError as error:
            return f"rank {rank} cannot be asked: {reason(error)}"
        if text is None:
            return f"rank {rank} has not said what it does"
        at, _, doing = text.partition(" ")
        return f"rank {rank} was last seen {max(0.0, time.time() - float(at)):.0f} s ago: {doing}"

    def describe(self, roles: Sequence[str]) -> None:
        """Name what each rank does, in rank order, for messages about it."""
        self._roles = tuple(roles)

    def role(self, rank: int) -> str:
        """What ``rank`` does, in words, as "stage 1"."""
        return self._roles[rank] if self._roles else "its stage is not known yet"

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.role(rank)})"

    def lost(self, peer: int, doing: str) -> PeerLost:
        """The error for a broken connection to ``peer``, which names the rank that failed first."""
        first = self.reported()
        if first is not None and not first.startswith(f"rank {self.rank}:"):
            return PeerLost(f"rank {self.rank} stops because of {first}")
        return PeerLost(
            f"{self.name(peer)} died or closed its connection; seen by rank {self.rank} when {doing}"
        )

    # ---- collectives on CPU memory -------------------------------------------------------------------------------

    def barrier(self) -> None:
        if self.group is not None:
            self._finish(lambda: dist.barrier(self.group, async_op=True))

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """``tensor`` of rank ``source`` on every rank (in place; returned on its own device)."""
        if self.group is None:
            return tensor
        buffer = tensor.detach().cpu().contiguous()
        self._finish(lambda: dist.broadcast(buffer, src=source, group=self.group, async_op=True))
        return buffer.to(tensor.device)

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Those of all ranks, of one shape, in rank order."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._finish(lambda: dist.all_gather(parts, tensor, group=self.group, async_op=True))
        return parts

    def gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows (2-D float64, as many as a rank has) of all ranks, in rank order."""
        if self.group is None:
            return rows
        counts = [int(n) for n in self._gather(torch.tensor([len(rows)]))]
        padded = torch.zeros(max(counts), rows.shape[1], dtype=torch.float64)
        padded[: len(rows)] = rows
        return torch.cat([part[:n] for part, n in zip(self._gather(padded), counts)])

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks, in rank order."""
        if self.group is None:
            return [text]
        return gather_texts(text, self._gather)

    def require_same(self, what: str, text: str) -> None:
        """Refuse, on every rank, a ``text`` that differs between ranks."""
        if self.group is None:
            return
        import hashlib

        digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.float64)[None]
        digests = self.gather_rows(digest)
        different = [r for r in range(self.size) if not torch.equal(digests[r], digests[0])]
        if different:
            raise ValueError(
                f"the {what} differs between ranks: ranks {different} disagree with rank 0 "
                f"(rank {self.rank} has {text[:200]}); every rank must build the same"
            )

    def _finish(self, begin: Callable[[], Any]) -> None:
        """Wait for the collective that ``begin`` begins."""
        start = time.monotonic()
        try:
            begin().wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise self._cause(error, time.monotonic() - start) from error

    def _cause(self, error: RuntimeError, waited_s: float) -> PipelineError:
        """Why a collective failed: the first report, or the ranks that no longer answer a roll call."""
        what = transport_reason(error)
        assert self._board is not None
        try:
            self._board.put(f"here/{self.rank}", "")
            deadline = time.monotonic() + _ROLL_CALL_S
            missing = set(range(self.size))
            while missing and time.monotonic() < deadline:
                if (first := self._board.get("failure")) is not None:
                    return PeerLost(f"rank {self.rank} stops because of {first}")
                missing = {r for r in missing if self._board.get(f"here/{r}") is None}
                time.sleep(0.02)
        except RuntimeError as silence:
            return PeerLost(
                f"rank {self.rank} is cut off from the others, or rank 0 or the launcher died, whoever holds the "
                f"store: {reason(silence)}; {what}"
            )
        if not missing:
            return PipelineError(f"rank {self.rank}: a collective failed: {what}")
        names = ", ".join(map(self.name, sorted(missing)))
        if waited_s < self.timeout_s:
            return PeerLost(f"{names} died or closed its connection; seen by rank {self.rank}: {what}")
        seen = "; ".join(self.told(rank) for rank in sorted(missing))
        return PipelineTimeout(
            f"rank {self.rank} waited {self.timeout_s:g} s for {names}, which does not answer; {seen}"
        )


def transport_reason(error: BaseException) -> str:
    """What gloo says in an error, without its source position and advice."""
    text = str(error).split("This is typically")[0].split("\n")[0]
    return text.rpartition(".cc:")[2].partition("] ")[2].strip() or text.strip()
