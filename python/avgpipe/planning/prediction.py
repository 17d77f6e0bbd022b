"""The figures of a simulated run without its events, for planners: millions of actions take a fraction of a second."""

from __future__ import annotations

from dataclasses import dataclass

from avgpipe.planning.arguments import check_arguments
from avgpipe.planning.costs import Costs
from avgpipe.planning.engine import run
from avgpipe.planning.native import TICKS_PER_S
from avgpipe.planning.program import compile_schedule
from avgpipe.schedule.schedule import Schedule


@dataclass(frozen=True)
class Prediction:
    """What :func:`predict` found.

    makespan_s: of all batches, from 0. busy_s: per worker, the seconds in which it computed. batch_end_s: when each
    batch was over on all stages. peak_in_flight: per stage, the micro-batches of all pipelines held at once.
    peak_memory_bytes: per worker, as of a Timeline; None where memory was not asked for. actions: how many ran.
    """

    makespan_s: float
    busy_s: list[float]
    batch_end_s: list[float]
    peak_in_flight: list[int]
    peak_memory_bytes: list[int] | None
    actions: int

    @property
    def bubble_fraction(self) -> float:
        """The share of all workers' time in which they did not compute, 0..1; 0.0 if nothing takes time."""
        whole = self.makespan_s * len(self.busy_s)
        return 1.0 - sum(self.busy_s) / whole if whole > 0 else 0.0


def predict(schedule: Schedule, costs: Costs, *, pipelines: int = 1, batches: int = 1) -> Prediction:
    """What ``simulate`` would show, without its events. Raises as that does."""
    check_arguments(schedule, costs, pipelines, batches)
    program = compile_schedule(schedule, costs)
    outcome = run(program, pipelines, batches)
    return Prediction(
        outcome.makespan / TICKS_PER_S,
        (outcome.busy / TICKS_PER_S).tolist(),
        (outcome.batch_end / TICKS_PER_S).tolist(),
        outcome.peak_in_flight.tolist(),
        program.stage_costs.memory_bytes(outcome.peak_held_bytes.tolist(), schedule.placement, pipelines),
        outcome.actions,
    )
