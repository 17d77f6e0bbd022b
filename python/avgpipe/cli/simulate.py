"""``avgpipe simulate``: when a schedule would finish, and in how much memory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from avgpipe.cli.config import SimulateConfig
from avgpipe.cli.errors import arguments, running
from avgpipe.planning import AdvanceChoice, Costs, choose_advance, simulate, steady_batch_s
from avgpipe.schedule import Schedule, build_schedule
from avgpipe.timeline.plot import check_picture
from avgpipe.timeline.timeline import Timeline

_MIB = 2**20
_FILE_COLUMNS = 110  # of a table that is not for a terminal


def run(config: SimulateConfig) -> None:
    with arguments():
        if config.plot is not None:
            check_picture(config.plot)
        found = _simulate(config)
    with running():
        if config.plot is not None:
            found.timeline.plot(config.plot)
        if config.json:
            print(json.dumps(_to_json(config, found)))
        else:
            _show(config, found)


@dataclass(frozen=True)
class _Simulated:
    schedule: Schedule
    choice: AdvanceChoice | None
    timeline: Timeline
    steady_batch_s: float

    @property
    def advance(self) -> list[int] | None:
        """Forward passes that each stage runs ahead; None where the schedule has none."""
        if self.schedule.name != "advance-forward":
            return None
        stages = self.schedule.stages
        return [max(0, peak - (stages - k)) for k, peak in enumerate(self.schedule.peak_in_flight)]

    @property
    def batches(self) -> int:
        return len({event.batch for event in self.timeline.events})


def _simulate(config: SimulateConfig) -> _Simulated:
    """Everything simulated. ValueError for what cannot be."""
    costs = Costs(
        _scaled(config.forward_ms, 1e-3),
        _scaled(config.backward_ms, 1e-3),
        _scaled(config.transfer_ms, 1e-3),
        None if config.activation_mib is None else _scaled(config.activation_mib, _MIB),
        None if config.weight_mib is None else _scaled(config.weight_mib, _MIB),
        update_s=_scaled(config.update_ms, 1e-3),
    )
    stages, micro_batches, pipelines = config.stages, config.micro_batches, config.pipelines
    advance = config.advance
    schedule = build_schedule(config.schedule, stages, micro_batches, advance, config.stages_per_worker)
    choice = None
    if advance == "auto":
        choice = choose_advance(stages, micro_batches, costs, pipelines=pipelines)
        schedule = build_schedule(config.schedule, stages, micro_batches, choice.advance)
    timeline = simulate(schedule, costs, pipelines=pipelines, batches=config.batches or pipelines)
    return _Simulated(schedule, choice, timeline, steady_batch_s(schedule, costs, pipelines=pipelines))


def _scaled(values: tuple[float, ...], unit: float) -> float | list[float]:
    """In seconds or bytes; one value is for all places."""
    return values[0] * unit if len(values) == 1 else [value * unit for value in values]


def _to_json(config: SimulateConfig, found: _Simulated) -> dict[str, Any]:
    timeline = found.timeline
    return {
        "schedule": found.schedule.name,
        "stages": config.stages,
        "workers": found.schedule.workers,
        "micro_batches": config.micro_batches,
        "pipelines": config.pipelines,
        "batches": found.batches,
        "advance": found.advance,
        "makespan_s": timeline.makespan_s,
        "steady_batch_s": found.steady_batch_s,
        "bubble_fraction": timeline.bubble_fraction,
        "worker_busy_fraction": timeline.worker_busy_fraction,
        "peak_in_flight": found.schedule.peak_in_flight,
        "peak_memory_bytes": timeline.peak_memory_bytes,
        "choice": None if found.choice is None else asdict(found.choice),
    }


def _show(config: SimulateConfig, found: _Simulated) -> None:
    screen = Console(highlight=False, markup=False)
    if not screen.is_terminal:
        screen.width = _FILE_COLUMNS
    timeline, schedule = found.timeline, found.schedule
    screen.print(
        f"{schedule.name}: stages {config.stages}, micro-batches {config.micro_batches}, "
        f"pipelines {config.pipelines}",
        style="bold",
    )
    if found.choice is not None:
        screen.print(found.choice.explain())
    batches = f"{found.batches} {'batch' if found.batches == 1 else 'batches'}"
    screen.print(
        f"{batches}: {1000 * timeline.makespan_s:.1f} ms, bubbles {100 * timeline.bubble_fraction:.1f} %"
    )
    screen.print(f"steady state: {1000 * found.steady_batch_s:.1f} ms per batch")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    device = "stage" if schedule.is_plain else "worker"
    for heading in (device, "busy", "busy ms", "in flight per pipeline", "peak MiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    memory = timeline.peak_memory_bytes
    for k, (share, busy_s) in enumerate(zip(timeline.worker_busy_fraction, timeline.busy_s)):
        table.add_row(
            str(k),
            f"{100 * share:.1f} %",
            f"{1000 * busy_s:.1f}",
            str(schedule.worker_peak_in_flight[k]),
            "-" if memory is None else f"{memory[k] / _MIB:.1f}",
        )
    screen.print(table)
