"""Chooses the link between each two workers.

Both ends must choose the same. So every worker publishes its offers, tries the others' offers, and publishes
which it could not open; of the links that both ends could open, the best is used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch

from avgpipe.errors import PipelineError
from avgpipe.links import LINKS
from avgpipe.links.link import Channel, Endpoint, Link, LocalLink, Mailbox, Message, Transport
from avgpipe.ranks.world import World
from avgpipe_ext.ring import Bell, Memory

if TYPE_CHECKING:
    from avgpipe.ranks.met import Met

LINK_MESSAGE = "%s to %s: %s"  # logged for each link: its ends, and its name

_log = logging.getLogger("avgpipe")


class Links:
    """The links of a worker, and the mailbox that they fill.

    Args:
        world: The ranks of the pipeline.
        ranks: The rank that holds each stage replica.
        into: For each rank, the channels that end there, from others.
        device: This worker's.
        kind: "auto", or the name of a link.
        wire_dtype: The dtype in which activations and gradients are sent; None keeps theirs.
        verifies: Whether messages carry checksums.

    Attributes:
        by_replica: The link to each stage replica.
        processes: The processes of peers on this host, by rank.

    Raises:
        PipelineError: The requested link is impossible between two workers.
    """

    def __init__(
        self,
        world: World,
        ranks: Sequence[int],
        into: Sequence[Sequence[Channel]],
        device: torch.device,
        kind: str,
        wire_dtype: torch.dtype | None,
        verifies: bool = False,
    ) -> None:
        me = world.rank
        self._nccl_devices: list[str | None] = [None] * world.size
        sources = [{channel: ranks[channel.source] for channel in channels} for channels in into]
        agreed: dict[int, list[Transport]] = {}
        if world.size > 1:
            transports = _transports(kind, cast("Met", world), sources, device)
            agreed = self._agree(world, transports, device, kind)
            world.connect(partial(_connect, transports.values(), agreed))
        shared = [(rank, transport) for rank, common in agreed.items() for transport in common]
        self.processes = {rank: t.processes[rank] for rank, t in shared if rank in t.processes}
        self._belled = next((transport for _, transport in shared if transport.bell), None)
        bell = None if self._belled is None else self._belled.bell
        self.mailbox = Mailbox(bell, len(self.processes) + 1, ranks)
        self._by_rank: dict[int, Link] = {me: LocalLink(self.mailbox, device)}
        for rank, (best, *others) in agreed.items():
            incoming = [channel for channel, source in sources[me].items() if source == rank]
            outgoing = [channel for channel, source in sources[rank].items() if source == me]
            verifier = None
            if verifies:
                from avgpipe.links.codec import Verifier

                verifier = Verifier(world.name(rank), world.name(me))
            end = Endpoint(self.mailbox, device, incoming, outgoing, wire_dtype, verifier)
            self._by_rank[rank] = best.link(rank, end, others)
        self.by_replica = {replica: self._by_rank[rank] for replica, rank in enumerate(ranks)}
        trained = (Message.ACTIVATION, Message.GRADIENT)
        for rank in sorted({source for channel, source in sources[me].items() if channel.kind in trained}):
            _log.info(LINK_MESSAGE, world.role(me), world.role(rank), self._by_rank[rank].name)

    def _agree(
        self, world: World, transports: dict[str, Transport], device: torch.device, kind: str
    ) -> dict[int, list[Transport]]:
        """Return, for each peer, the transports that both this worker and the peer could open, the best first."""
        from avgpipe.links.nccl import nccl_device

        me, everyone = world.rank, range(world.size)
        said = world.gather([nccl_device(device), {name: _offer(t) for name, t in transports.items()}])
        self._nccl_devices = [nccl for nccl, _ in said]
        whys: dict[str, list[str | None]] = {}
        for name, transport in transports.items():
            offers = [offers.get(name, {"why": "not offered there"}) for _, offers in said]
            whys[name] = [_why_not(transport, me, rank, offers) for rank in everyone]
        found = world.gather(whys)
        for rank in everyone:
            for peer, why in enumerate(found[rank].get(kind, ())):
                if why is not None:
                    remedy = transports[kind].remedy
                    raise PipelineError(f"link {kind!r} cannot join ranks {rank} and {peer}: {why}; {remedy}")
        opened = {
            rank: [name for name in transports if whys[name][rank] is None and found[rank][name][me] is None]
            for rank in everyone
        }
        return {rank: [transports[n] for n in reversed(opened[rank])] for rank in everyone if rank != me}

    def bell_place(self) -> list[Any]:
        """Return where processes outside of this pipeline ring its mailbox: path, bytes, and an offset."""
        if self._belled is not None:
            return self._belled.bell_place()
        memory = Memory.create(Bell.BYTES)
        self.mailbox.bell = Bell(memory, 0)  # before any process rings it
        return [memory.path, memory.bytes, 0]

    def nccl_joins(self, ranks: Sequence[int]) -> bool:
        """Whether NCCL works between all of ``ranks``; all workers find the same."""
        from avgpipe.links.nccl import nccl_joins

        return nccl_joins([self._nccl_devices[rank] for rank in ranks])

    def close(self, patience_s: float) -> None:
        """Close all links: announce to all others that this worker leaves before waiting for any of them."""
        for link in self._by_rank.values():
            link.leave()
        self.mailbox.messages.clear()  # they lie in memory of peers, which wait for its return
        for link in self._by_rank.values():
            link.close(patience_s)


def _transports(
    kind: str, world: Met, into: Sequence[Mapping[Channel, int]], device: torch.device
) -> dict[str, Transport]:
    """Make the transports for a kind of link, and those below it, by name; those below come first."""
    asked = {row.name for row in LINKS if kind == "auto" or row.name == kind}
    asked |= {name for row in LINKS if row.name in asked for name in row.below}
    made: dict[str, Transport] = {}
    for row in reversed(LINKS):
        if row.name in asked and row.device in (None, device.type):
            module, _, name = row.transport.partition(":")
            below = {other: made[other] for other in row.below}
            made[row.name] = getattr(import_module(module), name)(world, into, device, below)
    return made


def _connect(transports: Iterable[Transport], agreed: Mapping[int, Sequence[Transport]]) -> None:
    for transport in transports:
        transport.connect([rank for rank, (best, *_) in agreed.items() if best is transport])


def _offer(transport: Transport) -> dict[str, Any]:
    """Return what a transport offers, or why it is impossible here."""
    try:
        return {"offer": transport.offer()}
    except (OSError, MemoryError, RuntimeError) as error:
        return {"why": str(error)}


def _why_not(transport: Transport, me: int, rank: int, offers: Sequence[dict[str, Any]]) -> str | None:
    """Return why this worker cannot link with ``rank``; None if it can, or is that rank."""
    if rank == me:
        return None
    for offer in (offers[me], offers[rank]):
        if "why" in offer:
            return str(offer["why"])
    try:
        transport.open(rank, [offer.get("offer") for offer in offers])
    except (OSError, ValueError, RuntimeError) as error:
        return str(error)
    return None
