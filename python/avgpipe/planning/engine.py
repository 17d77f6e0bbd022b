"""The simulation engine: discrete events on integer times, so equal times are equal and every run is the same.

A worker runs its row of the schedule unchanged, once for each pipeline. Its device runs one action at a time,
or several of different pipelines if ``Costs.concurrency_gain`` allows it. Of the pipelines' next actions
whose inputs have arrived it takes backwards and updates before forwards, then the oldest batch, as the
runtime's scheduler does. Transfers occupy links, never devices. The engine is csrc/simulate, which takes a
schedule with its costs as arrays.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import Any, NamedTuple

import numpy as np

from avgpipe.planning.costs import DEVIATION, Array, Costs, StageCosts
from avgpipe.schedule import Kind, Schedule

TICKS_PER_S = 10**12
LONGEST_STEP = 2**58  # ticks
KINDS = tuple(Kind)  # index: number of the kind

_CODES = {kind: number for number, kind in enumerate(Kind)}
_RATE_ALONE = 2**20  # rate of an action that is alone on its device
_MOST_BATCHES = 2**30
_MODULE = "avgpipe_ext._native"
_BUILD = "run `pip install --no-build-isolation -e .` in the folder of setup.py"


@cache
def engine() -> Any:
    """Return the module, loaded from its file: an import of its package would import torch.

    Raises ImportError if it is not built.
    """
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    package = find_spec("avgpipe_ext")
    if package is None:
        raise ImportError(f"avgpipe_ext, which holds the simulation engine, is not installed: {_BUILD}")
    spec = PathFinder.find_spec(_MODULE, package.submodule_search_locations)
    if spec is None or spec.loader is None:
        version = ".".join(map(str, sys.version_info[:2]))
        raise ImportError(f"{package.origin} has no _native module for Python {version}: {_BUILD}")
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ImportError(f"{spec.origin} cannot be loaded ({error}): {_BUILD}") from None
    sys.modules[_MODULE] = module
    return module


def too_long() -> ValueError:
    return ValueError(
        f"the costs are too long to simulate: a single one must be below {LONGEST_STEP / TICKS_PER_S:.0f} s, a run "
        f"below {16 * LONGEST_STEP / TICKS_PER_S:.0f} s; costs are in seconds"
    )


# ---- input of the engine -----------------------------------------------------------------------------------------


def compile_schedule(schedule: Schedule, costs: Costs) -> dict[str, Any]:
    """Return the engine's input for a schedule that can be run (``Schedule.validate``).

    These are the fields of Question in csrc/simulate/question.h by name, without pipelines and batches; times
    in ticks. Raises ValueError for costs of another number of stages or micro-batches, and for times too long
    to count.
    """
    each = costs.of_stages(schedule.stages, schedule.micro_batches)
    widest = costs.greatest_factor
    # Random draws are whole numbers, so that they are the same on every machine.
    probability, factor = costs.stragglers or (0.0, 1.0)
    speeds = [round(g / s * _RATE_ALONE) for s, g in enumerate(costs.concurrency_gain, start=1)]
    return {
        "stages": schedule.stages,
        "workers": schedule.workers,
        "micro_batches": schedule.micro_batches,
        **_row_fields(schedule),
        **_action_fields(each, widest),
        **_link_fields(each, schedule, widest),
        "sum_ticks": _ticks(each.allreduce_s),
        "held_bytes": each.activation_bytes,
        "shared_channels": int(any(map(len, costs.shared_links))),
        "slots": len(speeds),
        "rates": np.array(speeds, dtype=np.int64),
        "seed": costs.seed,
        "jitter": round(costs.jitter / DEVIATION * 2**48),
        "straggler_threshold": round(probability * 2**32),
        "straggler_factor": round(factor * 2**16),
    }


def _row_fields(schedule: Schedule) -> dict[str, Any]:
    """Return the rows as loops of actions, and the workers of each stage."""
    loops = [loop for row in schedule.rows for loop in row.loops]
    ends = np.cumsum([0, *(len(loop.actions) for loop in loops)])
    repeats = np.array([(loop.repeats, loop.stride) for loop in loops])
    actions = [
        number
        for loop in loops
        for kind, m, k, ahead in loop.actions
        for number in (_CODES[kind], k, m or 0, ahead)
    ]
    return {
        "row_begin": np.cumsum([0, *(len(row.loops) for row in schedule.rows)], dtype=np.int64),
        "loops": np.column_stack([ends[:-1], ends[1:], repeats]).astype(np.int32),
        "actions": np.array(actions, dtype=np.int32),
        "replicas_begin": np.cumsum([0, *map(len, schedule.replicas)], dtype=np.int64),
        "replicas": np.array([w for workers in schedule.replicas for w in workers], dtype=np.int32),
    }


def _action_fields(costs: StageCosts, widest: float) -> dict[str, Any]:
    """Return ticks per kind and stage; for a kind with a cost per micro-batch on any stage, per micro-batch."""
    tables = [_ticks(costs.seconds(kind), widest) for kind in KINDS]
    return {
        "action_ticks": np.concatenate([table.ravel() for table in tables]),
        "action_begin": np.cumsum([0, *(table.size for table in tables[:-1])], dtype=np.int64),
        "action_widths": np.array([table.shape[1] for table in tables], dtype=np.int64),
    }


def _link_fields(costs: StageCosts, schedule: Schedule, widest: float) -> dict[str, Any]:
    """Return the fields of links, 2k from stage k, 2k+1 back, with channels for each sender unless shared."""
    senders = [len(workers) for workers in schedule.replicas]
    counts = [
        1 if first in costs.shared_channels else senders[(link + 1) // 2]
        for link, first in enumerate(costs.channels)
    ]
    begin = np.cumsum([0, *counts])
    both_s = np.stack(np.broadcast_arrays(costs.transfer_s, costs.gradient_transfer_s), axis=1)
    width = both_s.shape[2]
    return {
        "transfer_width": width,
        "transfer_ticks": _ticks(both_s.reshape(-1, width), widest),
        "latency_ticks": np.repeat(_ticks(costs.latency_s), 2),
        "channels": sum(counts),
        "channel": np.array([begin[first] if first >= 0 else -1 for first in costs.channels], dtype=np.int32),
        "channel_count": np.array(counts, dtype=np.int32),
    }


def _ticks(seconds: Array, widest: float = 1.0) -> Array:
    """Round to whole ticks; ``widest``: the greatest factor that a draw may multiply them by."""
    ticks: Array = np.rint(seconds * TICKS_PER_S)
    if ticks.size and not float(ticks.max()) * widest < LONGEST_STEP:
        raise too_long()
    return ticks.astype(np.int64)


# ---- running -------------------------------------------------------------------------------------------------------


class EngineOutcome(NamedTuple):
    """The result of the engine; times in ticks.

    Attributes:
        makespan: End of all batches.
        busy: Per worker, the time with at least one action.
        batch_end: End of each batch's last action.
        peak_in_flight: Per stage, the most micro-batches of all pipelines on a worker.
        peak_held_bytes: Per worker, bytes of the micro-batches in flight on its stages.
        actions: Number of actions.
        records: The actions, by their starts (the fields of Record in csrc/simulate/question.h), if asked for.
    """

    makespan: int
    busy: Array
    batch_end: Array
    peak_in_flight: Array
    peak_held_bytes: Array
    actions: int
    records: Array | None = None


def run(question: dict[str, Any], pipelines: int, batches: int, *, events: bool = False) -> EngineOutcome:
    """Run ``batches`` batches, batch j on pipeline j % pipelines; ``events``: keep a record of each action.

    Releases the GIL meanwhile. Raises ImportError if the library is not built, ValueError for a schedule that
    gets stuck, for times that are too long to count and for more than 2^30 batches, MemoryError.
    """
    if max(batches, pipelines) > _MOST_BATCHES:
        raise ValueError(f"batches={batches}, pipelines={pipelines}: must be at most {_MOST_BATCHES}")
    try:
        answer = engine().simulate(**question, pipelines=pipelines, batches=batches, events=events)
    except OverflowError:
        raise too_long() from None
    outcome = EngineOutcome(*answer)
    if outcome.records is None:
        return outcome
    # Stable sort: an action without duration stays before those that began after it on the same device.
    return outcome._replace(records=outcome.records[np.argsort(outcome.records["start"], kind="stable")])
