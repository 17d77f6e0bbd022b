"""The ``avgpipe`` command: one typer app.

This module and its imports load neither torch nor numpy, so help pages are quick; the modules that do a
command's work import what they need at their top, and are imported when their command runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from avgpipe import __version__
from avgpipe.cli import config
from avgpipe.cli.options import command

COMMANDS = {
    "train": config.TrainConfig,
    "check": config.CheckConfig,
    "compare": config.CompareConfig,
    "profile": config.ProfileConfig,
    "tune": config.TuneConfig,
    "partition": config.PartitionConfig,
    "simulate": config.SimulateConfig,
    "report": config.ReportConfig,
    "watch": config.WatchConfig,
    "doctor": config.DoctorConfig,
    "run": config.RunConfig,
    "join": config.JoinConfig,
}
BENCHMARKS = {
    "kernels": config.KernelsConfig,
    "transfers": config.TransfersConfig,
    "schedules": config.SchedulesConfig,
    "faults": config.FaultsConfig,
}
# Everything after SCRIPT belongs to the script, also words that look like options.
CONTEXTS = {"run": {"allow_interspersed_args": False, "ignore_unknown_options": True}}

app = typer.Typer(
    name="avgpipe",
    help="Pipeline-parallel training with elastic averaging.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for name, options in COMMANDS.items():
    app.command(name, context_settings=CONTEXTS.get(name))(command(options, f"avgpipe.cli.{name}"))
bench = typer.Typer(
    help="Microbenchmarks: avgpipe, its alternatives, and the limit of the machine, in one run.",
    no_args_is_help=True,
    add_completion=False,
)
for name, options in BENCHMARKS.items():
    bench.command(name)(command(options, f"avgpipe.cli.bench.{name}"))
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"avgpipe {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    pass


def main() -> None:
    app()
