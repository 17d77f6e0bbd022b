"""``avgpipe simulate``: simulates when a schedule finishes, and the memory it needs."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from avgpipe.cli.config import SimulateConfig
from avgpipe.cli.options import flag
from avgpipe.cli.output import answer, arguments, running
from avgpipe.files import reading
from avgpipe.planning import AdvanceChoice, Costs, choose_advance, simulate, steady_batch_s
from avgpipe.schedule import Schedule, build_schedule
from avgpipe.timeline.timeline import Timeline

_MIB = 2**20
_MOST_BYTES = 16 * _MIB  # of a schedule: two million actions
_MOST_ACTIONS = 2**21  # forward passes of a simulation: some seconds, and each is drawn
_OF_A_NAME = ("stages", "micro_batches", "advance", "stages_per_worker")  # contained in a file
_UPDATE = re.compile(r"\b\d*U\b")


def run(config: SimulateConfig) -> None:
    with arguments():
        costs = _costs(config)
        schedule, choice = _schedule(config, costs)
        pipelines = config.pipelines
        _check_counts(config, schedule)
        timeline = simulate(schedule, costs, pipelines=pipelines, batches=config.batches or pipelines)
        steady_s = steady_batch_s(schedule, costs, pipelines=pipelines)
    with running():
        if config.plot is not None:
            timeline.plot(config.plot)
    answer(
        config.json,
        _to_json(config, schedule, choice, timeline) | {"steady_batch_s": steady_s},
        f"{schedule.name}: stages {schedule.stages}, micro-batches {schedule.micro_batches}, "
        f"pipelines {pipelines}",
        *([] if choice is None else [str(choice)]),
        f"steady state: {1000 * steady_s:.1f} ms per batch",
        f"in flight per pipeline: {', '.join(map(str, schedule.worker_peak_in_flight))}",
        str(timeline),
    )


def _costs(config: SimulateConfig) -> Costs:

    def scaled(values: tuple[float, ...] | None, unit: float) -> Any:
        """Convert to seconds or bytes; one value holds for all places."""
        if values is None:
            return None
        return values[0] * unit if len(values) == 1 else [value * unit for value in values]

    return Costs(
        scaled(config.forward_ms, 1e-3),
        scaled(config.backward_ms, 1e-3),
        scaled(config.transfer_ms, 1e-3),
        scaled(config.activation_mib, _MIB),
        scaled(config.weight_mib, _MIB),
        update_s=scaled(config.update_ms, 1e-3),
    )


def _schedule(config: SimulateConfig, costs: Costs) -> tuple[Schedule, AdvanceChoice | None]:
    if config.schedule.endswith(".csv"):
        return _read(config), None
    stages, micro_batches, advance = config.stages, config.micro_batches, config.advance
    if stages is None or micro_batches is None:
        missing = [flag(name) for name in _OF_A_NAME[:2] if getattr(config, name) is None]
        raise ValueError(
            f"--schedule {config.schedule} needs {' and '.join(missing)}, which only a CSV file contains"
        )
    schedule = build_schedule(config.schedule, stages, micro_batches, advance, config.stages_per_worker)
    if advance != "auto":
        return schedule, None
    choice = choose_advance(stages, micro_batches, costs, pipelines=config.pipelines)
    return build_schedule(config.schedule, stages, micro_batches, choice.advance), choice


def _check_counts(config: SimulateConfig, schedule: Schedule) -> None:
    """Refuse counts whose simulation would not fit into memory; one batch is not refused."""
    most = max(1, _MOST_ACTIONS // (schedule.workers * schedule.micro_batches))
    for name in ("pipelines", "batches"):
        if (count := getattr(config, name) or 1) > most:
            size = f"{schedule.workers} workers and {schedule.micro_batches} micro-batches"
            raise ValueError(f"{flag(name)} {count}: must be at most {most} with {size}")


def _read(config: SimulateConfig) -> Schedule:
    """Read a schedule from a file in avgpipe's form, which has updates, or in torch's, which has none."""
    path = config.schedule
    for name in config.given:
        if name in _OF_A_NAME:
            raise ValueError(f"{flag(name)}: {path} has its own, leave the option out")
    with reading(path, _MOST_BYTES) as text:
        return (Schedule.from_csv if _UPDATE.search(text) else Schedule.from_torch_csv)(text, path)


def _to_json(
    config: SimulateConfig, schedule: Schedule, choice: AdvanceChoice | None, timeline: Timeline
) -> dict[str, Any]:
    advance = [max(0, peak - (schedule.stages - k)) for k, peak in enumerate(schedule.peak_in_flight)]
    results = ("makespan_s", "bubble_fraction", "worker_busy_fraction", "peak_memory_bytes")
    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "pipelines": config.pipelines,
        "workers": schedule.workers,
        "batches": config.batches or config.pipelines,
        "advance": advance if schedule.name == "advance-forward" else None,
        **{name: getattr(timeline, name) for name in results},
        "peak_in_flight": schedule.peak_in_flight,
        "choice": None if choice is None else asdict(choice),
    }
