"""The links of a worker: to itself, and to those of other processes, on which all agree."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from avgpipe.links.link import Channel, Link, LocalLink, Mailbox, Message
from avgpipe.ranks.world import World
from avgpipe_ext.ring import Bell, Memory

if TYPE_CHECKING:
    from avgpipe.links.transport import Transport
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
            from avgpipe.links.agree import agree, links_of

            agreed, self._nccl_devices = agree(cast("Met", world), kind, sources, device)
        shared = [(rank, transport) for rank, common in agreed.items() for transport in common]
        self.processes = {rank: t.processes[rank] for rank, t in shared if rank in t.processes}
        self._belled = next((transport for _, transport in shared if transport.bell), None)
        bell = None if self._belled is None else self._belled.bell
        self.mailbox = Mailbox(bell, len(self.processes) + 1, ranks)
        self._by_rank: dict[int, Link] = {me: LocalLink(self.mailbox, device)}
        if agreed:
            self._by_rank |= links_of(
                cast("Met", world), agreed, sources, self.mailbox, device, wire_dtype, verifies
            )
        self.by_replica = {replica: self._by_rank[rank] for replica, rank in enumerate(ranks)}
        trained = (Message.ACTIVATION, Message.GRADIENT)
        for rank in sorted({source for channel, source in sources[me].items() if channel.kind in trained}):
            _log.info(LINK_MESSAGE, world.role(me), world.role(rank), self._by_rank[rank].name)

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
