"""Which link serves which two workers.

Two processes of one host use shared memory, and the memory of their CUDA device if it is the same one; others
torch.distributed. Both ends must find the same, so every worker describes what it offers, tries what the others offer,
and tells them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from avgpipe.errors import PeerLost, PipelineError
from avgpipe.links.cuda_ipc import CudaIpcLink, DeviceSlots, device_id
from avgpipe.links.group import GroupLink
from avgpipe.links.link import Link, LocalLink, Mailbox
from avgpipe.links.message import Channel
from avgpipe.links.nccl import Edge, NcclLink, edge_groups
from avgpipe.links.shared import Inbox, SharedLink
from avgpipe.ranks.world import World
from avgpipe_ext import ring

NAMES = ("auto", "shm", "gloo", "cuda-ipc", "nccl")
ON_CUDA = ("cuda-ipc", "nccl")
LINK_MESSAGE = "%s to %s: %s"  # logged for each link: what is at its ends, and its name

_log = logging.getLogger("avgpipe")


class Links:
    """The links of a worker, by the seat at their other end, and the mailbox that they fill. ``has_nccl``: whether NCCL
    works between the workers; all find the same.

    rank_of: the rank that holds each seat. into: for each rank, the channels that end there, from others. kind: one of
    ``NAMES``. processes: ids of the peers on this host, by rank.
    """

    def __init__(
        self,
        world: World,
        rank_of: Sequence[int],
        into: Sequence[Sequence[Channel]],
        device: torch.device,
        kind: str,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self._world, self._rank_of, self._into = world, rank_of, into
        self._device, self._wire_dtype = device, wire_dtype
        self._slots: DeviceSlots | None = None
        self._on_device: set[int] = set()  # ranks that share this one's device
        self._edges: dict[Edge, dist.ProcessGroup] = {}
        self.has_nccl = False
        inbox, outboxes = self._try_shared(kind) if world.size > 1 else (None, {})
        self.processes: dict[int, int] = {rank: pid for rank, (pid, _) in outboxes.items()}
        bell = inbox.bell if inbox is not None and outboxes else None
        self.mailbox = Mailbox(bell, len(outboxes) + 1, rank_of)
        self._by_rank: dict[int, Link] = {}
        for rank in range(world.size):
            if rank == world.rank:
                self._by_rank[rank] = LocalLink(self.mailbox, device)
            elif self._edges:
                self._by_rank[rank] = NcclLink(
                    partial(self._host_link, rank, inbox, outboxes.get(rank), torch.device("cpu"), None),
                    *(self._edges, rank, device, self.mailbox, wire_dtype),
                )
            else:
                self._by_rank[rank] = self._host_link(
                    *(rank, inbox, outboxes.get(rank), device, wire_dtype, self.mailbox)
                )
        self.by_seat = {seat: self._by_rank[rank] for seat, rank in enumerate(rank_of)}
        for rank in sorted({rank_of[c.source] for c in into[world.rank] if c.kind in "FB"}):
            _log.info(LINK_MESSAGE, *map(world.role, (world.rank, rank)), self._by_rank[rank].name)

    def _from(self, peer: int) -> list[Channel]:
        return [c for c in self._into[self._world.rank] if self._rank_of[c.source] == peer]

    def _to(self, peer: int) -> list[Channel]:
        return [c for c in self._into[peer] if self._rank_of[c.source] == self._world.rank]

    def _host_link(
        self,
        peer: int,
        inbox: Inbox | None,
        outbox: tuple[int, Inbox] | None,
        device: torch.device,
        wire_dtype: torch.dtype | None,
        mailbox: Mailbox,
    ) -> Link:
        """Through the memory of the host, or of the device that both share."""
        if inbox is not None and outbox is not None:
            ends = inbox, self._from(peer), *outbox, device, mailbox, wire_dtype
            if peer in self._on_device and self._slots is not None:
                return CudaIpcLink(*ends, self._slots)
            return SharedLink(*ends)

        def lost(doing: str) -> PeerLost:
            return self._world.lost(peer, doing)

        assert self._world.group is not None
        channels = self._from(peer), self._to(peer)
        return GroupLink(
            self._world.group, peer, len(self._rank_of), *channels, device, mailbox, lost, wire_dtype
        )

    def _try_shared(self, kind: str) -> tuple[Inbox | None, dict[int, tuple[int, Inbox]]]:
        """This worker's inbox and those of the peers with which shared memory works, with their process ids."""
        world = self._world
        inbox = None
        offer: dict[str, Any] = {}
        if kind != "gloo" and ring.supported():
            try:
                inbox = Inbox.create(self._into[world.rank])
                offer = inbox.offer()
            except (OSError, MemoryError) as error:
                offer = {"why": str(error)}  # the others wait for an offer
        if self._device.type == "cuda":
            offer["device"] = device_id(self._device)
            offer["nccl"] = dist.is_nccl_available()
            offer["slots"] = self._offer_slots(kind) if inbox is not None else "no shared memory"
        offers = world.gather(offer)
        opened: dict[int, tuple[int, Inbox]] = {}
        reasons: dict[str, str] = {}
        for rank, theirs in enumerate(offers):
            if rank == world.rank or kind == "gloo":
                continue
            try:
                if "host" not in offer:
                    raise ValueError(offer.get("why", "this system has no shared memory"))
                if theirs.get("host") != offer["host"]:
                    raise ValueError(theirs.get("why", "not on this host"))
                opened[rank] = theirs["pid"], Inbox.open(theirs, self._into[rank])
            except (OSError, ValueError) as error:
                reasons[str(rank)] = str(error)
        verdicts = world.gather(reasons)
        if kind == "shm" and any(verdicts):
            rank, why = next((r, v) for r, v in enumerate(verdicts) if v)
            peer, reason = next(iter(why.items()))
            raise PipelineError(
                f"link 'shm' cannot join ranks {rank} and {peer}: {reason}; use 'auto' or 'gloo' where workers are on "
                "several hosts, or share one space of process numbers between containers"
            )
        self._choose_on_cuda(kind, offers, opened)
        me = str(world.rank)
        return inbox, {r: end for r, end in opened.items() if me not in verdicts[r]}

    # ---- CUDA ----------------------------------------------------------------------------------------------------

    def _offer_slots(self, kind: str) -> Any:
        """What peers need to try this device's memory, or why there is none."""
        if kind not in ("auto", "cuda-ipc"):
            return f"link {kind!r} was asked for"
        try:
            self._slots = DeviceSlots(self._device)
            return self._slots.offer()
        except (OSError, RuntimeError) as error:
            self._slots = None
            return str(error)

    def _choose_on_cuda(self, kind: str, offers: list[dict[str, Any]], opened: Mapping[int, Any]) -> None:
        """Find the peers whose device this one shares; make NCCL's communicators if each rank has its own."""
        if not any("device" in offer for offer in offers):
            return
        self.has_nccl = nccl_joins(offers)
        if kind == "nccl" and not self.has_nccl:
            devices = {offer.get("device") for offer in offers}
            raise PipelineError(
                f"link 'nccl' needs NCCL and a GPU for each of the {len(offers)} workers, which have "
                f"{len(devices)} between them; use 'auto'"
            )
        if self.has_nccl and kind in ("auto", "nccl"):
            rank_of = self._rank_of
            edges = sorted({(rank_of[c.source], rank_of[c.seat]) for into in self._into for c in into})
            limit_s = self._world.timeout_s
            self._edges = self._world.connect(lambda: edge_groups(edges, self._device, limit_s))
            return
        self._try_devices(kind, offers, opened)

    def _try_devices(self, kind: str, offers: list[dict[str, Any]], opened: Mapping[int, Any]) -> None:
        world = self._world
        reasons: dict[str, str] = {}
        for rank, theirs in enumerate(offers):
            if rank == world.rank:
                continue
            try:
                if self._slots is None or rank not in opened or not isinstance(theirs.get("slots"), dict):
                    raise ValueError(str(theirs.get("slots", "not on a CUDA device of this host")))
                self._slots.check(theirs["slots"])
                self._on_device.add(rank)
            except (OSError, ValueError, RuntimeError) as error:
                reasons[str(rank)] = str(error)
        verdicts = world.gather(reasons)
        if kind == "cuda-ipc" and any(verdicts):
            rank, why = next((r, v) for r, v in enumerate(verdicts) if v)
            peer, reason = next(iter(why.items()))
            raise PipelineError(f"link 'cuda-ipc' cannot join ranks {rank} and {peer}: {reason}; use 'auto'")
        self._on_device = {r for r in self._on_device if str(world.rank) not in verdicts[r]}

    def close(self, patience_s: float) -> None:
        links = self._by_rank.values()
        for link in links:
            if isinstance(link, GroupLink | SharedLink):
                link.leave()  # to all, before waiting for any
        for link in links:
            link.close(patience_s)


def nccl_joins(offers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all workers, by what they offer, have NCCL and a CUDA device each: it refuses two on one device."""
    devices = [offer.get("device") for offer in offers]
    return None not in devices and len(set(devices)) == len(devices) and all(o.get("nccl") for o in offers)
