"""``avgpipe simulate``: when a schedule would finish, and in how much memory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from avgpipe.cli.errors import arguments, reporting, running
from avgpipe.cli.settings import parse_advance
from avgpipe.planning import AdvanceChoice, Costs, choose_advance, steady_batch_s
from avgpipe.planning import simulate as simulate_schedule
from avgpipe.schedule import Schedule, build_schedule, schedule_names
from avgpipe.timeline.figure import check_picture
from avgpipe.units import parse_numbers

if TYPE_CHECKING:
    from avgpipe.timeline.timeline import Timeline

_MIB = 2**20
_FILE_COLUMNS = 110  # of a table that is no terminal's
_EACH = "One number, or one per stage as in 10,12,9."


def simulate(
    stages: Annotated[
        int, typer.Option(metavar="K", help="Parts of the model, most schedules with a device for each.")
    ],
    micro_batches: Annotated[int, typer.Option(metavar="M", help="Of a batch.")],
    forward_ms: Annotated[str, typer.Option(metavar="T[,T...]", help=f"Of a micro-batch. {_EACH}")],
    backward_ms: Annotated[str, typer.Option(metavar="T[,T...]", help=f"Of a micro-batch. {_EACH}")],
    transfer_ms: Annotated[
        str,
        typer.Option(metavar="T[,T...]", help="Of a tensor; one number, or one per pair of neighbours."),
    ] = "0",
    update_ms: Annotated[str, typer.Option(metavar="T[,T...]", help=f"Of a batch. {_EACH}")] = "0",
    activation_mib: Annotated[
        str | None, typer.Option(metavar="X[,X...]", help=f"Held for a micro-batch. {_EACH}")
    ] = None,
    weight_mib: Annotated[
        str | None,
        typer.Option(metavar="X[,X...]", help=f"Held by a pipeline, optimizer state included. {_EACH}"),
    ] = None,
    schedule: Annotated[
        str, typer.Option(metavar="NAME", help=", ".join(schedule_names()))
    ] = "advance-forward",
    advance: Annotated[
        str | None,
        typer.Option(
            metavar="A|auto",
            help="Forwards that a stage runs ahead: a number, one per stage as in 3,2,1,0, or auto: the least memory "
            "within 1 % of the best time. Default: stages that follow.",
        ),
    ] = None,
    stages_per_worker: Annotated[
        int | None, typer.Option(metavar="V", help="Stages on each device, for interleaved-1f1b. Default: 2.")
    ] = None,
    pipelines: Annotated[int, typer.Option(metavar="N", help="Pipelines on the same devices.")] = 1,
    batches: Annotated[
        int | None, typer.Option(metavar="J", help="Of all pipelines together. Default: one of each.")
    ] = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw a picture.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say when a schedule would finish, how long a batch takes in steady state, and what memory it needs.

    A device runs one action at a time, with several pipelines backwards first, then the oldest batch; transfers occupy
    links, one tensor at a time in each direction.
    """
    with reporting(json_output):
        with arguments():
            costs = Costs(
                _numbers("--forward-ms", forward_ms, 1e-3),
                _numbers("--backward-ms", backward_ms, 1e-3),
                _numbers("--transfer-ms", transfer_ms, 1e-3),
                None if activation_mib is None else _numbers("--activation-mib", activation_mib, _MIB),
                None if weight_mib is None else _numbers("--weight-mib", weight_mib, _MIB),
                update_s=_numbers("--update-ms", update_ms, 1e-3),
            )
            if plot is not None:
                check_picture(plot)
            asked = _Question(
                stages, micro_batches, costs, schedule, advance, stages_per_worker, pipelines, batches
            )
            answer = _answer(asked)
        with running():
            if plot is not None:
                answer.timeline.plot(plot)
            if json_output:
                print(json.dumps(_to_json(asked, answer)))
            else:
                _show(asked, answer)


@dataclass(frozen=True)
class _Question:
    stages: int
    micro_batches: int
    costs: Costs
    schedule: str
    advance: str | None
    stages_per_worker: int | None
    pipelines: int
    batches: int | None


@dataclass(frozen=True)
class _Answer:
    schedule: Schedule
    choice: AdvanceChoice | None
    advance: list[int] | None
    timeline: Timeline
    steady_batch_s: float


def _answer(asked: _Question) -> _Answer:
    """Everything simulated. ValueError for what cannot be."""
    advance = "auto" if asked.advance == "auto" else parse_advance(asked.advance)
    schedule = build_schedule(
        asked.schedule, asked.stages, asked.micro_batches, advance, asked.stages_per_worker
    )
    choice = None
    if asked.advance == "auto":
        choice = choose_advance(asked.stages, asked.micro_batches, asked.costs, pipelines=asked.pipelines)
        schedule = build_schedule(asked.schedule, asked.stages, asked.micro_batches, choice.advance)
    batches = asked.pipelines if asked.batches is None else asked.batches
    timeline = simulate_schedule(schedule, asked.costs, pipelines=asked.pipelines, batches=batches)
    steady_s = steady_batch_s(schedule, asked.costs, pipelines=asked.pipelines)
    return _Answer(schedule, choice, _advance(schedule), timeline, steady_s)


def _advance(schedule: Schedule) -> list[int] | None:
    """The a_k, or None where the schedule has none."""
    if schedule.name != "advance-forward":
        return None
    return [max(0, held - (schedule.stages - k)) for k, held in enumerate(schedule.peak_in_flight)]


def _numbers(option: str, text: str, unit: float) -> float | list[float]:
    """ "10" or "10,12,9", in seconds or bytes."""
    numbers = [unit * number for number in parse_numbers(option, text, float, "10 or 10,12,9", least=0)]
    return numbers if len(numbers) > 1 else numbers[0]


def _to_json(asked: _Question, answer: _Answer) -> dict[str, Any]:
    timeline = answer.timeline
    return {
        "schedule": answer.schedule.name,
        "stages": asked.stages,
        "workers": answer.schedule.workers,
        "micro_batches": asked.micro_batches,
        "pipelines": asked.pipelines,
        "batches": len({event.batch for event in timeline.events}),
        "advance": answer.advance,
        "makespan_s": timeline.makespan_s,
        "steady_batch_s": answer.steady_batch_s,
        "bubble_fraction": timeline.bubble_fraction,
        "worker_busy_fraction": timeline.worker_busy_fraction,
        "peak_in_flight": answer.schedule.peak_in_flight,
        "peak_memory_bytes": timeline.peak_memory_bytes,
        "choice": None if answer.choice is None else asdict(answer.choice),
    }


def _show(asked: _Question, answer: _Answer) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    screen = Console(highlight=False, markup=False)
    if not screen.is_terminal:
        screen.width = _FILE_COLUMNS
    timeline, count = answer.timeline, len({event.batch for event in answer.timeline.events})
    screen.print(
        f"{answer.schedule.name}: stages {asked.stages}, micro-batches {asked.micro_batches}, "
        f"pipelines {asked.pipelines}",
        style="bold",
    )
    if answer.choice is not None:
        screen.print(answer.choice.explain())
    screen.print(
        f"{count} {'batch' if count == 1 else 'batches'}: {1000 * timeline.makespan_s:.1f} ms", end=""
    )
    screen.print(f", bubbles {100 * timeline.bubble_fraction:.1f} %")
    screen.print(f"steady state: {1000 * answer.steady_batch_s:.1f} ms per batch")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    device = "stage" if answer.schedule.is_plain else "worker"
    for heading in (device, "busy", "busy ms", "in flight per pipeline", "peak MiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    memory = timeline.peak_memory_bytes
    for k, (share, busy_s) in enumerate(zip(timeline.worker_busy_fraction, timeline.busy_s)):
        table.add_row(
            str(k),
            f"{100 * share:.1f} %",
            f"{1000 * busy_s:.1f}",
            str(answer.schedule.worker_peak_in_flight[k]),
            "-" if memory is None else f"{memory[k] / _MIB:.1f}",
        )
    screen.print(table)
