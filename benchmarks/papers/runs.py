"""A plan on the emulated cluster: how it is scaled, and what a run of the real runtime there took.

Everything is emulated so many times slower that what two cores do for six hosts counts for little; all that is returned
is in the cluster's own seconds.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

import avgpipe
from avgpipe.plan import Plan
from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.process import progress
from avgpipe.ranks.rendezvous import join
from avgpipe.schedule.row import COMPUTE_KINDS, Event
from avgpipe.timeline.timeline import Timeline
from avgpipe_lab.bench.namespaces import network
from avgpipe_lab.bench.schedules import mean_loss, precise_sleeps
from benchmarks.common.rows import OurRow, Task, measure_rows
from benchmarks.common.schedules import timed
from benchmarks.papers.cluster import BITS_PER_S, DEVICES, HOSTS, cluster
from benchmarks.papers.forecast import FLOAT_BITS, Contest, StageWork
from benchmarks.papers.stages import optimizer_of, scaled, stages_of

ON_EACH_HOST = "a pipeline on each host"
_WORKER = f"{__name__}:worker"
_MOST_SCALE, _LEAST_MESSAGE_BYTES = 16, 64 * 1024  # so that packets stay small beside what is sent
# What all six workers need on two cores for an action of each, and to add up a byte of gradients; and what of a batch
# it may be.
_ACTION_S, _BYTE_S, _SHARE = 1.5e-3, 1e-9, 0.05
_LEAST_SLOWER, _QUICK_S = 4, 2.0  # of batches that do not take long: their bytes have to be moved as well
_SHORT_PERIOD = 8
_ROUND_S = 10.0  # of this machine's time, beyond which a round has as few batches as can be
_BINS, _BATCHES = 120, 4  # of utilisation over time


@dataclass(frozen=True)
class Emulation:
    """A plan on the emulated cluster.

    Attributes:
        plan: For all of its workers, with a stage for each module.
        works: Of its stages, of the cluster itself.
        batch_s: Simulated.
        updates: The plan's batches in one of the model.
        period: Of the averages between hosts; 1 where there are none.
        scale: What bytes and rates are divided by.
        slower: What seconds are multiplied with, and rates divided by.
        wire_bits: Of a number that travels between stages.
    """

    plan: Plan
    works: tuple[StageWork, ...]
    batch_s: float
    updates: int = 1
    period: int = 1
    scale: float = 1.0
    slower: float = 1.0
    wire_bits: int = FLOAT_BITS

    @property
    def travels(self) -> bool:
        """Whether the stages' own weights, as gradients or updates, go from worker to worker."""
        return self.plan.spread or self.plan.replication is not None

    @property
    def actions(self) -> int:
        """Forwards, backwards and their parts that the busiest worker runs for a batch."""
        pipelines = 1 if self.plan.spread else self.plan.shares
        return self.updates * pipelines * max(map(len, self.plan.build_schedule().rows))

    @property
    def summed_bytes(self) -> float:
        """Gradients that the busiest stage adds up over a batch's micro-batches, as they are measured."""
        count = self.updates * self.plan.micro_batches / max(self.plan.replication or [1])
        count /= self.plan.pipelines if self.plan.spread else 1
        return count * max(work.own_bytes + sum(work.tied_bytes.values()) for work in self.stages)

    @property
    def rate_bits_per_s(self) -> float:
        return BITS_PER_S / self.scale / self.slower

    @property
    def measured(self) -> Plan:
        """The plan as it is measured: its period may be shorter."""
        return replace(self.plan, period=min(self.period, _SHORT_PERIOD)) if self.period > 1 else self.plan

    @property
    def stages(self) -> list[StageWork]:
        """The stages as they are measured."""
        weights_by = self.measured.period / self.period if self.travels else 0.0
        return [scaled(work, 1 / self.scale, self.slower, weights_by) for work in self.works]

    def batches(self, most: int) -> int:
        """How many batches a round has: whole periods, at least one, and few where they take long here."""
        period = self.measured.period
        wanted = max(1, min(most, math.floor(_ROUND_S / (self.batch_s * self.slower))))
        return period * math.ceil(wanted / period)


def emulation(contest: Contest, row: dict[str, Any], scale: float = 0, slower: float = 0) -> Emulation:
    """Return how a row of the forecast is emulated; scale, slower: 0 for what suits it."""
    plan = Plan(**row["plan"])
    cut, updates = tuple(int(first) for first in plan.partition or ()), row["updates"]
    on_host = row["system"].endswith(ON_EACH_HOST)
    net = cluster(None, hosts=1 if on_host else HOSTS)
    bits = row["wire_bits"]
    works = contest.problem(plan, net, HOSTS if on_host else updates, bits).stages(cut)
    plan = replace(plan, partition=tuple(range(1, plan.stages)) or None)
    if on_host:
        each = plan.micro_batches
        plan = replace(plan, pipelines=HOSTS, micro_batches=HOSTS * each, spread=True, period=row["period"])
    made = Emulation(plan, tuple(works), row["batch_s"], updates, row["period"], wire_bits=bits)
    made = replace(made, scale=scale or (_scale(works) if made.travels else 1))
    host_s = (_ACTION_S * made.actions + _BYTE_S * made.summed_bytes) / _SHARE
    least = max(host_s / made.batch_s, _LEAST_SLOWER if made.batch_s < _QUICK_S else 1)
    return replace(made, slower=slower or math.ceil(least))


def _scale(works: Sequence[StageWork]) -> int:
    """Return by how much bytes are divided where weights travel: up to 16, as long as activations stay large."""
    least = min((work.output_bytes for work in works[:-1]), default=math.inf)
    room = max(1.0, min(float(_MOST_SCALE), least / _LEAST_MESSAGE_BYTES))
    return int(2 ** math.floor(math.log2(room)))


# ---- on every rank ---------------------------------------------------------------------------------------------------


def worker(
    plan: str,
    works: Sequence[dict[str, Any]],
    updates: int,
    wire_bits: int,
    rounds: int,
    batches: int,
    timeout_s: float,
) -> dict[str, Any]:
    """Measure a row as a rank."""
    torch.set_num_threads(1)
    precise_sleeps()
    join(timeout_s, "gloo")
    asked = Plan.from_json(plan)
    stages = [
        StageWork(**{**work, "tied_bytes": {int(n): size for n, size in work["tied_bytes"].items()}})
        for work in works
    ]
    count = updates * asked.micro_batches
    optimizer = partial(optimizer_of, stages, asked)
    task = Task(torch.ones(count, 1), torch.zeros(count, 1), mean_loss, optimizer)
    wire = torch.bfloat16 if wire_bits < FLOAT_BITS else None
    options: dict[str, Any] = {
        "per_batch": updates,
        "timeout_s": timeout_s,
        "extensions": [avgpipe.Precision(wire_dtype=wire)],
    }
    row = OurRow("row", task, stages_of(stages), asked, **options)
    (measured,) = measure_rows([row], rounds, batches, progress)
    timeline = row.timeline
    assert timeline is not None, "rounds leave their last one's"
    row.close()
    return {
        "seconds": measured.seconds,
        "utilisation": utilisation(timeline, statistics.median(measured.seconds)),
    }


def utilisation(timeline: Timeline, batch_s: float, batches: int = _BATCHES) -> dict[str, Any]:
    """Return how busy workers are in the middle half of a timeline: each, and all of them over some batches' time.

    Returns:
        ``busy``: a fraction for each worker. ``over_time``: of all workers, in equal parts of ``seconds``.
    """
    computed = [event for event in timeline.events if event.kind in COMPUTE_KINDS]
    start, end = min(e.start_s for e in computed), max(e.end_s for e in computed)
    middle, quarter = (start + end) / 2, (end - start) / 4
    busy = [
        _busy([e for e in computed if e.worker == n], [middle - quarter, middle + quarter])[0]
        for n in range(timeline.stages)
    ]
    seconds = min(batches * batch_s, 2 * quarter)
    edges = [middle + seconds * (n / _BINS - 0.5) for n in range(_BINS + 1)]
    rows = [_busy([e for e in computed if e.worker == n], edges) for n in range(timeline.stages)]
    over_time = [round(statistics.fmean(bin), 3) for bin in zip(*rows)]
    return {"busy": busy, "seconds": seconds, "over_time": over_time}


def _busy(events: Iterable[Event], edges: Sequence[float]) -> list[float]:
    """The share of each bin in which a worker computes; what overlaps counts once."""
    busy, reached = [0.0] * (len(edges) - 1), edges[0]
    for event in sorted(events, key=attrgetter("start_s")):
        start, end = max(event.start_s, reached), min(event.end_s, edges[-1])
        for n in range(bisect_right(edges, start) - 1, len(busy)):
            if edges[n] >= end or start >= end:
                break
            busy[n] += max(0.0, min(end, edges[n + 1]) - max(start, edges[n]))
        reached = max(reached, end)
    return [time / (after - before) for time, before, after in zip(busy, edges, edges[1:])]


# ---- a run -----------------------------------------------------------------------------------------------------------


def measure(made: Emulation, rounds: int, batches: int) -> dict[str, Any]:
    """Run a plan on the emulated hosts, and return what was measured, in seconds of the cluster.

    PipelineError where it fails.
    """
    batches = made.batches(batches)
    wall_s = made.batch_s * made.slower
    timeout_s = 60 + 10 * wall_s
    asked = {
        "plan": made.measured.to_json(),
        "works": [asdict(work) for work in made.stages],
        "updates": made.updates,
        "wire_bits": made.wire_bits,
        "rounds": rounds,
        "batches": batches,
        "timeout_s": timeout_s,
    }
    in_all = (rounds + 1) * (batches + 2 * made.plan.batches_in_flight) * wall_s
    slower = made.scale * made.slower
    with network(HOSTS, made.rate_bits_per_s, workers_each=DEVICES, slower=slower) as net:
        launching = net.launching(made.plan.workers)
        found = run_on_ranks(_WORKER, made.plan.workers, asked, timeout_s=120 + 6 * in_all, **launching)[0]
    used = found["utilisation"]
    seconds = [taken / made.slower for taken in found["seconds"]]
    row = timed({"name": "", "seconds": seconds}, made.batch_s)
    del row["name"]
    return {
        **row,
        "busy_fraction": used["busy"],
        "utilisation": {"seconds": used["seconds"] / made.slower, "over_time": used["over_time"]},
        "scale": made.scale,
        "slower": made.slower,
        "measured_period": made.measured.period,
        "batches": batches,
    }
