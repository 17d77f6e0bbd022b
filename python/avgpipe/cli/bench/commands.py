"""The options of ``avgpipe bench``, each declared once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from avgpipe.cli.config import Count, File, Positive
from avgpipe.cli.options import Options, Value, command
from avgpipe.units import parse_bytes, parse_names, parse_numbers

MIN_ELEMENTS = 2000  # fewer cannot be cut into the lists of tensors that some questions are about


def _parse_elements(name: str, text: str) -> tuple[int, ...]:
    sizes = parse_numbers(name, text, float, "25e6,100e6", least=MIN_ELEMENTS)
    if any(size != int(size) for size in sizes):
        raise ValueError(f"{name} {text}: must be whole numbers")
    return tuple(map(int, sizes))


def _parse_sizes(name: str, text: str) -> tuple[int, ...]:
    return tuple(parse_bytes(name, size.strip()) for size in text.split(","))


def _parse_pipelines(name: str, text: str) -> tuple[int, ...]:
    return parse_numbers(name, text, int, "1,2,3", least=1)


def _parse_ms(name: str, text: str) -> float:
    return parse_numbers(name, text, float, "10", least=0)[0]


Names = Annotated[tuple[str, ...], Value("NAMES", lambda _, text: parse_names(text))]


@dataclass(frozen=True, kw_only=True)
class KernelsConfig(Options):
    """Time the operators beside torch's own functions and the limit of this memory.

    Fractions are of the limit's bandwidth, ratios say how many times longer a baseline took.

    Attributes:
        elements: Elements of an operand; everything is timed at each of these sizes.
        threads: Threads of torch, on the CPU.
        device: Where to compute.
        dtype: Of all operands.
        rounds: Samples of each row, taken in turn.
        only: Some of the questions, as adamw,pull. Default: all.
        no_compile: Leave torch.compile out.
        plot: Draw a picture.
    """

    elements: Annotated[tuple[int, ...], Value("NUMBER,...", _parse_elements)] = (25_000_000,)
    threads: Count = 2
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    rounds: Count = 15
    only: Names = ()
    no_compile: bool = False
    plot: File | None = None


@dataclass(frozen=True, kw_only=True)
class TransfersConfig(Options):
    """Time messages between two processes by each link, beside gloo alone and one memcpy.

    Latency at 1 KiB with a receiver that spins and one that sleeps; bandwidth of messages that are handed over,
    and of those that the receiver adds up.

    Attributes:
        links: Links to measure: shm and gloo between two processes, local within one.
        sizes: Sizes of the messages whose bandwidth is measured.
        rounds: Samples of each row, taken in turn.
        timeout_s: Seconds that any wait for the other process may take.
        plot: Draw a picture.
    """

    links: Names = ("shm", "gloo", "local")
    sizes: Annotated[tuple[int, ...], Value("SIZE,...", _parse_sizes)] = tuple(4**n * 2**18 for n in range(5))
    rounds: Count = 9
    timeout_s: Positive = 30.0
    plot: File | None = None


@dataclass(frozen=True, kw_only=True)
class SchedulesConfig(Options):
    """Time schedules beside torch's own and the bounds, with stages that take time without computing.

    Each worker is a process of this machine; runtime, tensors and links are real. Beside each of our rows stands what
    the simulation says.

    Attributes:
        stages: Number of workers.
        micro_batches: Micro-batches per batch of one pipeline.
        forward_ms: Forward time of a micro-batch on a worker, in milliseconds.
        backward_ms: Backward time of a micro-batch on a worker, in milliseconds.
        activation_bytes: Size of a micro-batch's activations, as 1MiB.
        pipelines: Numbers of pipelines of the schedule advance-forward, each a row.
        link: Link of our rows.
        batches: Batches of a row in a round, at least.
        rounds: Samples of each row, taken in turn.
        rows: Names of schedules and systems, torch's as torch-1f1b, or all. Default: schedules of both.
        timeout_s: Seconds that any wait for another worker may take.
    """

    stages: Count = 6
    micro_batches: Count = 12
    forward_ms: Annotated[float, Value("NUMBER", _parse_ms)] = 10.0
    backward_ms: Annotated[float, Value("NUMBER", _parse_ms)] = 20.0
    activation_bytes: Annotated[int, Value("SIZE", parse_bytes)] = 2**20
    pipelines: Annotated[tuple[int, ...], Value("NUMBER,...", _parse_pipelines)] = (1, 2, 3)
    link: Literal["auto", "shm", "gloo"] = "auto"
    batches: Count = 6
    rounds: Count = 3
    rows: Names = ()
    timeout_s: Positive = 60.0


bench = typer.Typer(
    help="Microbenchmarks: our way, what one writes instead, and the machine's own limit, in one run.",
    no_args_is_help=True,
    add_completion=False,
)
for name, options in (
    ("kernels", KernelsConfig),
    ("transfers", TransfersConfig),
    ("schedules", SchedulesConfig),
):
    bench.command(name)(command(options, f"avgpipe.cli.bench.{name}"))
