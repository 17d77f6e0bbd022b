"""Replicas on the ranks of a process group: one reference, whose rounds end by an all-reduce."""

from __future__ import annotations

import torch.distributed as dist

from avgpipe.elastic.flat import FlatBuffers, Layout
from avgpipe.ranks.met import gather
from avgpipe.rules import Elasticity


class GroupRounds:
    """The sums of updates over the ranks of a group.

    Args:
        group: Of the replicas; replica = rank in the group.
        elasticity: The checked options of the reference.
        layout: Of z.
        has_outer: Whether an optimizer steps z.

    Raises:
        ValueError: if options or shapes differ between ranks: the first all-reduce would hang or mix weights.

    Attributes:
        rank: This process's replica.
    """

    def __init__(
        self, group: dist.ProcessGroup, elasticity: Elasticity, layout: Layout, has_outer: bool
    ) -> None:
        self._group, self.rank = group, dist.get_rank(group)
        self._works: list[dist.Work] = []  # the all-reduce of the last round
        if elasticity.asynchronous:
            raise ValueError(
                "staleness 'asynchronous' applies each update when it arrives, but an all-reduce needs all ranks "
                "of the group; use staleness=1, which waits a whole round later"
            )
        size = dist.get_world_size(group)
        if elasticity.replicas != size:
            raise ValueError(
                f"replicas must be the size of the group, {size} (one per rank), not {elasticity.replicas}"
            )
        mine = f"{elasticity}, outer={has_outer}, {[str(dtype) for dtype, _ in layout.keys]}, {layout.sizes}"
        everyone = gather(mine, group)
        for other, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise ValueError(
                    f"rank {other} of the group built its Reference with {theirs}, rank 0 with {everyone[0]}"
                )

    @property
    def is_summing(self) -> bool:
        """Whether the sum of the last round is not applied yet."""
        return bool(self._works)

    def share(self, z: FlatBuffers) -> None:
        """Give all ranks the first one's z."""
        for flat in z.flats:
            dist.broadcast(flat, group_src=0, group=self._group)

    def sum(self, update: FlatBuffers, on_cpu: bool) -> None:
        """Start summing an update over the ranks, in place."""
        works = []
        for flat in update.flats:
            if not on_cpu:  # otherwise one rank's bad element would reach all ranks
                flat.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            works.append(dist.all_reduce(flat, group=self._group, async_op=True))
        self._works = [work for work in works if work is not None]

    def wait(self) -> bool:
        """Wait for the sum in flight; return whether there was one."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        return bool(works)
