"""What the commands of ``avgpipe bench`` that measure several processes do around the measuring."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from avgpipe.cli.errors import CommandFailed, running

if TYPE_CHECKING:
    from avgpipe.bench.schedules.settings import ScheduleSettings
    from avgpipe.bench.transfers.settings import TransferSettings

_FILE_COLUMNS = 110  # of a table that is no terminal's
_INTERRUPTED = 130


@dataclass(frozen=True)
class Question:
    """benchmark: has ``check(settings)`` and ``run(settings, say)``; the others take what ``run`` returned."""

    benchmark: ModuleType
    draw: Callable[[Any, str, str], object]
    table: Callable[[Any], Any]
    to_json: Callable[[Any], dict[str, Any]]


def schedules() -> Question:
    from avgpipe.bench.schedules import benchmark
    from avgpipe.bench.schedules.picture import plot_schedules
    from avgpipe.bench.schedules.table import table

    return Question(
        benchmark,
        lambda result, heading, path: plot_schedules([result], heading, path),
        table,
        lambda result: dict(result.to_json()),
    )


def transfers(settings: TransferSettings) -> Question:
    from avgpipe.bench.transfers import benchmark
    from avgpipe.bench.transfers.picture import plot_transfers
    from avgpipe.bench.transfers.table import table

    return Question(
        benchmark,
        plot_transfers,
        lambda results: table(results, settings),
        lambda results: {"sections": [result.to_json() for result in results]},
    )


def check(question: Question, settings: ScheduleSettings | TransferSettings, plot: str | None) -> None:
    """Refuse what would fail after minutes of measuring."""
    from avgpipe.timeline.plot import check_picture

    question.benchmark.check(settings)
    if plot is not None:
        check_picture(plot)


def run(
    question: Question,
    settings: ScheduleSettings | TransferSettings,
    plot: str | None,
    json_output: bool,
    say: Callable[[str], None],
) -> None:
    """Measure, draw and print."""
    from rich.console import Console

    from avgpipe.bench.machine import machine, versions

    found = {"versions": versions(), "machine": machine(1, "cpu")}
    with running():
        try:
            result = question.benchmark.run(settings, say)
        except KeyboardInterrupt as interrupt:
            raise CommandFailed("interrupted; the processes are ended", _INTERRUPTED) from interrupt
        finally:
            say("")
    cpu, cores = found["machine"]["cpu"], found["machine"]["cores"]
    heading = f"{cpu}, {cores} cores, torch {found['versions']['torch']}"
    if plot is not None:
        with running():
            question.draw(result, heading, plot)
    if json_output:
        command = shlex.join(settings.command())
        print(json.dumps({"command": command, **found, **question.to_json(result)}))
        return
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = _FILE_COLUMNS
    screen.print(question.table(result))
    screen.print(heading)
