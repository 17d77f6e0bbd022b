"""Which link serves which two workers.

Both ends must find the same. So every worker says what it offers, tries what the others offer, and tells them what it
could not open; what two workers could both open, they have, and the best of it serves them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from avgpipe.errors import PipelineError
from avgpipe.links import LINKS
from avgpipe.links.cuda import nccl_joins, nccl_offer
from avgpipe.links.link import Endpoint, Link, LocalLink, Mailbox, Topology, Transport
from avgpipe.links.message import Channel, Message
from avgpipe.ranks.world import World

LINK_MESSAGE = "%s to %s: %s"  # logged for each link: what is at its ends, and its name

_log = logging.getLogger("avgpipe")


class Links:
    """The links of a worker, and the mailbox that they fill.

    Args:
        world: The ranks of the pipeline.
        ranks: The rank that holds each stage replica.
        into: For each rank, the channels that end there, from others.
        device: This worker's.
        kind: "auto", or the name of a link.
        wire_dtype: The dtype in which activations and gradients travel; None keeps theirs.

    Attributes:
        by_replica: The link to each stage replica.
        processes: The processes of peers on this host, by rank.
        has_nccl: Whether NCCL works between all workers, which all of them find alike.

    Raises:
        PipelineError: Two workers cannot have the link that was asked for.
    """

    def __init__(
        self,
        world: World,
        ranks: Sequence[int],
        into: Sequence[Sequence[Channel]],
        device: torch.device,
        kind: str,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self._world, self._device = world, device
        topology = Topology(world.rank, ranks, into)
        self.has_nccl = False
        transports = _transports(kind, world, topology, device)
        agreed = self._agree(transports, kind) if world.size > 1 else {}
        bells = [transport for way in agreed.values() for transport in way if transport.bell is not None]
        self.processes = {
            rank: transport.processes[rank]
            for rank, way in agreed.items()
            for transport in way
            if rank in transport.processes
        }
        self.mailbox = Mailbox(bells[0].bell if bells else None, len(self.processes) + 1, ranks)
        self._by_rank: dict[int, Link] = {world.rank: LocalLink(self.mailbox, device)}
        end = Endpoint(self.mailbox, device, wire_dtype)
        for rank, (best, *others) in agreed.items():
            self._by_rank[rank] = best.link(rank, end, others)
        self.by_replica = {replica: self._by_rank[rank] for replica, rank in enumerate(ranks)}
        trained = (Message.ACTIVATION, Message.GRADIENT)
        for rank in sorted({ranks[c.source] for c in into[world.rank] if c.kind in trained}):
            _log.info(LINK_MESSAGE, *map(world.role, (world.rank, rank)), self._by_rank[rank].name)

    def _agree(self, transports: dict[str, Transport], kind: str) -> dict[int, list[Transport]]:
        """The transports that this worker and each peer could both open, the best first."""
        world, me = self._world, self._world.rank
        offers = world.gather(_offers(transports, self._device))
        self.has_nccl = nccl_joins(offers)
        reasons: dict[str, dict[str, str]] = {}
        for name in reversed(transports):  # what others are built on first
            found = [offer["links"].get(name, {"why": "not offered there"}) for offer in offers]
            peers = [rank for rank in range(world.size) if rank != me]
            whys = {str(rank): _why_not(transports[name], me, rank, found) for rank in peers}
            reasons[name] = {rank: why for rank, why in whys.items() if why is not None}
        verdicts = world.gather(reasons)
        for rank, verdict in enumerate(verdicts):
            for peer, why in verdict.get(kind, {}).items():
                remedy = transports[kind].remedy
                raise PipelineError(f"link {kind!r} cannot join ranks {rank} and {peer}: {why}; {remedy}")
        return {
            rank: [
                transport
                for name, transport in transports.items()
                if str(rank) not in reasons[name] and str(me) not in verdicts[rank].get(name, {})
            ]
            for rank in range(world.size)
            if rank != me
        }

    def close(self, patience_s: float) -> None:
        """Close all links: the others hear that this worker leaves before it waits for any of them."""
        for link in self._by_rank.values():
            link.leave()
        for link in self._by_rank.values():
            link.close(patience_s)


def _transports(kind: str, world: World, topology: Topology, device: torch.device) -> dict[str, Transport]:
    """The transports that serve, or are below, a kind of link, by name, the best first."""
    asked = {row.name for row in LINKS if kind == "auto" or row.name == kind}
    asked |= {name for row in LINKS if row.name in asked for name in row.below}
    made: dict[str, Transport] = {}
    for row in reversed(LINKS):
        if row.name in asked and not (row.on_cuda and device.type != "cuda"):
            module, _, name = row.transport.partition(":")
            below = {other: made[other] for other in row.below}
            made[row.name] = getattr(import_module(module), name)(world, topology, device, below)
    return {name: made[name] for name in reversed(made)}


def _offers(transports: dict[str, Transport], device: torch.device) -> dict[str, Any]:
    """What this worker tells the others."""
    links: dict[str, Any] = {}
    for name in reversed(transports):
        try:
            links[name] = {"offer": transports[name].offer()}
        except (OSError, MemoryError, RuntimeError) as error:
            links[name] = {"why": str(error)}
    return {"links": links, **nccl_offer(device)}


def _why_not(transport: Transport, me: int, rank: int, offers: Sequence[dict[str, Any]]) -> str | None:
    """Why this worker cannot link with ``rank``; None if it can."""
    for offer in (offers[me], offers[rank]):
        if "why" in offer:
            return str(offer["why"])
    try:
        transport.open(rank, [offer.get("offer") for offer in offers])
    except (OSError, ValueError, RuntimeError) as error:
        return str(error)
    return None
