"""A schedule with its costs as the arrays that the engine reads; times in ticks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from avgpipe.planning.costs import Costs, StageCosts
from avgpipe.planning.native import KINDS, LONGEST_STEP, TICKS_PER_S, too_long
from avgpipe.planning.numbers import Each
from avgpipe.planning.randomness import draws, most_factor
from avgpipe.schedule.builders import from_warm_ups
from avgpipe.schedule.schedule import Schedule

RATE_ALONE = 2**20  # of an action that has its device for itself

Array = NDArray[Any]


@dataclass(frozen=True)
class Program:
    """``arrays`` and ``numbers``: the fields of Question in csrc/simulate/question.h by name.

    ``stage_costs``: what they were made of. ``workers``: the worker of each stage.
    """

    schedule: Schedule
    stage_costs: StageCosts
    workers: list[int]
    arrays: dict[str, Array]
    numbers: dict[str, int]


def compile_schedule(schedule: Schedule, costs: Costs) -> Program:
    """The program of a schedule that can be run (``Schedule.validate``).

    Raises ValueError for costs of another number of stages or micro-batches, and for times too long to count.
    """
    stages, micro_batches = schedule.stages, schedule.micro_batches
    each = costs.of_stages(stages, micro_batches)
    workers = workers_of(schedule)
    widest = most_factor(costs.jitter, costs.stragglers)
    arrays = {
        **_order_arrays(schedule),
        **_action_arrays(each, widest),
        **_link_arrays(each, workers, widest),
        "worker": np.array(workers, dtype=np.int32),
        "sum_ticks": _ticks(each.allreduce_s),
        "held_bytes": np.array(each.activation_bytes or [0.0] * stages, dtype=np.float64),
        "rates": _rates(costs.concurrency_gain),
    }
    random = draws(costs.jitter, costs.stragglers, costs.seed)
    numbers = {
        "stages": stages,
        "workers": schedule.workers,
        "micro_batches": micro_batches,
        "flush": int(schedule.flush),
        "transfer_width": arrays["transfer_ticks"].shape[1],
        "channels": 2 * (stages - 1),
        "shared_channels": int(any(map(len, costs.shared_links))),
        "slots": len(costs.concurrency_gain),
        "seed": random.seed,
        "jitter": random.jitter,
        "straggler_threshold": random.threshold,
        "straggler_factor": random.factor,
    }
    return Program(schedule, each, workers, arrays, numbers)


def workers_of(schedule: Schedule) -> list[int]:
    """The worker of each stage."""
    return [schedule.worker_of(k) for k in range(schedule.stages)]


def _order_arrays(schedule: Schedule) -> dict[str, Array]:
    """In which order stages run their actions: warm-ups where these say it, else columns."""
    if any(len(workers) > 1 for workers in schedule.replicas):
        raise ValueError(f"schedule {schedule.name!r} has stages with replicas, which cannot be simulated")
    if schedule.is_plain:
        warm_ups = schedule.peak_in_flight
        if schedule == from_warm_ups("", schedule.micro_batches, warm_ups, flush=schedule.flush):
            return {"warm_ups": np.array(warm_ups, dtype=np.int64)}
    if not schedule.flush:
        raise ValueError(f"schedule {schedule.name!r} has no flush and is not 1F1B: it cannot be simulated")
    columns = schedule.columns
    arrays: dict[str, Array] = {
        "column_begin": np.cumsum([0, *map(len, columns)], dtype=np.int64),
        "kinds": np.array([KINDS.index(a.kind) for column in columns for a in column], dtype=np.int8),
        "micro_batch": np.array([a.micro_batch or 0 for column in columns for a in column], dtype=np.int32),
    }
    if not schedule.is_plain:
        ranks: list[list[int]] = [[] for _ in range(schedule.stages)]
        for row in schedule.rows:
            for rank, action in enumerate(row):
                ranks[action.stage].append(rank)
        arrays["ranks"] = np.array([rank for own in ranks for rank in own], dtype=np.int32)
    return arrays


def _action_arrays(costs: StageCosts, widest: float) -> dict[str, Array]:
    """Ticks per kind and stage; of a kind with a cost per micro-batch on any stage, per micro-batch."""
    stages = len(costs.forward_s)
    tables = [_table([costs.seconds(kind, k) for k in range(stages)], widest) for kind in KINDS]
    return {
        "action_ticks": np.concatenate([table.ravel() for table in tables]),
        "action_begin": np.cumsum([0, *(table.size for table in tables[:-1])], dtype=np.int64),
        "action_widths": np.array([table.shape[1] for table in tables], dtype=np.int64),
    }


def _link_arrays(costs: StageCosts, workers: list[int], widest: float) -> dict[str, Array]:
    """Per link, 2k from stage k and 2k+1 back to it. Between two stages of one worker nothing travels."""
    away = np.repeat([a != b for a, b in pairwise(workers)], 2).astype(bool)
    both = [cost for pair in zip(costs.transfer_s, costs.gradient_transfer_s) for cost in pair]
    return {
        "transfer_ticks": np.where(away[:, None], _table(both, widest), 0),
        "latency_ticks": np.where(away, np.repeat(_ticks(costs.latency_s), 2), 0),
        "channel": np.where(away, np.array(costs.channels, dtype=np.int32), np.int32(-1)).astype(np.int32),
    }


def _table(costs: Sequence[Each], widest: float) -> Array:
    """A row per stage or link: a number for all micro-batches, or one for each if any row has them."""
    width = max((len(cost) for cost in costs if isinstance(cost, tuple)), default=1)
    if width == 1:
        flat = [cost[0] if isinstance(cost, tuple) else cost for cost in costs]
        return _ticks(flat, widest).reshape(-1, 1)
    rows = [cost if isinstance(cost, tuple) else (cost,) * width for cost in costs]
    return _ticks(np.array(rows, dtype=np.float64), widest)


def _ticks(seconds: Sequence[float] | Array, widest: float = 1.0) -> Array:
    """Rounded to whole ticks; ``widest``: what a draw may multiply them by."""
    ticks = np.rint(np.asarray(seconds, dtype=np.float64) * TICKS_PER_S)
    if ticks.size and not float(ticks.max()) * widest < LONGEST_STEP:
        raise too_long()
    return ticks.astype(np.int64)


def _rates(gain: Sequence[float]) -> Array:
    """By the number of actions at once, the speed of each."""
    return np.array([round(g / s * RATE_ALONE) for s, g in enumerate(gain, start=1)], dtype=np.int64)
