"""Seconds per batch of a run that goes on: what is left when the pipelines have filled."""

from __future__ import annotations

from avgpipe.schedule.schedule import Schedule
from avgpipe.simulation.costs import Costs
from avgpipe.simulation.engine import TICKS_PER_S, compile_schedule, run
from avgpipe.simulation.timeline import check_arguments, check_count

# A single pipeline flushes: each batch begins when the one before has left, so that they hardly differ.
_ALONE, _OF_EACH = 8, 12


def steady_batch_s(
    schedule: Schedule, costs: Costs, *, pipelines: int = 1, batches: int | None = None
) -> float:
    """Simulated seconds per batch in steady state, of all ``pipelines`` together.

    Of ``batches`` batches (default: 12 per pipeline, 8 of a single one) the first half fills the pipelines and the
    last of each pipeline has fewer and fewer others beside it; the mean over those between counts. Three and more
    pipelines on unequal stages with long transfers may never fall into step: then the mean is of a sample, and other
    batches give one that differs by some per cent. Raises as ``simulate`` does, and ValueError for less than 3 batches
    per pipeline.
    """
    count = measured_batches(pipelines, batches)
    check_arguments(schedule, costs, pipelines, count)
    return measure(schedule, costs, pipelines, count)


def measured_batches(pipelines: int, batches: int | None) -> int:
    """How many batches to run; ValueError if they are too few to see a steady state."""
    check_count("pipelines", pipelines)
    if batches is None:
        return _ALONE if pipelines == 1 else _OF_EACH * pipelines
    check_count("batches", batches)
    if batches < 3 * pipelines:
        raise ValueError(
            f"batches={batches}: {pipelines} pipelines show their steady state in at least {3 * pipelines}"
        )
    return batches


def measure(schedule: Schedule, costs: Costs, pipelines: int, batches: int) -> float:
    """``steady_batch_s`` of arguments that are right."""
    program = compile_schedule(schedule.columns, costs.of_stages(schedule.stages))
    ends = [0] * batches
    for ran in run(program, pipelines, batches).actions:
        ends[ran.batch] = max(ends[ran.batch], ran.end)
    last = batches - 1 - pipelines
    # Whole rounds, so that a batch is compared with another one of its pipeline.
    between = max(1, (batches // 2 - pipelines) // pipelines) * pipelines
    return (ends[last] - ends[last - between]) / between / TICKS_PER_S
