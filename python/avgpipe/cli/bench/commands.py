"""``avgpipe bench``: microbenchmarks with baselines and the machine's own limit."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from avgpipe.cli.errors import CommandFailed, arguments, reporting, running
from avgpipe.units import parse_bytes, parse_names, parse_numbers

_FILE_COLUMNS = 120  # of a table that is no terminal's
_INTERRUPTED = 130

bench = typer.Typer(
    help="Microbenchmarks: our way, what one writes instead, and the machine's own limit, in one run.",
    no_args_is_help=True,
    add_completion=False,
)
Rounds = Annotated[int, typer.Option(metavar="R", help="Samples of each row, taken in turn.")]
Plot = Annotated[str | None, typer.Option(metavar="FILE", help="Draw a picture.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@bench.command()
def kernels(
    elements: Annotated[
        str, typer.Option(metavar="E[,E...]", help="Elements of an operand, at each of these sizes.")
    ] = "25e6",
    threads: Annotated[int, typer.Option(metavar="T", help="Of torch, on the CPU.")] = 2,
    device: Annotated[str, typer.Option(metavar="cpu|cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Of all operands.")] = "float32",
    rounds: Rounds = 15,
    only: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Some of the questions, as adamw,pull. Default: all.")
    ] = None,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Leave torch.compile out.")] = False,
    plot: Plot = None,
    json_output: Json = False,
) -> None:
    """Time the operators beside torch's own functions and the limit of this memory.

    Fractions are of the limit's bandwidth, ratios say how many times longer a baseline took.
    """
    with reporting(json_output):
        with arguments():
            from avgpipe.cli.bench import kernels as benchmark

            sizes = parse_numbers("--elements", elements, float, "25e6,100e6", least=benchmark.MIN_ELEMENTS)
            names = parse_names(only)
            settings: dict[str, Any] = {"threads": threads, "device": device, "dtype": dtype}
            settings["rounds"] = rounds
            cases = benchmark.chosen(sizes, only=names, **settings)
            _check_plot(plot)
        with running():
            sections = []
            for number, case in enumerate(cases):
                _say(f"{number + 1} of {len(cases)}: {case.question}, {case.case}")
                sections.append(benchmark.measure(case, compiles=not no_compile, **settings))
            _say("")
            asked = {"elements": ",".join(f"{size:.0f}" for size in sizes), **settings}
            command = _command("kernels", **asked, only=",".join(names), no_compile=no_compile)
            _report_sections(command, sections, plot, json_output, threads, device)


@bench.command()
def transfers(
    links: Annotated[
        str, typer.Option(metavar="NAMES", help="Between two processes shm and gloo, within one local.")
    ] = "shm,gloo,local",
    sizes: Annotated[
        str, typer.Option(metavar="SIZE[,SIZE...]", help="Of messages whose bandwidth is measured.")
    ] = "256KiB,1MiB,4MiB,16MiB,64MiB",
    rounds: Rounds = 9,
    timeout: Annotated[float, typer.Option(metavar="S", help="Of every wait for the other process.")] = 30,
    plot: Plot = None,
    json_output: Json = False,
) -> None:
    """Time messages between two processes by each link, beside gloo alone and one memcpy.

    Latency at 1 KiB with a receiver that spins and one that sleeps; bandwidth of messages that are handed over,
    and of those that the receiver adds up.
    """
    with reporting(json_output):
        with arguments():
            from avgpipe.cli.bench import transfers as benchmark

            names = parse_names(links)
            of_bytes = [parse_bytes("--sizes", size.strip()) for size in sizes.split(",")]
            benchmark.check(names, of_bytes, rounds, timeout)
            _check_plot(plot)
        with running(), _interruptible():
            sections = benchmark.run(names, of_bytes, rounds, timeout, _say)
            asked = {"links": ",".join(names), "sizes": ",".join(map(str, of_bytes)), "rounds": rounds}
            _report_sections(_command("transfers", **asked), sections, plot, json_output, 1, "cpu")
            if not json_output:
                print(benchmark.NOTES)


@bench.command()
def schedules(
    stages: Annotated[int, typer.Option(metavar="K", help="Workers.")] = 6,
    micro_batches: Annotated[int, typer.Option(metavar="M", help="Of a batch of one pipeline.")] = 12,
    forward_ms: Annotated[float, typer.Option(metavar="MS", help="Of a micro-batch on a stage.")] = 10,
    backward_ms: Annotated[float, typer.Option(metavar="MS", help="Of a micro-batch on a stage.")] = 20,
    activation: Annotated[str, typer.Option(metavar="SIZE", help="Of a micro-batch, as 1MiB.")] = "1MiB",
    pipelines: Annotated[str, typer.Option(metavar="N[,N...]", help="Rows of advance-forward.")] = "1,2,3",
    link: Annotated[str, typer.Option(metavar="auto|shm|gloo", help="Of our rows.")] = "auto",
    batches: Annotated[int, typer.Option(metavar="J", help="Of a row in a round, at least.")] = 6,
    rounds: Rounds = 3,
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="all, or names of schedules and systems, torch's as torch-1f1b. Default: schedules of both.",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="S", help="Of every wait for another worker.")] = 60,
    json_output: Json = False,
) -> None:
    """Time schedules beside torch's own and the bounds, with stages that take time without computing.

    Each worker is a process of this machine; runtime, tensors and links are real. Beside each of our rows stands what
    the simulation says. --rows all also takes every system of ours.
    """
    with reporting(json_output):
        with arguments():
            from avgpipe.cli.bench import schedules as benchmark

            settings = benchmark.ScheduleSettings(
                stages=stages,
                micro_batches=micro_batches,
                forward_s=forward_ms / 1e3,
                backward_s=backward_ms / 1e3,
                activation_bytes=parse_bytes("--activation", activation),
                pipelines=parse_numbers("--pipelines", pipelines, int, "1,2,3", least=1),
                link=link,
                batches=batches,
                rounds=rounds,
                only=parse_names(rows),
                timeout_s=timeout,
            )
        with running(), _interruptible():
            found = benchmark.run(settings, _say)
        asked: dict[str, Any] = {"stages": stages, "micro_batches": micro_batches, "forward_ms": forward_ms}
        asked |= {"backward_ms": backward_ms, "activation": settings.activation_bytes, "pipelines": pipelines}
        asked |= {"link": link, "batches": batches, "rounds": rounds, "rows": ",".join(settings.only)}
        _report(_command("schedules", **asked), found, [benchmark.table(found)], json_output, 1, "cpu")


class _interruptible:
    """Inside, Ctrl-C ends the command in one line: the processes are ended by whoever started them."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        _say("")
        if isinstance(error, KeyboardInterrupt):
            raise CommandFailed("interrupted; the processes are ended", _INTERRUPTED) from error


def _check_plot(plot: str | None) -> None:
    from avgpipe.timeline.plot import check_picture

    if plot is not None:
        check_picture(plot)


def _command(name: str, **options: object) -> str:
    """The command that measures this again, with every default spelled out."""
    words = ["avgpipe", "bench", name]
    for option, value in options.items():
        flag = f"--{option.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not False and value != "":
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def _report_sections(
    command: str,
    sections: list[dict[str, Any]],
    plot: str | None,
    json_output: bool,
    threads: int,
    device: str,
) -> None:
    from avgpipe.cli.bench.sections import plot as draw
    from avgpipe.cli.bench.sections import table

    if plot is not None:
        draw(sections, command, plot)
    _report(command, {"sections": sections}, map(table, sections), json_output, threads, device)


def _report(
    command: str,
    found: dict[str, Any],
    tables: Iterable[Any],
    json_output: bool,
    threads: int,
    device: str,
) -> None:
    from rich.console import Console

    from avgpipe.measure.machine import machine, versions

    here = {"versions": versions(), "machine": machine(threads, device)}
    if json_output:
        print(json.dumps({"command": command, **here, **found}))
        return
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = _FILE_COLUMNS
    for table in tables:
        screen.print(table)
    where = here["machine"].get("gpu") or f"{here['machine']['cpu']}, {here['machine']['cores']} cores"
    screen.print(f"{where}, torch {here['versions']['torch']}")


def _say(line: str) -> None:
    """One line that the next one replaces. No spinner: its thread would take a processor from what is measured."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
