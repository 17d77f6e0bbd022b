"""The simulated run of a schedule as a Timeline."""

from __future__ import annotations

from itertools import repeat

from avgpipe.planning.arguments import check_arguments
from avgpipe.planning.costs import Costs
from avgpipe.planning.engine import Outcome, run
from avgpipe.planning.native import KINDS, TICKS_PER_S
from avgpipe.planning.program import Program, compile_schedule
from avgpipe.schedule.schedule import Schedule
from avgpipe.timeline.timeline import Event, Timeline


def simulate(schedule: Schedule, costs: Costs, *, pipelines: int = 1, batches: int = 1) -> Timeline:
    """When each action of ``batches`` batches would run, on one device per worker; times in seconds from 0.

    Batch j belongs to pipeline j % pipelines. A pipeline starts its next batch on a stage when its update there is
    done, without a flush when 1F1B comes to it; no pipeline waits for another. A device runs one action at a time: of
    those whose inputs are there, backwards and updates before forwards, then the oldest batch, then the first in the
    schedule's order. With a single pipeline the oldest batch and the order alone decide; a stage may so run ahead of
    another one of its worker that waits. A tensor travels on the link of its boundary and direction
    (``Costs.transfer_s``, ``Costs.link_serial``) while devices go on. Times are rounded to picoseconds. What else
    there may be (latency, shared links, all-reduce, several actions at once, jitter) is told by :class:`Costs`.

    The Timeline has a row per worker. ``peak_memory_bytes``: per worker, the weights of all pipelines and the
    activations in flight at once. For millions of actions :func:`predict` gives the same figures without events.
    Raises ScheduleError for a schedule that cannot be run, TypeError and ValueError for wrong counts and costs,
    ImportError where the engine is not built.
    """
    check_arguments(schedule, costs, pipelines, batches)
    program = compile_schedule(schedule, costs)
    outcome = run(program, pipelines, batches, events=True)
    memory = program.stage_costs.memory_bytes(outcome.peak_held_bytes.tolist(), schedule.placement, pipelines)
    labels = () if schedule.is_plain else tuple(f"worker {w}" for w in range(schedule.workers))
    return Timeline(schedule.workers, _events(program, outcome, pipelines), memory, labels)


def _events(program: Program, outcome: Outcome, pipelines: int) -> tuple[Event, ...]:
    rows = outcome.records
    assert rows is not None
    stages = rows["stage"].tolist()
    kinds = [KINDS[number] for number in rows["kind"].tolist()]
    batches = rows["batch"]
    micro_batches = [None if kind == "U" else m for kind, m in zip(kinds, rows["micro_batch"].tolist())]
    return tuple(
        map(
            Event._make,
            zip(
                stages,
                (batches % pipelines).tolist(),
                batches.tolist(),
                micro_batches,
                kinds,
                (rows["start"] / TICKS_PER_S).tolist(),
                (rows["end"] / TICKS_PER_S).tolist(),
                repeat(""),
                [program.workers[k] for k in stages],
            ),
        )
    )
