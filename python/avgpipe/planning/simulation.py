"""Simulated runs of a schedule: as a Timeline, as figures, and in steady state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from avgpipe.errors import check_count
from avgpipe.planning.costs import Costs
from avgpipe.planning.engine import KINDS, TICKS_PER_S, EngineOutcome, compile_schedule, run
from avgpipe.schedule import Kind, Schedule
from avgpipe.schedule.row import Event
from avgpipe.timeline.timeline import Timeline

# A single pipeline that flushes begins each batch after the one before, so that batches hardly differ.
_ALONE, _OF_EACH = 8, 12


def check_schedule(schedule: Schedule) -> None:
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule={schedule!r}: must be a Schedule, make one with avgpipe.build_schedule")


def check_costs(costs: Costs) -> None:
    if not isinstance(costs, Costs):
        raise TypeError(f"costs={costs!r}: must be avgpipe.Costs")


def _check(schedule: Schedule, costs: Costs, pipelines: int, batches: int) -> None:
    """Raise the errors of :func:`simulate`."""
    check_schedule(schedule)
    check_costs(costs)
    check_count("pipelines", pipelines)
    check_count("batches", batches)
    schedule.validate()


def _run(
    schedule: Schedule, costs: Costs, pipelines: int, batches: int, events: bool = False
) -> tuple[EngineOutcome, tuple[int, ...] | None]:
    """Return the outcome, and per worker the bytes of all weights and of the micro-batches in flight, if known."""
    _check(schedule, costs, pipelines, batches)
    outcome = run(compile_schedule(schedule, costs), pipelines, batches, events=events)
    if not costs.has_memory:
        return outcome, None
    kept = costs.of_stages(schedule.stages, schedule.micro_batches).weight_bytes.tolist()
    weights = [sum(kept[k] for k in stages) for stages in schedule.placement]
    held = outcome.peak_held_bytes.tolist()
    return outcome, tuple(math.ceil(h + pipelines * weight) for h, weight in zip(held, weights))


def simulate(schedule: Schedule, costs: Costs, *, pipelines: int = 1, batches: int = 1) -> Timeline:
    """Simulate ``batches`` batches, on one device per worker; times in seconds from 0.

    Batch j belongs to pipeline j % pipelines. Each pipeline runs each worker's row of the schedule unchanged;
    no pipeline waits for another. A device runs one action at a time: of the pipelines' next actions whose
    inputs have arrived, backwards and updates before forwards, then the oldest batch. A tensor travels on the
    link of its boundary and direction (``Costs.transfer_s``, ``Costs.link_serial``) while devices compute.
    Times are rounded to picoseconds. :class:`Costs` describes further effects (latency, shared links,
    all-reduce, several actions at once, jitter).

    The Timeline has a row per worker. ``peak_memory_bytes``: per worker, the weights of all pipelines and the
    activations in flight at once. For millions of actions :func:`predict` gives the same figures without
    events. Raises ScheduleError for a schedule that cannot be run, TypeError and ValueError for wrong counts
    and costs, ImportError if the engine is not built.
    """
    outcome, memory = _run(schedule, costs, pipelines, batches, events=True)
    rows = outcome.records
    assert rows is not None
    columns = (
        rows["stage"],
        rows["batch"] % pipelines,
        rows["batch"],
        np.where(rows["kind"] == KINDS.index(Kind.UPDATE), np.array(None), rows["micro_batch"]),
        np.array([kind.value for kind in KINDS], dtype=object)[rows["kind"]],
        rows["start"] / TICKS_PER_S,
        rows["end"] / TICKS_PER_S,
    )
    fields = zip(*(column.tolist() for column in columns), repeat(""), rows["worker"].tolist())
    labels = () if schedule.is_plain else tuple(f"worker {w}" for w in range(schedule.workers))
    return Timeline(schedule.workers, tuple(map(Event._make, fields)), memory, labels)


@dataclass(frozen=True)
class Prediction:
    """The result of :func:`predict`.

    Attributes:
        makespan_s: Seconds from 0 to the end of all batches.
        busy_s: Seconds of computing per worker.
        batch_end_s: When each batch ended on all stages.
        peak_in_flight: Per stage, the most micro-batches of all pipelines that a worker holds at once.
        peak_memory_bytes: Peak memory per worker, see ``Timeline``; None if memory was not computed.
        actions: Number of actions.
    """

    makespan_s: float
    busy_s: tuple[float, ...]
    batch_end_s: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    peak_memory_bytes: tuple[int, ...] | None
    actions: int

    @property
    def bubble_fraction(self) -> float:
        """Return the share of all workers' time without computing, 0..1; 0.0 if nothing takes time."""
        whole = self.makespan_s * len(self.busy_s)
        return 1.0 - sum(self.busy_s) / whole if whole > 0 else 0.0


def predict(schedule: Schedule, costs: Costs, *, pipelines: int = 1, batches: int = 1) -> Prediction:
    """Return the figures of ``simulate`` without its events. Raises the same errors."""
    outcome, memory = _run(schedule, costs, pipelines, batches)
    return Prediction(
        outcome.makespan / TICKS_PER_S,
        tuple((outcome.busy / TICKS_PER_S).tolist()),
        tuple((outcome.batch_end / TICKS_PER_S).tolist()),
        tuple(outcome.peak_in_flight.tolist()),
        memory,
        outcome.actions,
    )


def steady_batch_s(
    schedule: Schedule, costs: Costs, *, pipelines: int = 1, batches: int | None = None
) -> float:
    """Return the simulated seconds per batch in steady state, of all ``pipelines`` together.

    Of ``batches`` batches (default: 12 per pipeline, 8 of a single one) the first half fills the pipelines,
    and at the end pipelines run out of batches one after the other; the result is the mean over the batches
    between. Without a flush each pipeline has more batches in flight at the end, as many as its stages hold,
    and more are run by default. Three and more pipelines on unequal stages with long transfers may never
    become periodic: then the mean is of a sample, and other batches give one that differs by some per cent.
    Raises the errors of ``simulate``, and ValueError for too few batches, less than 3 per pipeline if there
    is a flush.
    """
    check_schedule(schedule)
    count = measured_batches(pipelines, batches, _emptying(schedule))
    _check(schedule, costs, pipelines, count)
    ends = run(compile_schedule(schedule, costs), pipelines, count).batch_end.tolist()
    out = pipelines * _emptying(schedule)
    last = count - 1 - out
    # Whole rounds, so that each batch is compared with another one of its pipeline.
    between = max(1, (count // 2 - out) // pipelines) * pipelines
    return float((ends[last] - ends[last - between]) / between / TICKS_PER_S)


def _emptying(schedule: Schedule) -> int:
    """Return how many batches of each pipeline end while no other follows."""
    return 1 if schedule.flush else 1 + max(row.ahead for row in schedule.rows)


def measured_batches(pipelines: int, batches: int | None, emptying: int = 1) -> int:
    """Return how many batches to run; ValueError if they are too few to reach a steady state."""
    check_count("pipelines", pipelines)
    if batches is None:
        alone = pipelines == 1 and emptying == 1
        return _ALONE if alone else (_OF_EACH + 2 * (emptying - 1)) * pipelines
    check_count("batches", batches)
    least = (2 * emptying + 1) * pipelines
    if batches < least:
        raise ValueError(
            f"batches={batches}: {pipelines} pipelines need at least {least} to reach their steady state"
        )
    return batches
