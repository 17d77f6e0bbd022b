"""Contiguous blocks that minimise the dearest block (torchgpipe's balancing, solved exactly)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from avgpipe.errors import nearest
from avgpipe.planning.chain import Chain
from avgpipe.planning.cuts import least_dearest
from avgpipe.planning.memory import stage_bytes
from avgpipe.planning.options import micro_batch_size_of
from avgpipe.planning.profile import Profile
from avgpipe.planning.result import Partition


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """First layers of stages 1..stages-1, such that the largest sum of ``costs`` over a stage is least.

    Among equally good cuts the one that ends early stages latest is taken. Needs 1 <= stages <= len(costs) and
    costs >= 0.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"cannot cut {len(costs)} layers into {stages} stages: every stage needs a layer")
    if any(not c >= 0 for c in costs):
        raise ValueError(f"layer costs must be numbers of at least 0, not {list(costs)}")
    total = [0.0, *accumulate(costs)]
    return least_dearest(len(costs), stages, lambda k, first, last: total[last] - total[first])[1]


def balanced(
    profile: Profile,
    stages: int | None = None,
    *,
    by: str = "time",
    micro_batch_size: float | None = None,
) -> Partition:
    """Method "balance" of :func:`avgpipe.partition`: torchgpipe's balance by time or by size, over the profile.

    by: "time": forward and backward of a micro-batch; "bytes": weights, gradients, optimizer state and what one
    micro-batch holds. Transfers and the place of a stage in the pipeline do not count.
    """
    if by not in ("time", "bytes"):
        raise ValueError(f"by={by!r}: {nearest(str(by), ['time', 'bytes'])}")
    chain = Chain(profile, micro_batch_size_of(profile, micro_batch_size))
    count = min(4, len(profile.layers)) if stages is None else stages

    def seconds(k: int, first: int, last: int) -> float:
        return chain.compute_s(first, last)

    def size(k: int, first: int, last: int) -> float:
        return stage_bytes(chain, first, last, in_flight=1)

    value, boundaries = least_dearest(chain.layers, count, seconds if by == "time" else size)
    bounds = list(pairwise([0, *boundaries, chain.layers]))
    return Partition(
        method="balance",
        layers=chain.layers,
        boundaries=boundaries,
        replication=[1] * count,
        stage_s=[chain.compute_s(*block) for block in bounds],
        objective="time of the slowest stage" if by == "time" else "bytes of the largest stage",
        value=value,
        micro_batch_size=chain.micro_batch_size,
        workers=count,
        memory_bytes=[size(0, *block) for block in bounds] if by == "bytes" else [],
    )
