"""Agrees with all other workers of a pipeline on the links between them, and makes them.

Both ends must choose the same. So every worker publishes its offers, tries the others' offers, and publishes
which it could not open; of the links that both ends could open, the best is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from avgpipe.errors import PipelineError
from avgpipe.links import LINKS
from avgpipe.links.link import Channel, Link, Mailbox
from avgpipe.links.transport import Endpoint, Transport

if TYPE_CHECKING:
    from avgpipe.ranks.met import Met


def agree(
    world: Met, kind: str, into: Sequence[Mapping[Channel, int]], device: torch.device
) -> tuple[dict[int, list[Transport]], list[str | None]]:
    """Connect with all other workers, which do the same.

    Args:
        world: The ranks of the pipeline.
        kind: "auto", or the name of a link.
        into: For each rank, the channels that end there, and the ranks where they begin.
        device: This worker's.

    Returns:
        For each peer, the transports that both this worker and the peer could open, the best first; and for each rank
        the device that NCCL uses there.
    """
    from avgpipe.links.nccl import nccl_device

    transports = _transports(kind, world, into, device)
    me, everyone = world.rank, range(world.size)
    said = world.gather([nccl_device(device), {name: _offer(t) for name, t in transports.items()}])
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
    agreed = {rank: [transports[n] for n in reversed(opened[rank])] for rank in everyone if rank != me}
    world.connect(partial(_connect, transports.values(), agreed))
    return agreed, [nccl for nccl, _ in said]


def links_of(
    world: Met,
    agreed: Mapping[int, Sequence[Transport]],
    into: Sequence[Mapping[Channel, int]],
    mailbox: Mailbox,
    device: torch.device,
    wire_dtype: torch.dtype | None,
    verifies: bool,
) -> dict[int, Link]:
    """Return the link to each peer; the arguments are those of :func:`agree` and of ``Links``."""
    made = {}
    for rank, (best, *others) in agreed.items():
        incoming = [channel for channel, source in into[world.rank].items() if source == rank]
        outgoing = [channel for channel, source in into[rank].items() if source == world.rank]
        verifier = None
        if verifies:
            from avgpipe.links.codec import Verifier

            verifier = Verifier(world.name(rank), world.name(world.rank))
        end = Endpoint(mailbox, device, incoming, outgoing, wire_dtype, verifier)
        made[rank] = best.link(rank, end, others)
    return made


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
