"""The simulated run of a schedule as a Timeline."""

from __future__ import annotations

from avgpipe.report.timeline import Event, Timeline
from avgpipe.schedule.schedule import Schedule
from avgpipe.simulation.costs import Costs
from avgpipe.simulation.engine import TICKS_PER_S, compile_schedule, run


def simulate(schedule: Schedule, costs: Costs, *, pipelines: int = 1, batches: int = 1) -> Timeline:
    """When each action of ``batches`` batches would run, on one device per stage; times in seconds from 0.

    Batch j belongs to pipeline j % pipelines. A pipeline starts its next batch on a stage when its update there is
    done; no pipeline waits for another. A device runs one action at a time: of those whose inputs are there, backwards
    and updates before forwards, then the oldest batch. A tensor travels on the link of its boundary and direction
    (``Costs.transfer_s``, ``Costs.link_serial``) while devices go on. Times are rounded to picoseconds.

    ``peak_memory_bytes`` of the Timeline: per stage, the weights of all pipelines and the activations in flight at
    once. Raises ScheduleError for a schedule that cannot be run, TypeError and ValueError for wrong counts and costs.
    """
    check_arguments(schedule, costs, pipelines, batches)
    stage_costs = costs.of_stages(schedule.stages)
    outcome = run(compile_schedule(schedule.columns, stage_costs), pipelines, batches)
    events = []
    for ran in outcome.actions:
        action = schedule.columns[ran.stage][ran.position]
        start_s, end_s = ran.start / TICKS_PER_S, ran.end / TICKS_PER_S
        events.append(
            Event(ran.stage, ran.pipeline, ran.batch, action.micro_batch, action.kind, start_s, end_s)
        )
    memory = stage_costs.memory_bytes(outcome.peak_in_flight, pipelines)
    return Timeline(schedule.stages, tuple(events), memory)


def check_arguments(schedule: Schedule, costs: Costs, pipelines: int, batches: int) -> None:
    """Raise what :func:`simulate` raises."""
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule={schedule!r}: must be a Schedule, make one with avgpipe.build_schedule")
    if not isinstance(costs, Costs):
        raise TypeError(f"costs={costs!r}: must be avgpipe.Costs")
    check_count("pipelines", pipelines)
    check_count("batches", batches)
    schedule.validate()


def check_count(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: must be an int of at least 1")
