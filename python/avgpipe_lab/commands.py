"""The commands of the laboratory, with their options; ``avgpipe`` finds them by entry points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from avgpipe.cli.config import (
    DEFAULT_PIPELINES,
    DEFAULT_STAGES,
    Count,
    File,
    Folder,
    LearningOptions,
    Milliseconds,
    Names,
    Positive,
    Size,
    numbers,
    parse_count_or_none,
)
from avgpipe.cli.options import Command, CommandGroup, Options, Value
from avgpipe.errors import nearest
from avgpipe.systems import SYSTEMS
from avgpipe.units import parse_bytes, parse_names, parse_numbers

MIN_ELEMENTS = 2000  # fewer cannot be cut into the lists of tensors that some questions are about


def check_systems(what: str, names: Sequence[str]) -> None:
    """Raise ValueError unless these are names of systems, at least one, each once; ``what`` begins the message."""
    for number, name in enumerate(names or [""]):
        if name not in SYSTEMS:
            raise ValueError(f"{what}: unknown system {name!r}: {nearest(name, tuple(SYSTEMS))}")
        if name in names[:number]:
            raise ValueError(f"{what}: {name} is named twice, name it once")


def _parse_systems(name: str, text: str) -> tuple[str, ...]:
    names = tuple(SYSTEMS) if text.strip() == "all" else parse_names(text)
    check_systems(name, names)
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

    Prints a table and a sentence of advice. A system that fails becomes a row with the reason, and the others
    continue.

    Writes compare.md, compare.json, bars.png, curves.png, timelines.png, and each system's runs and logs, to a folder.

    Attributes:
        systems: Names of systems separated by commas, or all; `avgpipe train --help` lists them.
        stages: Workers of each system: its stages, or its replicas if it has no stages.
        pipelines: Number of pipelines of avgpipe; the other systems set their own. Default: 2.
        micro_batches: Micro-batches per batch of the systems that split batches. Default: 4, or what a system needs.
        seeds: Runs of each system, with seeds counted from --seed; the table has the median, minimum and
            maximum.
        memory_limit_bytes: Memory of a worker, as 2GiB. It is not enforced: a system whose peak exceeded it
            (on the CPU, that of the whole process) does not fit and is not ranked.
        plans: tuned: profile first, and choose for each system what is not given (micro-batches, pipelines,
            advance, recomputation, cut), so that batches are fastest and fit into the memory. Default: tuned
            with --memory-limit, else given.
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
        """Return whether the tuner chooses plans."""
        return (self.plans or ("given" if self.memory_limit_bytes is None else "tuned")) == "tuned"


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Options):
    """Write one HTML page of a run, of several, or of a comparison: curves, timeline, where the time went, advice.

    The page is one file and needs no network.

    Attributes:
        runs: Folders written by avgpipe train or avgpipe compare.
        out: Where to write the page. Default: report.html in the folder, if there is one folder.
    """

    runs: Annotated[tuple[str, ...], Value("RUN...", positional=True, rest=True)]
    out: File = ""


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Options):
    """Show a run in a folder until it ends: progress, loss, speed, time left, memory, replicas, warnings.

    On a terminal it is a page that keeps updating, elsewhere it prints a line now and then.

    Attributes:
        run: Folder that avgpipe train writes to.
        once: Show the current state, and end.
        every_s: Seconds between two lines, where the output is not a terminal.
        json: Print the current state of the run as one JSON object, and end.
    """

    run: Annotated[str, Value("RUN", positional=True)]
    once: bool = False
    every_s: Positive = 10.0


@dataclass(frozen=True, kw_only=True)
class KernelsConfig(Options):
    """Time the operators, torch's functions for the same work, and the bandwidth of this machine's memory.

    Fractions are of that bandwidth; ratios are the baseline's time divided by the operator's.

    Attributes:
        elements: Elements of an operand; each benchmark is timed at each of these sizes.
        threads: CPU threads of torch.
        device: Where to compute: cpu, or an accelerator that torch sees.
        dtype: Dtype of all operands.
        rounds: Samples of each row, taken in turn.
        only: Benchmarks to run, as adamw,pull. Default: all.
        no_compile: Leave torch.compile out.
    """

    elements: Annotated[tuple[int, ...], Value("NUMBER,...", _parse_elements)] = (25_000_000,)
    threads: Count = 2
    device: Annotated[str, Value("cpu|cuda|xpu")] = "cpu"
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    rounds: Count = 15
    only: Names = ()
    no_compile: bool = False


@dataclass(frozen=True, kw_only=True)
class TransfersConfig(Options):
    """Time messages between two processes over each link, with gloo alone and one memcpy as baselines.

    Measures latency at 1 KiB with a receiver that spins and one that sleeps, and bandwidth of messages that
    are handed over and of messages that the receiver adds up.

    Attributes:
        links: Links to measure: shm and gloo between two processes, local within one.
        sizes: Sizes of the messages to measure bandwidth with.
        rounds: Samples of each row, taken in turn.
        timeout_s: Seconds that any wait for the other process may take.
    """

    links: Names = ("shm", "gloo", "local")
    sizes: Annotated[tuple[int, ...], Value("SIZE,...", _parse_sizes)] = tuple(4**n * 2**18 for n in range(5))
    rounds: Count = 9
    timeout_s: Positive = 30.0


@dataclass(frozen=True, kw_only=True)
class SchedulesConfig(Options):
    """Time schedules, torch's own schedules, and the bound, with stages that wait instead of computing.

    Each worker is a process of this machine; runtime, tensors and links are real. Each row of avgpipe has the
    simulated time beside it.

    Attributes:
        stages: Number of workers.
        micro_batches: Micro-batches per batch, which several pipelines share.
        forward_ms: Forward time of a micro-batch on a worker, in milliseconds.
        backward_ms: Backward time of a micro-batch on a worker, in milliseconds.
        activation_bytes: Size of a micro-batch's activations, as 1MiB.
        pipelines: Numbers of pipelines of the schedule advance-forward, each a row.
        link: Link of avgpipe's rows.
        batches: Batches of a row in a round, at the least.
        rounds: Samples of each row.
        rows: Names of schedules and systems, as 1f1b or torch-1f1b, or all. Default: schedules of both.
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
    """Inject faults into small runs, at places drawn from a seed, and check the outcome of each run.

    Small runs of a tiny language model follow each other until the time is up, started in each way in turn;
    each is compared with a run without faults. Prints the seed first. The exit code is 1 if a run broke a
    promise.

    Attributes:
        seed: Seed of all that is drawn. Default: a new one.
        seconds: Approximate seconds to keep going.
        mean_seconds: Average seconds between two kills from outside, in addition to the fault that each run
            has.
        kinds: Kinds of faults, see avgpipe.testing. Default: all.
        ways: How runs are started: isolate, spares, plain, hosts (isolated pipelines, one on each of several
            emulated hosts, which needs root and iproute2). Default: those that this machine has.
        stages: Workers of a pipeline.
        pipelines: Number of pipelines.
        links: Links between workers, in turn.
        only: Names of single runs to repeat, as isolate-7. Default: as many runs as fit into the time.
        timeout_s: Seconds that a worker waits for another.
    """

    seed: Annotated[int | None, Value("NUMBER", parse_count_or_none)] = None
    seconds: Positive = 120.0
    mean_seconds: Positive = 20.0
    kinds: Names = ()
    ways: Names = ("isolate", "spares", "plain", "hosts")
    stages: Count = DEFAULT_STAGES
    pipelines: Count = DEFAULT_PIPELINES
    links: Names = ("auto", "gloo")
    only: Names = ()
    timeout_s: Positive = 10.0


COMPARE = Command(CompareConfig, "avgpipe_lab.compare.command")
REPORT = Command(ReportConfig, "avgpipe_lab.pages.page")
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
