"""Seconds per batch of a run that goes on: what is left when the pipelines have filled."""

from __future__ import annotations

from avgpipe.planning.arguments import check_arguments, check_count, check_schedule
from avgpipe.planning.costs import Costs
from avgpipe.planning.engine import run
from avgpipe.planning.native import TICKS_PER_S
from avgpipe.planning.program import compile_schedule
from avgpipe.schedule.schedule import Schedule

# Alone, a pipeline that flushes begins each batch when the one before has left, so that they hardly differ.
_ALONE, _OF_EACH = 8, 12


def steady_batch_s(
    schedule: Schedule, costs: Costs, *, pipelines: int = 1, batches: int | None = None
) -> float:
    """Simulated seconds per batch in steady state, of all ``pipelines`` together.

    Of ``batches`` batches (default: 12 per pipeline, 8 of a single one) the first half fills the pipelines and the
    last of each pipeline has fewer and fewer others beside it; the mean over those between counts. Without a flush
    as many more of each pipeline are in flight in the end as its stages hold, and more are run by default. Three and
    more pipelines on unequal stages with long transfers may never fall into step: then the mean is of a sample, and
    other batches give one that differs by some per cent. Raises as ``simulate`` does, and ValueError for too few
    batches, less than 3 per pipeline where there is a flush.
    """
    check_schedule(schedule)
    count = measured_batches(pipelines, batches, _emptying(schedule))
    check_arguments(schedule, costs, pipelines, count)
    return measure(schedule, costs, pipelines, count)


def _emptying(schedule: Schedule) -> int:
    """How many batches of each pipeline are the last to leave while no other follows."""
    return 1 if schedule.flush else 1 + -(-schedule.stages // schedule.micro_batches)


def measured_batches(pipelines: int, batches: int | None, emptying: int = 1) -> int:
    """How many batches to run; ValueError if they are too few to see a steady state."""
    check_count("pipelines", pipelines)
    if batches is None:
        alone = pipelines == 1 and emptying == 1
        return _ALONE if alone else (_OF_EACH + 2 * (emptying - 1)) * pipelines
    check_count("batches", batches)
    least = (2 * emptying + 1) * pipelines
    if batches < least:
        raise ValueError(
            f"batches={batches}: {pipelines} pipelines show their steady state in at least {least}"
        )
    return batches


def measure(schedule: Schedule, costs: Costs, pipelines: int, batches: int) -> float:
    """``steady_batch_s`` of arguments that are right."""
    ends = run(compile_schedule(schedule, costs), pipelines, batches).batch_end.tolist()
    out = pipelines * _emptying(schedule)
    last = batches - 1 - out
    # Whole rounds, so that a batch is compared with another one of its pipeline.
    between = max(1, (batches // 2 - out) // pipelines) * pipelines
    return float((ends[last] - ends[last - between]) / between / TICKS_PER_S)
