"""The ``avgpipe`` command: one typer app.

This module and what it imports load neither torch nor numpy, so help pages are quick; the modules that do a command's
work import what they need at their top, and are imported when their command runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from avgpipe import __version__, plugins
from avgpipe.cli import config
from avgpipe.cli.options import Command, CommandGroup, callback
from avgpipe.cli.output import WRONG_ARGUMENTS, say

COMMANDS = {
    "train": Command(config.TrainConfig, "avgpipe.cli.train"),
    "check": Command(config.CheckConfig, "avgpipe.cli.train:check_command"),
    "profile": Command(config.ProfileConfig, "avgpipe.cli.profile"),
    "tune": Command(config.TuneConfig, "avgpipe.cli.tune"),
    "partition": Command(config.PartitionConfig, "avgpipe.cli.partition"),
    "simulate": Command(config.SimulateConfig, "avgpipe.cli.simulate"),
    "doctor": Command(config.DoctorConfig, "avgpipe.cli.doctor"),
    "run": Command(config.RunConfig, "avgpipe.cli.run"),
    "join": Command(config.JoinConfig, "avgpipe.cli.hosts:join_run"),
}
LABORATORY = ("bench", "compare", "report", "watch")  # which avgpipe_lab adds by entry points
# Everything after SCRIPT belongs to the script, also what looks like an option.
CONTEXTS = {"run": {"allow_interspersed_args": False, "ignore_unknown_options": True}}


def _without_laboratory(name: str) -> Callable[[typer.Context], None]:
    def refuse(context: typer.Context) -> None:
        say(f"avgpipe {name} is a command of avgpipe_lab, which is not installed here: reinstall avgpipe")
        raise typer.Exit(WRONG_ARGUMENTS)

    return refuse


def _add(to: typer.Typer, name: str, added: Command | CommandGroup) -> None:
    if isinstance(added, Command):
        to.command(name, context_settings=CONTEXTS.get(name))(callback(added))
        return
    group = typer.Typer(help=added.help, no_args_is_help=True, add_completion=False)
    for of_group, command in added.commands.items():
        _add(group, of_group, command)
    to.add_typer(group, name=name)


app = typer.Typer(
    name="avgpipe",
    help="Pipeline-parallel training with elastic averaging.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for name, command in COMMANDS.items():
    _add(app, name, command)
for name in plugins.names(plugins.COMMANDS):
    _add(app, name, plugins.load(plugins.COMMANDS, name))
for name in sorted(set(LABORATORY).difference(plugins.names(plugins.COMMANDS))):
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, hidden=True, context_settings=anything)(_without_laboratory(name))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"avgpipe {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    app()
