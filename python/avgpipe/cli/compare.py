"""``avgpipe compare``: systems on the same work in turn, each a training run of its own."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from avgpipe.cli import options
from avgpipe.cli.compare_runs import Question, Runner, Signals, run_all, run_in_process
from avgpipe.cli.errors import FAILED, arguments, reporting, running, say
from avgpipe.cli.settings import (
    DEFAULT_MICRO_BATCHES,
    DEFAULT_PIPELINES,
    DEFAULT_STAGES,
    joined_ranks,
    resolve,
)
from avgpipe.errors import nearest
from avgpipe.report.compare import Comparison
from avgpipe.systems import SYSTEMS
from avgpipe.units import parse_bytes, parse_names

_PANEL = "The comparison"
_FILE_COLUMNS = 120  # of a table that is no terminal's
_NO_STAGES = tuple(name for name, row in SYSTEMS.items() if "stages" in row)

Systems = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help=f"all, or some of {', '.join(SYSTEMS)}, with commas between.",
        rich_help_panel=_PANEL,
    ),
]
Stages = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        help=f"Workers of each system: its stages, or its replicas where it has no stages. Default: {DEFAULT_STAGES}.",
        rich_help_panel=_PANEL,
    ),
]
Pipelines = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help=f"Of avgpipe; others have their own. Default: {DEFAULT_PIPELINES}.",
        rich_help_panel=_PANEL,
    ),
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        metavar="M",
        help="Parts of a batch, of systems that split batches. "
        f"Default: {DEFAULT_MICRO_BATCHES}, or what a system needs.",
        rich_help_panel=_PANEL,
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Of a worker, as 2GiB. Runs are not held to it: the peak that each had is compared with it afterwards, on "
        "the CPU that of the whole process, and a system above it does not fit and is not ranked.",
        rich_help_panel=_PANEL,
    ),
]
Out = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="New folder for results and a run's folder per system. Default: runs/compare-WORKLOAD-DATE-TIME.",
        rich_help_panel=_PANEL,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print compare.json and nothing else.", rich_help_panel=_PANEL)
]


def compare(
    workload: options.Workload,
    systems: Systems,
    data: options.Data = None,
    preset: options.Preset = None,
    batch_size: options.BatchSize = None,
    seed: options.Seed = None,
    lr_scaling: options.LrScaling = None,
    stages: Stages = None,
    pipelines: Pipelines = None,
    micro_batches: MicroBatches = None,
    memory_limit: MemoryLimit = None,
    epochs: options.Epochs = None,
    max_batches: options.MaxBatches = None,
    target: options.Target = None,
    device: options.Device = None,
    link: options.Link = None,
    autocast: options.Autocast = None,
    timeout: options.Timeout = None,
    out: Out = None,
    json_output: Json = False,
) -> None:
    """Train WORKLOAD with each system in turn, on the same data, seed and number of workers, and compare.

    Prints a table and a sentence of advice. A system that fails is a row that says why, and the others go on.

    Writes compare.md, compare.json, curves.png, timelines.png, and each system's run and log, to one folder.
    """
    asked: dict[str, Any] = {
        "data": data,
        "preset": preset,
        "batch_size": batch_size,
        "seed": seed,
        "lr_scaling": lr_scaling,
        "micro_batches": micro_batches,
        "pipelines": pipelines,
        "epochs": epochs,
        "max_batches": max_batches,
        "target": target,
        "device": device,
        "link": link,
        "autocast": autocast,
        "timeout_s": timeout,
    }
    with reporting(json_output):
        with arguments():
            question = Question(
                workload,
                parse_systems(systems),
                DEFAULT_STAGES if stages is None else stages,
                {name: value for name, value in asked.items() if value is not None},
                Path(out or f"runs/compare-{workload}-{time.strftime('%Y%m%d-%H%M%S')}"),
                None if memory_limit is None else parse_bytes("--memory-limit", memory_limit, positive=True),
            )
            check(question)
            question.out.mkdir(parents=True, exist_ok=True)
        with running():
            answer(question, json_output)


def parse_systems(text: str) -> tuple[str, ...]:
    """ "all", or names with commas between them. ValueError for one that is unknown or comes twice."""
    names = tuple(SYSTEMS) if text.strip() == "all" else parse_names(text)
    for number, name in enumerate(names):
        if name not in SYSTEMS:
            raise ValueError(f"--systems: unknown system {name!r}: {nearest(name, tuple(SYSTEMS))}")
        if name in names[:number]:
            raise ValueError(f"--systems {text}: {name} comes twice, name it once")
    return names


def check(question: Question) -> None:
    """Refuse what no system could do. What only some cannot becomes their rows. ValueError or OSError."""
    from avgpipe.cli.checks import check_device, check_folder

    if joined_ranks() is not None:
        raise ValueError("compare starts the workers of each system itself: run it once, without torchrun")
    for name in ("pipelines", "micro_batches"):
        if question.asked.get(name, 1) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {question.asked[name]}: must be more than 0")
    if question.stages < 1:
        raise ValueError(f"--stages {question.stages}: must be more than 0")
    # The system that asks for least, but for a layer per stage.
    splits = any(name not in _NO_STAGES for name in question.systems)
    common = {n: v for n, v in question.asked.items() if n not in ("pipelines", "micro_batches")}
    least = {
        **common,
        "system": "model-parallel",
        "stages": question.stages if splits else 1,
        "out": str(question.out),
    }
    settings = resolve(question.workload, least)
    out = question.out
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(
            f"--out {out} is not empty ({min(p.name for p in out.iterdir())}): name a new folder"
        )
    check_folder(settings)
    check_device(settings.device)
    refused = [question.refusal(name) for name in question.systems]
    if all(refused):
        raise ValueError(f"no system can run: {refused[0]}")


def answer(question: Question, json_output: bool, runner: Runner = run_in_process) -> None:
    """Run all, fill the folder and print. Exits with 1 if no system trained to its end, as usual after a signal."""
    from avgpipe.cli.compare_results import comparison, write_results

    with Signals() as signals:
        ended = run_all(question, runner, signals)
        found = comparison(question, ended)
        text = write_results(question, found, signals.caught is not None)
    if json_output:
        sys.stdout.write(text)
    else:
        _show(question, found)
    sys.stdout.flush()
    if signals.caught is not None:
        say(f"interrupted by {signals.caught.name}: the system that was running is ended")
        raise typer.Exit(128 + signals.caught)
    if all(outcome.figures is None for outcome in found.outcomes):
        say(f"no system trained to its end: see the logs in {question.out}")
        raise typer.Exit(FAILED)


def _show(question: Question, found: Comparison) -> None:
    from rich.console import Console

    from avgpipe.report.compare_advice import advice
    from avgpipe.report.compare_text import notes, table

    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = _FILE_COLUMNS
    screen.print(table(found))
    if len(found.ranked) > 1:
        screen.print("*: the best of its column")
    for line in [*notes(found), advice(found), f"folder: {question.out}"]:
        screen.print(line, markup=False)
