"""The processes of a run: who is who, collectives on the CPU side, and what is known of a failure.

Rendezvous and transport are torch.distributed's. Each pipeline has a gloo group of its own, so its messages can neither
mix with the caller's nor with those of another pipeline.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from avgpipe.errors import PeerLost, PipelineError

_ROLL_CALL_S = 2.0  # within which surviving ranks notice a broken collective and say that they are there

_pipelines = 0  # pipelines made so far; alike on all ranks, since every rank makes the same ones


class World:
    """The ranks of one pipeline. ``size`` is 1 outside torch.distributed."""

    def __init__(self, timeout_s: float) -> None:
        global _pipelines
        self.timeout_s = timeout_s
        self.rank, self.size = 0, 1
        self.group: dist.ProcessGroup | None = None
        self.holds: Callable[[int], str] = lambda rank: (
            "its stage is not known yet"
        )  # what a rank does, in words
        self._store: Any = None
        if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group("gloo" if not torch.cuda.is_available() else None)
        if not dist.is_initialized():
            return
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size == 1:
            return
        # Our own waits end first and say more: the group's limit only catches what they miss.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s + 30))
        _pipelines += 1
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore(f"avgpipe/{_pipelines}", store)

    # ---- failures ------------------------------------------------------------------------------------------------

    def report(self, failure: BaseException) -> None:
        """Tell all ranks why this one fails. The first report stays: what follows is its consequence."""
        if self._store is None:
            return
        text = f"rank {self.rank}: {type(failure).__name__}: {failure}"
        try:
            self._store.compare_set("failure", "", text)
        except RuntimeError:
            pass  # the store went down with the rank that held it; the peers see the closed connection

    def reported(self) -> str | None:
        """The first failure that any rank reported."""
        if self._store is None:
            return None
        try:
            if self._store.check(["failure"]):
                return str(self._store.get("failure").decode())
        except RuntimeError:
            pass
        return None

    def tell(self, doing: str) -> None:
        """Let the other ranks know what this one is at."""
        if self._store is not None:
            try:
                self._store.set(f"doing/{self.rank}", f"{time.time():.3f} {doing}")
            except RuntimeError:
                pass  # as above

    def told(self, rank: int) -> str:
        """What ``rank`` was last seen doing."""
        try:
            if self._store is not None and self._store.check([f"doing/{rank}"]):
                at, _, doing = self._store.get(f"doing/{rank}").decode().partition(" ")
                return f"rank {rank} was last seen {max(0.0, time.time() - float(at)):.0f} s ago: {doing}"
        except RuntimeError:
            return f"rank {rank} cannot be asked: the store is gone"
        return f"rank {rank} has not said what it does"

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.holds(rank)})"

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
            self._guard(lambda: dist.barrier(self.group))

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """``tensor`` of rank ``source`` on every rank (in place; returned on its own device)."""
        if self.group is None:
            return tensor
        buffer = tensor.detach().cpu().contiguous()
        self._guard(lambda: dist.broadcast(buffer, src=source, group=self.group))
        return buffer.to(tensor.device)

    def gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows (2-D float64, as many as a rank has) of all ranks, in rank order."""
        if self.group is None:
            return rows
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._guard(lambda: dist.all_gather(counts, torch.tensor([len(rows)]), group=self.group))
        most = max(int(c) for c in counts)
        padded = torch.zeros(most, rows.shape[1], dtype=torch.float64)
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._guard(lambda: dist.all_gather(parts, padded, group=self.group))
        return torch.cat([p[: int(c)] for p, c in zip(parts, counts)])

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks, in rank order."""
        if self.group is None:
            return [text]
        own = text.encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._guard(lambda: dist.all_gather(sizes, torch.tensor([len(own)]), group=self.group))
        padded = torch.zeros(max(1, *(int(n) for n in sizes)), dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else padded[:0]
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._guard(lambda: dist.all_gather(parts, padded, group=self.group))
        return [part[: int(n)].numpy().tobytes().decode() for part, n in zip(parts, sizes)]

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

    def _guard(self, collective: Any) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise self._cause(error) from error

    def _cause(self, error: RuntimeError) -> PipelineError:
        """Why a collective failed: the first report, or the ranks that no longer answer a roll call."""
        reason = transport_reason(error)
        try:
            self._store.set(f"here/{self.rank}", "")
            deadline = time.monotonic() + _ROLL_CALL_S
            missing = set(range(self.size))
            while missing and time.monotonic() < deadline:
                if (first := self.reported()) is not None:
                    return PeerLost(f"rank {self.rank} stops because of {first}")
                missing = {r for r in missing if not self._store.check([f"here/{r}"])}
                time.sleep(0.02)
        except RuntimeError:  # the store went down with the rank that held it
            return PeerLost(f"rank 0, which held the store, died; seen by rank {self.rank}: {reason}")
        if not missing:
            return PipelineError(f"rank {self.rank}: a collective failed: {reason}")
        names = ", ".join(map(self.name, sorted(missing)))
        return PeerLost(f"{names} died or closed its connection; seen by rank {self.rank}: {reason}")


def transport_reason(error: BaseException) -> str:
    """What gloo says in an error, without its source position and advice."""
    text = str(error).split("This is typically")[0].split("\n")[0]
    return text.rpartition(".cc:")[2].partition("] ")[2].strip() or text.strip()
