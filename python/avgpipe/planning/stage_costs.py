"""From layers to stages: what a simulation of a schedule is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from avgpipe.planning import Costs
from avgpipe.planning.chain import Chain
from avgpipe.planning.costs import Each
from avgpipe.schedule.schedule import Schedule

RECOMPUTE = ("never", "except-last", "always")


def stage_costs(
    chain: Chain, bounds: Sequence[int], micro_batches: int, pipelines: int = 1, recompute: str = "never"
) -> Costs:
    """What a simulation takes, of the stages between ``bounds`` (first layer of each, then the number of layers).

    With several pipelines an update includes the averaging; recomputation puts the forward before the backward; the
    first backward of a batch finds no gradients to add to. The link's latency occupies nobody. Memory is not in it.
    """
    blocks = list(pairwise(bounds))
    again = recomputed(micro_batches, recompute)
    forward_s = [chain.forward_s(*block) for block in blocks]
    backward_s = [_backwards(chain, *block, micro_batches) for block in blocks]
    input_s = [chain.input_backward_s(*block) for block in blocks]
    latency_s = chain.link.latency_s if chain.link else 0.0
    return Costs(
        forward_s=forward_s,
        backward_s=_with_forward(backward_s, forward_s, again),
        transfer_s=[chain.outgoing_s(last) - latency_s for _, last in blocks[:-1]],
        latency_s=latency_s,
        update_s=[chain.update_s(*block, elastic=pipelines > 1) for block in blocks],
        input_backward_s=_with_forward(input_s, forward_s, again),
    )


def _backwards(chain: Chain, first: int, last: int, micro_batches: int) -> Each:
    """Per micro-batch where the first of a batch is quicker."""
    backward_s, added_s = chain.backward_s(first, last), chain.accumulate_s(first, last)
    return (backward_s - added_s, *[backward_s] * (micro_batches - 1)) if added_s else backward_s


def recomputed(micro_batches: int, recompute: str) -> list[bool]:
    """For each micro-batch, whether its backward begins with its forward."""
    return [recompute != "never"] * (micro_batches - 1) + [recompute == "always"]


def _with_forward(seconds: Sequence[Each], forward_s: Sequence[float], again: Sequence[bool]) -> list[Each]:
    """Where a micro-batch is computed again, its backward begins with its forward."""
    return [_added(cost, more_s, again) for cost, more_s in zip(seconds, forward_s)]


def _added(cost: Each, more_s: float, again: Sequence[bool]) -> Each:
    """Per micro-batch where they differ."""
    each = cost if isinstance(cost, tuple) else (cost,) * len(again)
    found = tuple(seconds + more_s if more else seconds for seconds, more in zip(each, again))
    return found[0] if len(set(found)) == 1 else found


def weight_versions(schedule: Schedule) -> list[int]:
    """Per stage, how many versions of the weights are kept, the newest included."""
    stages = schedule.stages
    if schedule.flush:
        return [1] * stages
    if schedule.name == "pipedream-2bw":
        return [2] * stages
    # One for each batch that has micro-batches in flight.
    return [1 + math.ceil((stages - 1 - k) / schedule.micro_batches) for k in range(stages)]
