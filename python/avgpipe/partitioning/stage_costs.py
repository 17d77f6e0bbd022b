"""From layers to stages: what a simulation of a schedule is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from avgpipe.partitioning.chain import Chain
from avgpipe.schedule.schedule import Schedule
from avgpipe.simulation import Costs

RECOMPUTE = ("never", "except-last", "always")


def stage_costs(
    chain: Chain, bounds: Sequence[int], micro_batches: int, pipelines: int = 1, recompute: str = "never"
) -> Costs:
    """What a simulation takes, of the stages between ``bounds`` (first layer of each, then the number of layers).

    With several pipelines an update includes the averaging; recomputation puts the forward before the backward. The
    link's latency occupies nobody. Memory is not in it.
    """
    blocks = list(pairwise(bounds))
    again = recomputed(micro_batches, recompute)
    forward_s = [chain.forward_s(*block) for block in blocks]
    backward_s = [chain.backward_s(*block) for block in blocks]
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


def recomputed(micro_batches: int, recompute: str) -> list[bool]:
    """For each micro-batch, whether its backward begins with its forward."""
    return [recompute != "never"] * (micro_batches - 1) + [recompute == "always"]


def _with_forward(
    seconds: list[float], forward_s: list[float], again: list[bool]
) -> list[float] | list[list[float]]:
    """Per stage; per micro-batch too where they differ."""
    if not any(again):
        return seconds
    if all(again):
        return [s + f for s, f in zip(seconds, forward_s)]
    return [[s + f if more else s for more in again] for s, f in zip(seconds, forward_s)]


def weight_versions(schedule: Schedule) -> list[int]:
    """Per stage, how many versions of the weights are kept, the newest included."""
    stages = schedule.stages
    if schedule.flush:
        return [1] * stages
    if schedule.name == "pipedream-2bw":
        return [2] * stages
    # One for each batch that has micro-batches in flight.
    return [1 + math.ceil((stages - 1 - k) / schedule.micro_batches) for k in range(stages)]
