"""``avgpipe bench``: microbenchmarks with baselines and the machine's own limit."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from avgpipe.bench.kernels.settings import DTYPES, QUESTIONS, KernelSettings, parse_elements
from avgpipe.bench.schedules.settings import (
    ALL,
    DEFAULT,
    LINKS,
    ROWS,
    ScheduleSettings,
    parse_pipelines,
    parse_rate,
)
from avgpipe.bench.transfers.settings import LINKS as TRANSFER_LINKS
from avgpipe.bench.transfers.settings import TransferSettings, parse_sizes
from avgpipe.cli.errors import arguments, reporting, running
from avgpipe.units import parse_bytes, parse_names

if TYPE_CHECKING:
    from avgpipe.bench.result import SectionResult
    from avgpipe.bench.section import Section

_FILE_COLUMNS = 110  # of a table that is no terminal's

bench = typer.Typer(
    help="Microbenchmarks: our way, what one writes instead, and the machine's own limit, in one run.",
    no_args_is_help=True,
    add_completion=False,
)


@bench.callback()
def _questions() -> None:
    pass  # makes `kernels` a command of its own, also while it is the only one


@bench.command()
def kernels(
    elements: Annotated[
        str, typer.Option(metavar="E[,E...]", help="Elements of an operand, at each of these sizes.")
    ] = "25e6",
    threads: Annotated[int, typer.Option(metavar="T", help="Of torch, on the CPU.")] = 2,
    device: Annotated[str, typer.Option(metavar="cpu|cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPES), help="Of all operands.")] = "float32",
    rounds: Annotated[int, typer.Option(metavar="R", help="Samples of each variant, taken in turn.")] = 15,
    only: Annotated[
        str | None, typer.Option(metavar="NAMES", help=f"Some of {','.join(QUESTIONS)}. Default: all.")
    ] = None,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Leave torch.compile out.")] = False,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw a picture.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time the operators beside torch's own functions and the limit of this memory.

    Fractions are of the limit's bandwidth, ratios say how many times longer a baseline took.
    """
    with reporting(json_output):
        with arguments():
            sizes, names = parse_elements(elements), parse_names(only)
            settings = KernelSettings(sizes, threads, device, dtype, rounds, names, not no_compile)
            sections = _check(settings, plot)
        with running():
            _kernels(settings, sections, plot, json_output)


def _check(settings: KernelSettings, plot: str | None) -> list[Section]:
    """What will be measured; everything that can be refused is refused here."""
    from avgpipe.bench.kernels.benchmark import check_memory, kernel_sections
    from avgpipe.bench.machine import memory_available_bytes
    from avgpipe.cli.resolve import check_device
    from avgpipe.timeline.plot import check_picture

    check_device(settings.device)

    if plot is not None:
        check_picture(plot)
    sections = kernel_sections(settings)
    check_memory(sections, memory_available_bytes(settings.device))
    return sections


def _kernels(settings: KernelSettings, sections: list[Section], plot: str | None, json_output: bool) -> None:
    from rich.console import Console

    from avgpipe.bench.kernels.benchmark import run_sections
    from avgpipe.bench.machine import machine, versions
    from avgpipe.bench.picture import plot_results
    from avgpipe.bench.table import table

    found = {"versions": versions(), "machine": machine(settings.threads, settings.device)}
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = _FILE_COLUMNS
    results: list[SectionResult] = []
    measured = run_sections(settings, sections)
    for number, section in enumerate(sections):
        _say_progress(f"{number + 1} of {len(sections)}: {section.title}")
        results.append(next(measured))
        _say_progress("")
        if not json_output:
            screen.print(table(results[-1]))
    heading = _heading(settings, found["machine"])
    if plot is not None:
        plot_results(results, heading, plot)
    if json_output:
        command = shlex.join(settings.command())
        print(json.dumps({"command": command, **found, "sections": [result.to_json() for result in results]}))
    else:
        screen.print(heading)


@bench.command()
def schedules(
    stages: Annotated[int, typer.Option(metavar="K", help="Workers.")] = 6,
    micro_batches: Annotated[int, typer.Option(metavar="M", help="Of a batch of one pipeline.")] = 12,
    forward_ms: Annotated[float, typer.Option(metavar="MS", help="Of a micro-batch on a stage.")] = 10,
    backward_ms: Annotated[float, typer.Option(metavar="MS", help="Of a micro-batch on a stage.")] = 20,
    activation: Annotated[str, typer.Option(metavar="SIZE", help="Of a micro-batch, as 1MiB.")] = "1MiB",
    rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Of each worker's line, as 1Gbit; needs root.")
    ] = None,
    pipelines: Annotated[str, typer.Option(metavar="N[,N...]", help="Rows of advance-forward.")] = "1,2,3",
    link: Annotated[str, typer.Option(metavar="|".join(LINKS), help="Of our rows.")] = "auto",
    batches: Annotated[int, typer.Option(metavar="J", help="Of a row in a round, at least.")] = 6,
    rounds: Annotated[int, typer.Option(metavar="R", help="Samples of each row, taken in turn.")] = 3,
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help=f"{ALL}, or some of {','.join(ROWS)}. Default: {','.join(DEFAULT)}."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="S", help="Of every wait for another worker.")] = 60,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw a picture.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time schedules on an emulated cluster beside torch's own and the bounds: seconds per batch.

    Each worker is a process whose stages take their time without computing; runtime, tensors and links are real.
    With --rate each has a network namespace of its own on a line of that rate. Beside each of our rows stands what the
    simulation says. --rows all also takes every system of ours.
    """
    from avgpipe.cli import bench_processes

    with reporting(json_output):
        with arguments():
            settings = ScheduleSettings(
                stages=stages,
                micro_batches=micro_batches,
                forward_s=forward_ms / 1e3,
                backward_s=backward_ms / 1e3,
                activation_bytes=parse_bytes("--activation", activation),
                rate_bits_per_s=parse_rate(rate),
                pipelines=parse_pipelines(pipelines),
                link=link,
                batches=batches,
                rounds=rounds,
                only=parse_names(rows),
                timeout_s=timeout,
            )
            question = bench_processes.schedules()
            bench_processes.check(question, settings, plot)
        bench_processes.run(question, settings, plot, json_output, _say_progress)


@bench.command()
def transfers(
    links: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help=f"Some of {','.join(TRANSFER_LINKS)}. Default: all."),
    ] = None,
    sizes: Annotated[
        str, typer.Option(metavar="SIZE[,SIZE...]", help="Of messages whose bandwidth is measured.")
    ] = "256KiB,1MiB,4MiB,16MiB,64MiB",
    rounds: Annotated[int, typer.Option(metavar="R", help="Samples of each row, taken in turn.")] = 9,
    timeout: Annotated[float, typer.Option(metavar="S", help="Of every wait for the other process.")] = 30,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw a picture.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time messages between two processes by each link, beside gloo alone and one memcpy.

    Latency at 1 KiB with a receiver that spins and one that sleeps; bandwidth of messages that are handed over,
    and of those that the receiver adds up.
    """
    from avgpipe.cli import bench_processes

    with reporting(json_output):
        with arguments():
            names = parse_names(links) if links is not None else TRANSFER_LINKS
            settings = TransferSettings(names, parse_sizes(sizes), rounds, timeout)
            question = bench_processes.transfers(settings)
            bench_processes.check(question, settings, plot)
        bench_processes.run(question, settings, plot, json_output, _say_progress)


def _say_progress(line: str) -> None:
    """One line that the next one replaces. No spinner: its thread would take a processor from what is measured."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def _heading(settings: KernelSettings, machine: dict[str, object]) -> str:
    where = (
        f"{machine['cpu']}, threads: {settings.threads}" if settings.device == "cpu" else str(machine["gpu"])
    )
    return f"{where}, {settings.dtype}, medians of {settings.rounds} rounds"
