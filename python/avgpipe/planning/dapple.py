"""DAPPLE's planner: the shortest latency of a synchronous batch, over stages and devices (Fan et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from avgpipe.planning.chain import Chain
from avgpipe.planning.cuts import check_stages
from avgpipe.planning.dapple_search import find
from avgpipe.planning.latency import Machines, Model
from avgpipe.planning.lean import least_limit
from avgpipe.planning.memory import check_limit, does_not_fit
from avgpipe.planning.network import check_enough, network
from avgpipe.planning.options import check_count, micro_batch_size_of, transfer_notes
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe.planning.result import Partition


def dapple(
    profile: Profile,
    stages: int | None = None,
    *,
    micro_batches: int = 8,
    workers: int | None = None,
    levels: Sequence[Sequence[float]] | None = None,
    link: LinkProfile | None = None,
    micro_batch_size: float | None = None,
    memory_limit_bytes: float | None = None,
) -> Partition:
    """Method "dapple" of :func:`avgpipe.partition`, for batches of ``micro_batches``.

    levels: devices in a machine, and machines. A stage's devices are chosen by one of three policies: fresh first
    fills machines that no stage uses yet, so that the all-reduce of its replicas stays inside; append first fills the
    machines that the stages before left half used; scatter first spreads evenly over all machines, for stages whose
    weights are small against their activations. workers, link: one machine of so many devices.

    A stage on m devices takes 1/m of the seconds of one; a ring, 2 (m - 1) |w| / (m B), its all-reduce; a transfer the
    bytes over as many links as both sides have machines. The optimum over all stages, devices and policies
    where there are up to 20,000 plans; beyond, a beam over the stages, first to last, then local search, and a note
    says so.

    memory_limit_bytes: of a worker, for weights, gradients, optimizer state, and what is kept of the micro-batches in
    flight.
    """
    check_count("micro_batches", micro_batches)
    check_limit(memory_limit_bytes)
    if stages is not None:
        check_stages(len(profile.layers), stages)
    nets = network(profile, stages, workers, levels, link)
    machines = Machines.of(nets)
    total = machines.machines * machines.devices
    chain = Chain(profile, micro_batch_size_of(profile, micro_batch_size))
    check_enough(stages, total)
    model = Model(chain, machines, micro_batches, memory_limit_bytes)
    (latency_s, _), seats, exact = find(model, stages)
    if latency_s == math.inf:
        assert memory_limit_bytes is not None
        least = least_limit(model.held, total, stages)
        raise does_not_fit(memory_limit_bytes, least, "use more workers, fewer or smaller micro-batches")
    spans = model.spans(seats)[::2]
    notes = transfer_notes(nets[-1].bytes_per_s)
    if not exact:
        notes += ("found by a beam and local search: there are too many plans to look at all",)
    return Partition(
        method="dapple",
        layers=chain.layers,
        boundaries=[seat.first for seat in seats[1:]],
        replication=[seat.workers for seat in seats],
        stage_s=[span.forward_s + span.backward_s for span in spans],
        objective=f"one batch of {micro_batches} micro-batches",
        value=latency_s,
        micro_batch_size=chain.micro_batch_size,
        workers=total,
        memory_bytes=model.bytes(seats),
        placement=[list(seat.taken) for seat in seats] if machines.machines > 1 else None,
        notes=notes,
    )
