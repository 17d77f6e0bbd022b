"""``avgpipe bench transfers`` behind its options: measures, prints, draws."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

from avgpipe.bench.transfers.settings import TransferSettings
from avgpipe.cli.errors import CommandFailed, running

_FILE_COLUMNS = 110  # of a table that is no terminal's
_INTERRUPTED = 130


def check(settings: TransferSettings, plot: str | None) -> None:
    """Refuse what would fail after minutes of measuring."""
    from avgpipe.bench.picture import check_picture
    from avgpipe.bench.transfers import benchmark

    benchmark.check(settings)
    if plot is not None:
        check_picture(plot)


def run(settings: TransferSettings, plot: str | None, json_output: bool, say: Callable[[str], None]) -> None:
    from rich.console import Console

    from avgpipe.bench.machine import machine, versions
    from avgpipe.bench.transfers import benchmark
    from avgpipe.bench.transfers.picture import plot_transfers
    from avgpipe.bench.transfers.table import table

    found = {"versions": versions(), "machine": machine(1, "cpu")}
    with running():
        try:
            results = benchmark.run(settings, say)
        except KeyboardInterrupt as interrupt:
            raise CommandFailed("interrupted; the processes are ended", _INTERRUPTED) from interrupt
        finally:
            say("")
    heading = (
        f"{found['machine']['cpu']}, {found['machine']['cores']} cores, torch {found['versions']['torch']}"
    )
    if plot is not None:
        with running():
            plot_transfers(results, heading, plot)
    if json_output:
        sections = [result.to_json() for result in results]
        print(json.dumps({"command": shlex.join(settings.command()), **found, "sections": sections}))
        return
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = _FILE_COLUMNS
    screen.print(table(results, settings))
    screen.print(heading)
