"""What all simulations check first."""

from __future__ import annotations

from avgpipe.planning.costs import Costs
from avgpipe.schedule.schedule import Schedule


def check_arguments(schedule: Schedule, costs: Costs, pipelines: int, batches: int) -> None:
    """Raise what :func:`avgpipe.simulate` raises."""
    check_schedule(schedule)
    check_costs(costs)
    check_count("pipelines", pipelines)
    check_count("batches", batches)
    schedule.validate()


def check_schedule(schedule: Schedule) -> None:
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule={schedule!r}: must be a Schedule, make one with avgpipe.build_schedule")


def check_costs(costs: Costs) -> None:
    if not isinstance(costs, Costs):
        raise TypeError(f"costs={costs!r}: must be avgpipe.Costs")


def check_count(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: must be an int of at least 1")
