"""``avgpipe bench schedules`` behind its options: measures, prints, draws."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

from avgpipe.bench.schedules.settings import ScheduleSettings
from avgpipe.cli.errors import CommandFailed, running

_FILE_COLUMNS = 110  # of a table that is no terminal's
_INTERRUPTED = 130


def check(settings: ScheduleSettings, plot: str | None) -> None:
    """Refuse what would fail after minutes of measuring."""
    from avgpipe.bench.picture import check_picture
    from avgpipe.bench.schedules import benchmark

    benchmark.check(settings)
    if plot is not None:
        check_picture(plot)


def run(settings: ScheduleSettings, plot: str | None, json_output: bool, say: Callable[[str], None]) -> None:
    from rich.console import Console

    from avgpipe.bench.machine import machine, versions
    from avgpipe.bench.schedules import benchmark
    from avgpipe.bench.schedules.picture import plot_schedules
    from avgpipe.bench.schedules.table import table

    found = {"versions": versions(), "machine": machine(1, "cpu")}
    with running():
        try:
            result = benchmark.run(settings, say)
        except KeyboardInterrupt as interrupt:
            raise CommandFailed("interrupted; the workers are ended", _INTERRUPTED) from interrupt
        finally:
            say("")
    heading = (
        f"{found['machine']['cpu']}, {found['machine']['cores']} cores, torch {found['versions']['torch']}"
    )
    if plot is not None:
        with running():
            plot_schedules([result], heading, plot)
    if json_output:
        print(json.dumps({"command": shlex.join(settings.command()), **found, **result.to_json()}))
        return
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = _FILE_COLUMNS
    screen.print(table(result))
    screen.print(heading)
