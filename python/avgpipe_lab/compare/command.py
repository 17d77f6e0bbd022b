"""``avgpipe compare`` and ``avgpipe.compare``: run ``avgpipe train`` with several systems on the same work."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import typer

from avgpipe.cli.config import TrainConfig
from avgpipe.cli.output import FAILED, arguments, running, say, show
from avgpipe.cli.resolve import check_device, check_folder, joined_ranks, resolve
from avgpipe.errors import check_count
from avgpipe.files import make_folder, strict_json, write_atomically
from avgpipe.report.course import Course
from avgpipe.systems import SYSTEMS
from avgpipe.tasks import find_workload
from avgpipe.tasks.task import Task
from avgpipe.timeline.timeline import Timeline
from avgpipe_lab.commands import CompareConfig, check_systems
from avgpipe_lab.compare import text as text_of
from avgpipe_lab.compare.comparison import Comparison, SystemResult
from avgpipe_lab.compare.pictures import plot_timelines
from avgpipe_lab.compare.process import Runner, noting_signals, run_in_process
from avgpipe_lab.compare.study import Study, folder_of, options_of

_NO_STAGES = tuple(name for name, row in SYSTEMS.items() if "stages" in row)
_WHOLE = Course()
_COMPARES = "AVGPIPE_COMPARES"  # set while a script compares, and in its workers


def compare(
    make: Callable[[], Task],
    systems: Sequence[str] = ("avgpipe", "gpipe", "dapple", "data-parallel"),
    *,
    workers: int = 2,
    pipelines: int | None = None,
    micro_batches: int | None = None,
    course: Course = _WHOLE,
    seeds: int = 1,
    memory_limit_bytes: int | None = None,
    device: str = "cpu",
    timeout_s: float = 300,
    out: str | os.PathLike[str] | None = None,
) -> Comparison:
    """Train a task with each system in turn, on the same data, seeds and number of workers, and compare.

    It is ``avgpipe compare path/to/script.py:make`` from Python. A run that fails becomes a row with the reason, and
    the others continue. Progress is printed on standard error.

    Args:
        make: Makes the task, here and in each worker, which imports it by its name, after ``torch.manual_seed`` with
            the run's seed. Without ``held_out`` only speed and memory are compared.
        systems: Names of systems, see the reference.
        workers: Workers of each system: its stages, or its replicas if it has no stages.
        pipelines: Pipelines, of systems that leave them open; None: 2, or the tuner's choice.
        micro_batches: Micro-batches, of systems that split batches; None: 4, or the tuner's choice.
        course: How long each run trains, how often it validates, and the seed of the first one.
        seeds: Runs of each system, with seeds counted up; figures are medians, with the least and greatest value.
        memory_limit_bytes: Memory of a worker, on the CPU of its whole process. With it each system gets the plan that
            a profile predicts to be the fastest one that fits; a run that used more is not ranked.
        device: Where to compute.
        timeout_s: Longest wait for another worker, in seconds.
        out: New folder for what ``avgpipe compare`` writes; None: nothing is kept but the result.

    Returns:
        A comparison, which prints as a table with notes and advice; its ``plot`` and ``plot_curves`` draw it.

    Raises:
        ValueError: An argument or the task is wrong, workers cannot import ``make``, or no system can run.
        RuntimeError: The script calls this where it is imported: it must do so under ``if __name__ == "__main__":``.
        KeyboardInterrupt: A signal ended it; ``out`` has the results so far.
        PipelineError: Profiling failed.
    """
    sizes = {"workers": workers, "seeds": seeds, "pipelines": pipelines, "micro_batches": micro_batches}
    others = {"memory_limit_bytes": memory_limit_bytes, "device": device, "timeout_s": timeout_s}
    with _folder(out) as folder:
        config = _config(_reference(make), systems, sizes, {**vars(course), **others, "out": folder})
        check(config)
        make_folder(config.out)
        found, study = _compared(config)
    if study.caught:
        raise KeyboardInterrupt
    return found


@contextmanager
def _folder(out: str | os.PathLike[str] | None) -> Iterator[str]:
    """Return a folder for the results; RuntimeError within an import of the script by a comparison of its own."""
    if _COMPARES in os.environ:
        raise RuntimeError(
            'compare was called by an import of the script: call it under if __name__ == "__main__":'
        )
    os.environ[_COMPARES] = "1"
    try:
        with tempfile.TemporaryDirectory(prefix="avgpipe-") as folder:
            yield str(out or folder)
    finally:
        del os.environ[_COMPARES]


def _config(
    workload: str, systems: Sequence[str], sizes: Mapping[str, int | None], others: Mapping[str, Any]
) -> CompareConfig:
    """Return the options of the command for the arguments of :func:`compare`; ValueError for wrong ones."""
    check_systems("systems", systems)
    given = {name: value for name, value in sizes.items() if value is not None}
    for name, count in given.items():
        check_count(name, count)
    given |= {name: value for name, value in others.items() if value is not None}
    return CompareConfig.of(workload=workload, systems=tuple(systems), stages=given.pop("workers"), **given)


def _reference(make: Callable[[], Task]) -> str:
    """Return the name by which workers find a function. ValueError if they cannot."""
    module = sys.modules[getattr(make, "__module__", __name__)]
    name, file = getattr(make, "__qualname__", ""), getattr(module, "__file__", None)
    if not name.isidentifier() or file is None:
        raise ValueError(
            f"make={make!r}: workers import it by its name, so it must be a function of a module or of the script, "
            "not a lambda, a partial, a nested function or one of an interactive session"
        )
    spec = module.__spec__
    return f"{spec.name if spec is not None and '.' in spec.name else file}:{name}"


def run(asked: CompareConfig) -> None:
    with arguments():
        name = find_workload(asked.workload).name
        config = replace(asked, out=asked.out or f"runs/compare-{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        check(config)
        make_folder(config.out)
    with running():
        answer(config)


def check(config: CompareConfig) -> None:
    """Refuse what no system can do (ValueError, OSError); what only some cannot do becomes their rows."""
    if joined_ranks() is not None:
        raise ValueError("compare starts the workers of each system itself: run it once, without torchrun")
    # The system with the fewest requirements, except for a layer for each stage.
    splits = any(name not in _NO_STAGES for name in config.systems)
    least = {
        **options_of(config, "model-parallel"),
        "stages": config.stages if splits else 1,
        "out": config.out,
    }
    settings = resolve(TrainConfig.of(**least))
    out = Path(config.out)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(
            f"--out {out} is not empty ({min(p.name for p in out.iterdir())}): name a new folder"
        )
    check_folder(settings)
    check_device(settings.device)
    plans = Study(config).asked_plans().values()
    refused = [plan.reason for plan in plans if isinstance(plan, SystemResult)]
    if len(refused) == len(plans):
        raise ValueError(f"no system can run: {refused[0]}")


def answer(config: CompareConfig, runner: Runner = run_in_process) -> None:
    """Run all systems, fill the folder, print. Exits with 1 if no system finished, as after a signal."""
    found, study = _compared(config, runner)
    if config.json:
        sys.stdout.write((Path(config.out) / "compare.json").read_text())
    else:
        best = ["*: the best of its column"] if len(found.ranked) > 1 else []
        notes = [*best, *text_of.notes(found), text_of.advice(found), f"folder: {config.out}"]
        show(text_of.table(found), *notes)
    sys.stdout.flush()
    if study.caught:
        number = study.caught[0]
        say(f"interrupted by {number.name}: the system that was running is ended")
        raise typer.Exit(128 + number)
    if all(outcome.figures is None for outcome in found.outcomes):
        say(f"no system trained to its end: see the logs in {config.out}")
        raise typer.Exit(FAILED)


def _compared(config: CompareConfig, runner: Runner = run_in_process) -> tuple[Comparison, Study]:
    """Run all systems, and fill the folder."""
    study = Study(config, runner)
    plans = study.plans()
    with noting_signals(study.caught):
        found = study.compare(plans)
        write_results(config, found, bool(study.caught))
    return found, study


# ---- results ---------------------------------------------------------------------------------------------------------


def write_results(config: CompareConfig, found: Comparison, interrupted: bool) -> None:
    """Write compare.json, compare.md and the pictures of all systems, also of those that did not finish."""
    facts = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "outcomes"}
    content = {
        "workload": config.workload,
        **facts,
        "interrupted": interrupted,
        "systems": found.to_json(),
        "tuned": config.tunes,
        "best": {column.key: found.best_systems(column) for column in found.columns()},
        "notes": text_of.notes(found),
        "advice": text_of.advice(found),
        "out": config.out,
    }
    out = Path(config.out)
    write_atomically(out / "compare.json", strict_json(content, indent=2) + "\n")
    write_atomically(out / "compare.md", text_of.markdown(found))
    if found.ranked:
        found.plot(out / "bars.png")
    if any(row["kind"] == "train" for o in found.outcomes for rows in o.rows for row in rows):
        found.plot_curves(out / "curves.png")
    timelines = {}
    for outcome in found.outcomes:
        home = folder_of(config, outcome.system)
        if paths := [*home.glob("timeline.json"), *sorted(home.glob("seed-*/timeline.json"))]:
            timelines[outcome.label] = Timeline.from_chrome_trace(paths[0])
    if timelines:
        plot_timelines(timelines, f"{found.what}, {found.workers} workers", out / "timelines.png")
