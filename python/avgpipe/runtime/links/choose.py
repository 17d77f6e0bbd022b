"""Which link serves which two workers.

Two processes of one host use shared memory, and the memory of their CUDA device if it is the same one; others
torch.distributed. Both ends must find the same, so every worker describes what it offers, tries what the others offer,
and tells them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from avgpipe.errors import PeerLost, PipelineError
from avgpipe.runtime.links.channel import Channel, Link
from avgpipe.runtime.links.cuda_ipc import CudaIpcLink, DeviceSlots, device_id
from avgpipe.runtime.links.group import GroupLink
from avgpipe.runtime.links.local import LocalLink
from avgpipe.runtime.links.nccl import Edge, NcclLink, edge_groups
from avgpipe.runtime.links.shared import Inbox, SharedLink
from avgpipe.runtime.mailbox import Mailbox
from avgpipe.runtime.world import World
from avgpipe_ext import ring

NAMES = ("auto", "shm", "gloo", "cuda-ipc", "nccl")
ON_CUDA = ("cuda-ipc", "nccl")
_log = logging.getLogger("avgpipe")


class Links:
    """The links of a worker, by the stage at their other end, and the mailbox that they fill.

    stages: those of this worker. into(k): the channels that end at stage k. kind: one of ``NAMES``.
    processes: ids of the peers on this host, by rank.
    """

    def __init__(
        self,
        world: World,
        stages: Sequence[int],
        count: int,
        into: Callable[[int], list[Channel]],
        device: torch.device,
        kind: str,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self._world, self._into, self._device, self._wire_dtype = world, into, device, wire_dtype
        self._slots: DeviceSlots | None = None
        self._on_device: set[int] = set()  # ranks that share this one's device
        self._edges: dict[Edge, dist.ProcessGroup] = {}
        inbox, outboxes = self._try_shared(kind) if world.size > 1 else (None, {})
        self.processes: dict[int, int] = {rank: pid for rank, (pid, _) in outboxes.items()}
        self.mailbox = Mailbox(inbox.bell if inbox is not None and outboxes else None, len(outboxes) + 1)
        self.by_stage: dict[int, Link] = {}
        local = LocalLink(self.mailbox, device)
        for k in range(count):
            if k in stages:
                self.by_stage[k] = local
            elif self._edges:
                self.by_stage[k] = NcclLink(
                    partial(self._host_link, k, count, inbox, outboxes.get(k), torch.device("cpu"), None),
                    *(self._edges, k, device, self.mailbox, wire_dtype),
                )
            else:
                self.by_stage[k] = self._host_link(
                    *(k, count, inbox, outboxes.get(k), device, wire_dtype, self.mailbox)
                )
        for k in (stages[0] - 1, stages[-1] + 1):
            if k in self.by_stage:
                _log.info("stage %d to stage %d: %s", stages[0], k, self.by_stage[k].name)

    def _from(self, peer: int) -> list[Channel]:
        return [channel for channel in self._into(self._world.rank) if channel.source == peer]

    def _to(self, peer: int) -> list[Channel]:
        return [channel for channel in self._into(peer) if channel.source == self._world.rank]

    def _host_link(
        self,
        k: int,
        count: int,
        inbox: Inbox | None,
        outbox: tuple[int, Inbox] | None,
        device: torch.device,
        wire_dtype: torch.dtype | None,
        mailbox: Mailbox,
    ) -> Link:
        """Through the memory of the host, or of the device that both share."""
        if inbox is not None and outbox is not None:
            ends = inbox, self._from(k), *outbox, device, mailbox, wire_dtype
            if k in self._on_device and self._slots is not None:
                return CudaIpcLink(*ends, self._slots)
            return SharedLink(*ends)

        def lost(doing: str) -> PeerLost:
            return self._world.lost(k, k, doing)

        assert self._world.group is not None
        channels = self._from(k), self._to(k)
        return GroupLink(self._world.group, k, count, *channels, device, mailbox, lost, wire_dtype)

    def _try_shared(self, kind: str) -> tuple[Inbox | None, dict[int, tuple[int, Inbox]]]:
        """This worker's inbox and those of the peers with which shared memory works, with their process ids."""
        world = self._world
        inbox = None
        offer: dict[str, Any] = {}
        if kind != "gloo" and ring.supported():
            try:
                inbox = Inbox.create(self._into(world.rank))
                offer = inbox.offer()
            except (OSError, MemoryError) as error:
                offer = {"why": str(error)}  # the others wait for an offer
        if self._device.type == "cuda":
            offer["device"] = device_id(self._device)
            offer["slots"] = self._offer_slots(kind) if inbox is not None else "no shared memory"
        offers = [json.loads(text) for text in world.gather_texts(json.dumps(offer))]
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
                opened[rank] = theirs["pid"], Inbox.open(theirs, self._into(rank))
            except (OSError, ValueError) as error:
                reasons[str(rank)] = str(error)
        verdicts = [json.loads(text) for text in world.gather_texts(json.dumps(reasons))]
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
        devices = [offer.get("device") for offer in offers]
        apart = None not in devices and len(set(devices)) == len(devices)
        if kind == "nccl" and not (apart and dist.is_nccl_available()):
            raise PipelineError(
                f"link 'nccl' needs NCCL and a GPU for each of the {len(devices)} workers, which have "
                f"{len(set(devices))} between them; use 'auto'"
            )
        if kind == "nccl" or (kind == "auto" and apart and dist.is_nccl_available()):
            edges = sorted({(c.source, c.stage) for k in range(len(offers)) for c in self._into(k)})
            self._edges = edge_groups(edges, self._device, self._world.timeout_s)
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
        verdicts = [json.loads(text) for text in world.gather_texts(json.dumps(reasons))]
        if kind == "cuda-ipc" and any(verdicts):
            rank, why = next((r, v) for r, v in enumerate(verdicts) if v)
            peer, reason = next(iter(why.items()))
            raise PipelineError(f"link 'cuda-ipc' cannot join ranks {rank} and {peer}: {reason}; use 'auto'")
        self._on_device = {r for r in self._on_device if str(world.rank) not in verdicts[r]}

    def close(self, patience_s: float) -> None:
        links = {id(link): link for link in self.by_stage.values()}.values()
        for link in links:
            if isinstance(link, GroupLink):
                link.leave()  # to all, before waiting for any
        for link in links:
            link.close(patience_s)
