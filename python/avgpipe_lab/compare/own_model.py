"""``avgpipe.compare``: trains a task of the caller's with several systems, in processes of this machine."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from avgpipe import systems as known_systems
from avgpipe.errors import check_count, nearest
from avgpipe.files import finite, strict_json
from avgpipe.measure.tune import profile_together
from avgpipe.options import Precision, Source
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.planning.profile import Profile
from avgpipe.ranks.launch import private_meeting, rank_environment
from avgpipe.ranks.process import STORE_FILE
from avgpipe.ranks.world import meet
from avgpipe.report.course import Course, Totals
from avgpipe.report.loop import TrainingLoop
from avgpipe.runtime.extension import Extension
from avgpipe.systems import SYSTEMS
from avgpipe.tasks import BuildOptions, Workload
from avgpipe.tasks.loaders import Draws, first_batch
from avgpipe.tasks.task import Task, workload_of
from avgpipe_lab.compare.comparison import FAILED, KILLED, OK, Comparison
from avgpipe_lab.compare.study import Ended, Question, Run, Study

_log = logging.getLogger("avgpipe")
_PROFILING_S = 15.0
_WHOLE = Course()

OnResult = Callable[[str, Mapping[str, Any]], None]


def compare(
    make: Callable[[], Task],
    systems: Sequence[str] = ("avgpipe", "gpipe", "dapple", "data-parallel"),
    *,
    workers: int = 2,
    pipelines: int | None = None,
    micro_batches: int | None = None,
    course: Course = _WHOLE,
    seeds: Sequence[int] = (0,),
    memory_limit_bytes: int | None = None,
    device: str = "cpu",
    timeout_s: float = 300,
    threads: int = 1,
    name: str = "model",
    on_result: OnResult | None = None,
    extensions: Sequence[Extension] = (),
) -> Comparison:
    """Train a task with each system in turn, on the same data, seeds and number of workers, and compare.

    Every run has its own worker processes, which import ``make`` as ``torch.multiprocessing`` does with
    "spawn": it must be a function of a module, or of the script that runs, whose own work must be under
    ``if __name__ == "__main__":``. Lambdas and functions inside functions are refused; ``functools.partial``
    is fine. Definitions in a notebook cannot be imported.

    A run that fails becomes a row with the reason, and the others continue. Logger ``avgpipe`` logs the runs
    at INFO.

    Args:
        make: Makes the task; called in this process and in every worker, after the generators of torch, Python
            and NumPy were seeded by the run's seed. A task without ``held_out`` is compared by speed and memory.
        systems: Names of systems, see the reference.
        workers: Workers of each system: its stages, or its replicas if it has no stages.
        pipelines: Pipelines, of systems that leave them open; None: 2, or the tuner's choice.
        micro_batches: Micro-batches, of systems that split batches; None: 4, or the tuner's choice.
        course: How long each run trains, and how often it validates.
        seeds: Seeds of each system's runs; figures of several are medians, with the least and greatest value.
        memory_limit_bytes: Memory of a worker, on the CPU of its whole process. With it the model is
            profiled, and each system gets the plan that is predicted to be the fastest one that fits; a run
            that used more is not ranked.
        device: Where to compute.
        timeout_s: Longest wait for another worker, in seconds.
        threads: Threads of torch in each worker.
        name: Name of the model.
        on_result: Called with the system's name and each row, of a batch or of a validation, as in
            metrics.jsonl of ``avgpipe train``, in the first worker of a run; for a logger of
            ``avgpipe.report.loggers``, or another.
        extensions: Extensions of each ``Pipeline``. A ``Source`` or ``Precision`` replaces the task's ``loss_weight``
            or ``autocast``.

    Returns:
        The comparison: it prints as a table with notes and advice, ``plot(path)`` draws bars, ``plot_curves(path)``
        of the losses and metrics, and ``to_json()`` has a row for each system.

    Raises:
        ValueError, TypeError: An argument or the task is wrong, or cannot be imported by other processes.
        RuntimeError: A worker called this function, as it imported a script that does not guard the call with
        ``__main__``.
        PipelineError: Profiling failed.
    """
    question = Question(
        what=name,
        systems=systems,
        workers=workers,
        pipelines=pipelines,
        micro_batches=micro_batches,
        seeds=seeds,
        memory_limit_bytes=memory_limit_bytes,
        tunes=memory_limit_bytes is not None,
    )
    _check(question)
    _check_importable({"make": make, "on_result": on_result})
    job = Job(make, name, course, device, timeout_s, tuple(extensions), on_result)
    study = RanksStudy(question, job, threads)
    return study.compare(study.plans())


def _check(asked: Question) -> None:
    if STORE_FILE in os.environ:
        raise RuntimeError(
            "compare was called by one of its own workers, which imports the script: put the call under "
            'if __name__ == "__main__":'
        )
    for system in asked.systems:
        if system not in SYSTEMS:
            raise ValueError(f"unknown system {system!r}: {nearest(system, tuple(SYSTEMS))}")
    for what, given in (("systems", asked.systems), ("seeds", asked.seeds)):
        if not given or len(set(given)) < len(given):
            raise ValueError(f"{what}={list(given)}: name each of them once, at least one")
    check_count("workers", asked.workers)


def _check_importable(functions: Mapping[str, Callable[..., Any] | None]) -> None:
    """Refuse functions that other processes cannot import by their names."""
    import __main__

    interactive = not hasattr(__main__, "__file__")
    for name, value in functions.items():
        if "<" in getattr(value, "__qualname__", ""):
            raise ValueError(
                f"{name}={value!r} cannot be sent to the workers, which import it by its name: give a function of a "
                "module or of the script, not a lambda or a nested function"
            )
        if interactive and getattr(value, "__module__", "") == "__main__":
            raise ValueError(
                "functions that were defined in an interactive session cannot be imported by the workers: write them "
                "to a file and import it"
            )


@dataclass(frozen=True)
class Job:
    """What all runs of a comparison train, and where; every worker gets it."""

    make: Callable[[], Task]
    name: str
    course: Course
    device: str
    timeout_s: float
    extensions: tuple[Extension, ...] = ()
    on_result: OnResult | None = None

    def made(self, seed: int) -> tuple[Workload, Course]:
        """Make the task's workload, and the course with the task's target if it has none of its own."""
        with Draws(seed):
            task = self.make()
        if not isinstance(task, Task):
            raise TypeError(f"make returned {task!r}: it must return an avgpipe.Task")
        course = self.course if self.course.target is not None else replace(self.course, target=task.target)
        if course.target is not None and task.held_out is None:
            raise ValueError(
                f"target {course.target}: {self.name} has nothing to validate on: give it held_out"
            )
        options = BuildOptions(seed=seed, epochs=course.epochs, max_batches=course.max_batches)
        return workload_of(task, self.name, options), course

    def options(self, workload: Workload) -> dict[str, Any]:
        """Return the arguments of a pipeline."""
        of_task = Source(loss_weight=workload.loss_weight), self.precision(workload)
        kinds = {type(extension) for extension in self.extensions}
        return {
            "loss_fn": workload.loss_fn,
            "optimizer": workload.optimizer,
            "lr_scheduler": workload.lr_scheduler,
            "clip_grad_norm": workload.clip_grad_norm,
            "device": self.device,
            "timeout_s": self.timeout_s,
            "extensions": [*self.extensions, *(e for e in of_task if type(e) not in kinds)],
        }

    def precision(self, workload: Workload) -> Precision:
        own = [extension for extension in self.extensions if isinstance(extension, Precision)]
        return own[0] if own else Precision(autocast=workload.autocast.get(self.device))


class RanksStudy(Study):
    """A comparison whose runs are spawned ranks that call a function."""

    def __init__(self, asked: Question, job: Job, threads: int) -> None:
        super().__init__(asked)
        self._job, self._threads = job, threads
        self._batch_size = job.made(asked.seeds[0])[0].batch_size

    def say(self, line: str) -> None:
        _log.info("%s", line)

    def plan(self, system: str) -> Plan:
        chosen = {"stages": self.asked.workers, **self.asked.sizes(system)}
        return Plan.for_system(system, **known_systems.with_sizes(system, chosen, self._batch_size))

    def profile(self) -> tuple[Profile, int]:
        self.say(f"profiling {self.asked.what}, to choose plans")
        found = _on_ranks(profiled, self.asked.workers, self._threads, self._job, self.asked.seeds[0])
        return Profile.from_json(found), self._batch_size

    def train(self, run: Run) -> Ended:
        try:
            found = _on_ranks(trained, run.plan.workers, self._threads, self._job, run.plan, run.seed)
        except ProcessRaisedException as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            return Ended(FAILED, f"rank {error.error_index} failed: {lines[-1].strip()}")
        except ProcessExitedException as error:
            status = KILLED if error.signal_name == "SIGKILL" else FAILED
            why = (
                "" if error.signal_name else ' (a script must put the call under if __name__ == "__main__":)'
            )
            return Ended(status, f"rank {error.error_index}: {error}{why}")
        return Ended(OK, summary=found["summary"], rows=found["rows"])


# ---- processes -------------------------------------------------------------------------------------------------------


def _on_ranks(function: Callable[..., Any], ranks: int, threads: int, *given: Any) -> Any:
    """Call ``function(*given)`` on every rank, each a process that torch spawns; return the first one's result."""
    with tempfile.TemporaryDirectory(prefix="avgpipe-") as folder:
        asked = function, ranks, folder, threads, given
        start: Any = start_processes  # torch leaves it untyped
        processes = start(_enter, asked, ranks, join=False, daemon=True, start_method="spawn")
        while not processes.join():
            pass
        return json.loads((Path(folder) / "0.json").read_text())


def _enter(
    rank: int, function: Callable[..., Any], ranks: int, folder: str, threads: int, given: tuple[Any, ...]
) -> None:
    os.environ.update(rank_environment(rank, ranks) | private_meeting(folder))
    torch.set_num_threads(threads)
    result = function(*given)
    if rank == 0:
        (Path(folder) / "0.json").write_text(strict_json(result))


def profiled(job: Job, seed: int) -> str:
    """Profile the model, as one of the workers; the result of the first one is used."""
    workload, _ = job.made(seed)
    names = ("loss_fn", "optimizer", "clip_grad_norm")
    return profile_together(
        workload.layers,
        first_batch(workload.train_batches, seed),
        _PROFILING_S,
        meet(job.timeout_s),
        device=job.device,
        autocast=job.precision(workload).autocast,
        **{name: getattr(workload, name) for name in names},
    ).to_json()


def trained(job: Job, plan: Plan, seed: int) -> dict[str, Any]:
    """Train to the end or to the target, as one of the workers; the result of the first one is used."""
    workload, course = job.made(seed)
    with Pipeline(workload.layers, plan, seed=seed, **job.options(workload)) as pipeline:
        results = KeptResults(plan.system, None if pipeline.world.rank else job.on_result)
        done = Totals(workload.lower_is_better, course.target)
        loop = TrainingLoop(pipeline, workload, course, results, done)
        loop.train()
        found = loop.rows.summary(pipeline, done, seed=seed)
    return {} if found is None else {"summary": found[0], "rows": results.rows}


class KeptResults:
    """Keeps the rows of a run, as in metrics.jsonl, and passes them on to a function of the caller's."""

    def __init__(self, system: str, on_result: OnResult | None) -> None:
        self._system, self._on_result = system, on_result
        self.rows: list[dict[str, Any]] = []

    def batch(self, row: Mapping[str, Any], samples: int, seconds: float) -> None:
        self._add("train", row)

    def validating(self, batches: Iterable[Any], most: int | None) -> Iterator[Any]:
        return islice(batches, most)

    def validation(self, row: Mapping[str, Any]) -> None:
        self._add("valid", row)

    def _add(self, kind: str, row: Mapping[str, Any]) -> None:
        self.rows.append(finite({"kind": kind, **row}))
        if self._on_result is not None:
            self._on_result(self._system, self.rows[-1])
