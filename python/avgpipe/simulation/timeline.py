"""The simulated run of a schedule as a Timeline."""

from __future__ import annotations

from avgpipe.report.timeline import Event, Timeline
from avgpipe.schedule.schedule import Schedule
from avgpipe.simulation.costs import Costs
from avgpipe.simulation.engine import TICKS_PER_S, Ran, compile_schedule, run


def simulate(schedule: Schedule, costs: Costs, *, pipelines: int = 1, batches: int = 1) -> Timeline:
    """When each action of ``batches`` batches would run, on one device per worker; times in seconds from 0.

    Batch j belongs to pipeline j % pipelines. A pipeline starts its next batch on a stage when its update there is
    done, without a flush when 1F1B comes to it; no pipeline waits for another. A device runs one action at a time: of
    those whose inputs are there, backwards and updates before forwards, then the oldest batch, then the first in the
    schedule's order. With a single pipeline the oldest batch and the order alone decide; a stage may so run ahead of
    another one of its worker that waits. A tensor travels on the link of its boundary and direction
    (``Costs.transfer_s``, ``Costs.link_serial``) while devices go on. Times are rounded to picoseconds.

    The Timeline has a row per worker: where a worker has several stages, an event's ``stage`` is the worker and its
    ``detail`` names the stage. ``peak_memory_bytes``: per worker, the weights of all pipelines and the activations in
    flight at once. Raises ScheduleError for a schedule that cannot be run, TypeError and ValueError for wrong counts
    and costs.
    """
    check_arguments(schedule, costs, pipelines, batches)
    stage_costs = costs.of_stages(schedule.stages)
    outcome = run(compile_schedule(schedule, stage_costs), pipelines, batches)
    workers = [schedule.worker_of(k) for k in range(schedule.stages)]
    events = tuple(_event(schedule, workers[ran.stage], ran) for ran in outcome.actions)
    memory = stage_costs.memory_bytes(outcome.peak_held_bytes, schedule.placement, pipelines)
    labels = () if schedule.order is None else tuple(f"worker {w}" for w in range(schedule.workers))
    return Timeline(schedule.workers, events, memory, labels)


def _event(schedule: Schedule, worker: int, ran: Ran) -> Event:
    action = schedule.columns[ran.stage][ran.position]
    start_s, end_s = ran.start / TICKS_PER_S, ran.end / TICKS_PER_S
    detail = "" if schedule.order is None else f"stage {ran.stage}"
    return Event(worker, ran.pipeline, ran.batch, action.micro_batch, action.kind, start_s, end_s, detail)


def check_arguments(schedule: Schedule, costs: Costs, pipelines: int, batches: int) -> None:
    """Raise what :func:`simulate` raises."""
    check_schedule(schedule)
    if not isinstance(costs, Costs):
        raise TypeError(f"costs={costs!r}: must be avgpipe.Costs")
    check_count("pipelines", pipelines)
    check_count("batches", batches)
    schedule.validate()


def check_schedule(schedule: Schedule) -> None:
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule={schedule!r}: must be a Schedule, make one with avgpipe.build_schedule")


def check_count(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: must be an int of at least 1")
