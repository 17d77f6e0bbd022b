"""The ``avgpipe`` command: one typer app. Commands import torch only when they run, so help is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from avgpipe import __version__
from avgpipe.cli.bench import bench
from avgpipe.cli.compare import compare
from avgpipe.cli.doctor import doctor
from avgpipe.cli.profile import profile
from avgpipe.cli.run import run
from avgpipe.cli.simulate import simulate
from avgpipe.cli.train import train
from avgpipe.cli.tune import tune

app = typer.Typer(
    name="avgpipe",
    help="Pipeline-parallel training with elastic averaging.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(compare)
app.command()(profile)
app.command()(tune)
app.command()(simulate)
app.command()(doctor)
app.add_typer(bench, name="bench")
# Everything after SCRIPT belongs to the script, also what looks like an option.
app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(run)


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


if __name__ == "__main__":
    main()
