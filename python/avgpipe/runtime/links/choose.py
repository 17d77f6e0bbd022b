"""Which link serves which two workers.

Two processes of one host use shared memory, others torch.distributed. Both ends must find the same, so every worker
describes what it offers, tries what the others offer, and tells them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from avgpipe.errors import PeerLost, PipelineError
from avgpipe.runtime.links.channel import Channel, Link
from avgpipe.runtime.links.group import GroupLink
from avgpipe.runtime.links.local import LocalLink
from avgpipe.runtime.links.shared import Inbox, SharedLink
from avgpipe.runtime.mailbox import Mailbox
from avgpipe.runtime.world import World
from avgpipe_ext import ring

NAMES = ("auto", "shm", "gloo")
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
        inbox, outboxes = self._try_shared(kind) if world.size > 1 else (None, {})
        self.processes: dict[int, int] = {rank: pid for rank, (pid, _) in outboxes.items()}
        self.mailbox = Mailbox(inbox.bell if inbox is not None and outboxes else None, len(outboxes) + 1)
        self.by_stage: dict[int, Link] = {}
        local = LocalLink(self.mailbox, device)
        for k in range(count):
            if k in stages:
                self.by_stage[k] = local
            elif k in outboxes:
                assert inbox is not None
                pid, outbox = outboxes[k]
                self.by_stage[k] = SharedLink(
                    inbox, self._from(k), pid, outbox, device, self.mailbox, wire_dtype
                )
            else:
                self.by_stage[k] = self._group_link(k, count)
        for k in (stages[0] - 1, stages[-1] + 1):
            if k in self.by_stage:
                _log.info("stage %d to stage %d: %s", stages[0], k, self.by_stage[k].name)

    def _from(self, peer: int) -> list[Channel]:
        return [channel for channel in self._into(self._world.rank) if channel.source == peer]

    def _group_link(self, k: int, count: int) -> GroupLink:
        def lost(doing: str) -> PeerLost:
            return self._world.lost(k, k, doing)

        assert self._world.group is not None
        return GroupLink(
            self._world.group, k, count, self._from(k), self._device, self.mailbox, lost, self._wire_dtype
        )

    def _try_shared(self, kind: str) -> tuple[Inbox | None, dict[int, tuple[int, Inbox]]]:
        """This worker's inbox and those of the peers with which shared memory works, with their process ids."""
        world = self._world
        inbox = None
        offer: dict[str, Any] = {}
        if kind != "gloo" and ring.supported():
            inbox = Inbox.create(self._into(world.rank))
            offer = inbox.offer()
        offers = [json.loads(text) for text in world.gather_texts(json.dumps(offer))]
        opened: dict[int, tuple[int, Inbox]] = {}
        reasons: dict[str, str] = {}
        for rank, theirs in enumerate(offers):
            if rank == world.rank or kind == "gloo":
                continue
            try:
                if not offer or theirs.get("host") != offer["host"]:
                    raise ValueError("not on this host")
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
        me = str(world.rank)
        return inbox, {r: end for r, end in opened.items() if me not in verdicts[r]}

    def close(self) -> None:
        for link in {id(x): x for x in self.by_stage.values()}.values():
            link.close()
