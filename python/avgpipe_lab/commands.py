"""The commands of the laboratory, with their options; ``avgpipe`` finds them by entry points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from avgpipe.cli.config import DEFAULT_PIPELINES, DEFAULT_STAGES, LearningOptions
from avgpipe.cli.options import Command, CommandGroup, Options, Value
from avgpipe.cli.values import (
    Count,
    File,
    Folder,
    Milliseconds,
    Names,
    Picture,
    Positive,
    Size,
    numbers,
    parse_count_or_none,
)
from avgpipe.errors import nearest
from avgpipe.systems import SYSTEMS
from avgpipe.units import parse_bytes, parse_names, parse_numbers

MIN_ELEMENTS = 2000  # fewer cannot be cut into the lists of tensors that some questions are about


def _parse_systems(name: str, text: str) -> tuple[str, ...]:
    names = tuple(SYSTEMS) if text.strip() == "all" else parse_names(text) or ("",)
    for number, system in enumerate(names):
        if system not in SYSTEMS:
            raise ValueError(f"{name}: unknown system {system!r}: {nearest(system, tuple(SYSTEMS))}")
        if system in names[:number]:
            raise ValueError(f"{name} {text}: {system} comes twice, name it once")
    return names


def _parse_elements(name: str, text: str) -> tuple[int, ...]:
    sizes = parse_numbers(name, text, float, "25e6,100e6", least=MIN_ELEMENTS)
    if any(size != int(size) for size in sizes):
        raise ValueError(f"{name} {text}: must be whole numbers")
    return tuple(map(int, sizes))


def _parse_sizes(name: str, text: str) -> tuple[int, ...]:
    return tuple(parse_bytes(name, size.strip()) for size in text.split(","))


@dataclass(frozen=True, kw_only=True)
class CompareConfig(LearningOptions):
    """Train WORKLOAD with each system in turn, on the same data, seeds and number of workers, and compare.

    Prints a table and a sentence of advice. A system that fails is a row that says why, and the others go on.

    Writes compare.md, compare.json, bars.png, curves.png, timelines.png, and each system's runs and logs, to a folder.

    Attributes:
        systems: Names of systems separated by commas, or all; `avgpipe train --help` lists them.
        stages: Workers of each system: its stages, or its replicas where it has no stages.
        pipelines: Number of pipelines of avgpipe; the other systems have their own. Default: 2.
        micro_batches: Micro-batches per batch of the systems that split batches. Default: 4, or what a system needs.
        seeds: Runs of each system, with seeds that follow --seed; the table has medians, the least and the most.
        memory_limit_bytes: Memory of a worker, as 2GiB. It is not enforced: a system whose peak was above it (on the
            CPU, of the whole process) does not fit and is not ranked.
        plans: tuned: profile first and choose for each system what is not given (micro-batches, pipelines, advance,
            recomputation, cut), so that batches take least and fit into the memory. Default: tuned with
            --memory-limit, else given.
        out: New folder for the results and the runs. Default: runs/compare-WORKLOAD-DATE-TIME.
    """

    systems: Annotated[tuple[str, ...], Value("NAMES", _parse_systems)]
    stages: Count = DEFAULT_STAGES
    pipelines: Count | None = None
    micro_batches: Count | None = None
    seeds: Count = 1
    memory_limit_bytes: Size | None = None
    plans: Literal["given", "tuned"] | None = None
    out: Folder = ""

    @property
    def tunes(self) -> bool:
        """Whether the tuner chooses plans."""
        return (self.plans or ("given" if self.memory_limit_bytes is None else "tuned")) == "tuned"


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Options):
    """Write one HTML page of a run, of several, or of a comparison: curves, timeline, where the time went, advice.

    The page is one file, which needs no network.

    Attributes:
        runs: Folders that avgpipe train or avgpipe compare has written.
        out: Where to write the page. Default: report.html, of one folder in it.
    """

    runs: Annotated[tuple[str, ...], Value("RUN...", positional=True, rest=True)]
    out: File = ""


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Options):
    """Show how a run in a folder goes, until it ends: progress, loss, speed, what is left, memory, replicas, warnings.

    On a terminal it is a page that stays up to date, elsewhere a line now and then.

    Attributes:
        run: Folder that avgpipe train writes.
        once: Show it as it is, and end.
        every_s: Seconds between two lines, where there is no terminal.
        json: Print one JSON object of the run as it is, and end.
    """

    run: Annotated[str, Value("RUN", positional=True)]
    once: bool = False
    every_s: Positive = 10.0


@dataclass(frozen=True, kw_only=True)
class KernelsConfig(Options):
    """Time the operators beside torch's own functions and the limit of this memory.

    Fractions are of the limit's bandwidth, ratios say how many times longer a baseline took.

    Attributes:
        elements: Elements of an operand; everything is timed at each of these sizes.
        threads: Threads of torch, on the CPU.
        device: Where to compute: cpu, or an accelerator that torch sees.
        dtype: Of all operands.
        rounds: Samples of each row, taken in turn.
        only: Some of the questions, as adamw,pull. Default: all.
        no_compile: Leave torch.compile out.
        plot: Draw a picture.
    """

    elements: Annotated[tuple[int, ...], Value("NUMBER,...", _parse_elements)] = (25_000_000,)
    threads: Count = 2
    device: Annotated[str, Value("cpu|cuda|xpu")] = "cpu"
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    rounds: Count = 15
    only: Names = ()
    no_compile: bool = False
    plot: Picture | None = None


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
    plot: Picture | None = None


@dataclass(frozen=True, kw_only=True)
class SchedulesConfig(Options):
    """Time schedules beside torch's own and the bounds, with stages that take time without computing.

    Each worker is a process of this machine; runtime, tensors and links are real. Beside each of our rows stands what
    the simulation says.

    Attributes:
        stages: Number of workers.
        micro_batches: Micro-batches per batch, which several pipelines share.
        forward_ms: Forward time of a micro-batch on a worker, in milliseconds.
        backward_ms: Backward time of a micro-batch on a worker, in milliseconds.
        activation_bytes: Size of a micro-batch's activations, as 1MiB.
        pipelines: Numbers of pipelines of the schedule advance-forward, each a row.
        link: Link of our rows.
        batches: Batches of a row in a round, at least.
        rounds: Samples of each row.
        rows: Names of schedules and systems, torch's as torch-1f1b, or all. Default: schedules of both.
        timeout_s: Seconds that any wait for another worker may take.
    """

    stages: Count = 6
    micro_batches: Count = 12
    forward_ms: Milliseconds = 10.0
    backward_ms: Milliseconds = 20.0
    activation_bytes: Annotated[int, Value("SIZE", parse_bytes)] = 2**20
    pipelines: Annotated[tuple[int, ...], Value("NUMBER,...", numbers(int, "1,2,3", 1))] = (1, 2, 3)
    link: Literal["auto", "shm", "gloo"] = "auto"
    batches: Count = 6
    rounds: Count = 3
    rows: Names = ()
    timeout_s: Positive = 60.0


@dataclass(frozen=True, kw_only=True)
class FaultsConfig(Options):
    """Let faults happen in small runs, at places drawn from a seed, and look at what becomes of the runs.

    Runs of a tiny language model follow each other until the time is up, started in each way in turn; each is compared
    with an undisturbed one. Prints the seed first. The exit code is 1 if anything happened that must not.

    Attributes:
        seed: What is drawn follows from it. Default: a new one.
        seconds: About how long to go on.
        mean_seconds: Time between two kills from outside, on average, beside the fault that each run has.
        kinds: Kinds of faults, as in avgpipe.testing. Default: all.
        ways: How runs are started: isolate, spares, plain.
        stages: Workers of a pipeline.
        pipelines: Number of pipelines.
        links: Links between workers, in turn.
        only: Names of single runs to repeat, as isolate-7. Default: as many as there is time for.
        timeout_s: Seconds that a worker waits for another.
    """

    seed: Annotated[int | None, Value("NUMBER", parse_count_or_none)] = None
    seconds: Positive = 120.0
    mean_seconds: Positive = 20.0
    kinds: Names = ()
    ways: Names = ("isolate", "spares", "plain")
    stages: Count = DEFAULT_STAGES
    pipelines: Count = DEFAULT_PIPELINES
    links: Names = ("auto", "gloo")
    only: Names = ()
    timeout_s: Positive = 10.0


COMPARE = Command(CompareConfig, "avgpipe_lab.compare.command")
REPORT = Command(ReportConfig, "avgpipe_lab.pages.report")
WATCH = Command(WatchConfig, "avgpipe_lab.pages.watch")
BENCH = CommandGroup(
    "Microbenchmarks: our way, what one writes instead, and the machine's own limit, in one run.",
    {
        "kernels": Command(KernelsConfig, "avgpipe_lab.bench.kernels"),
        "transfers": Command(TransfersConfig, "avgpipe_lab.bench.transfers"),
        "schedules": Command(SchedulesConfig, "avgpipe_lab.bench.schedules"),
        "faults": Command(FaultsConfig, "avgpipe_lab.bench.faults"),
    },
)
