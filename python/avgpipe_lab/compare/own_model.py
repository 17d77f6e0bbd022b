"""``avgpipe.compare``: trains a task of the caller's with several systems, in processes of this machine."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from avgpipe.cli.config import LearningOptions, TrainConfig
from avgpipe.cli.measuring import typical_batch
from avgpipe.cli.resolve import choose_plan, pipeline_options, profile_options
from avgpipe.errors import check_count
from avgpipe.files import strict_json
from avgpipe.measure.tune import profile_together
from avgpipe.options import Precision
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.planning.profile import Profile
from avgpipe.ranks.environment import STORE_FILE
from avgpipe.ranks.launch import private_meeting, rank_environment
from avgpipe.ranks.process import FAILED
from avgpipe.ranks.world import meet
from avgpipe.report.course import Course, Totals
from avgpipe.report.loop import KeptResults, TrainingLoop
from avgpipe.runtime.options import Extension
from avgpipe.tasks import Workload
from avgpipe.tasks.loaders import Draws
from avgpipe.tasks.task import Task, workload_of
from avgpipe_lab.commands import CompareConfig, check_systems
from avgpipe_lab.compare.comparison import OK, Comparison
from avgpipe_lab.compare.process import verdict
from avgpipe_lab.compare.study import Ended, Study, options_of

_log = logging.getLogger("avgpipe")
_PROFILING_S = 15.0
_WHOLE = Course()
_UNGUARDED = 'ended at its start: a script must put the call under if __name__ == "__main__":'

OnResult = Callable[[str, Mapping[str, Any]], None]


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
    threads: int = 1,
    name: str = "model",
    on_result: OnResult | None = None,
    extensions: Sequence[Extension] = (),
) -> Comparison:
    """Train a task with each system in turn, on the same data, seeds and number of workers, and compare.

    A run that fails becomes a row with the reason, and the others continue. Logger ``avgpipe`` logs the runs at INFO.

    Args:
        make: Makes the task, here and in each worker, which imports it by its name, after the random generators were
            seeded by the run's seed. Without ``held_out`` only speed and memory are compared.
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
        threads: Threads of torch in each worker.
        name: Name of the model.
        on_result: Called in a run's first worker with the system's name and each row, as in metrics.jsonl of
            ``avgpipe train``; for a logger of ``avgpipe.report.loggers``, or another.
        extensions: Of each ``Pipeline``; a ``Source`` or ``Precision`` replaces the task's ``loss_weight`` or
            ``autocast``.

    Returns:
        A comparison, which prints as a table with notes and advice; its ``plot`` and ``plot_curves`` draw it.

    Raises:
        ValueError, TypeError: An argument or the task is wrong, or workers cannot import a function.
        RuntimeError: A worker called this: the script must do so under ``if __name__ == "__main__":``.
        PipelineError: Profiling failed.
    """
    _check({"make": make, "on_result": on_result})
    sizes = {"workers": workers, "seeds": seeds, "pipelines": pipelines, "micro_batches": micro_batches}
    others = {"memory_limit_bytes": memory_limit_bytes, "device": device, "timeout_s": timeout_s}
    config = _config(name, tuple(systems), sizes, {**vars(course), **others})
    study = RanksStudy(config, Job(make, tuple(extensions), on_result, threads))
    return study.compare(study.plans())


def _config(
    name: str, systems: tuple[str, ...], sizes: Mapping[str, int | None], others: Mapping[str, Any]
) -> CompareConfig:
    """Return the options of the command for the arguments of :func:`compare`; ValueError for wrong ones."""
    check_systems("systems", systems)
    given = {name: value for name, value in sizes.items() if value is not None}
    for size, count in given.items():
        check_count(size, count)
    given |= {name: value for name, value in others.items() if value is not None}
    return CompareConfig.of(workload=name, systems=systems, stages=given.pop("workers"), **given)


def _check(functions: Mapping[str, Callable[..., Any] | None]) -> None:
    """Refuse to run in a worker, and functions that other processes cannot import by their names."""
    import __main__

    if STORE_FILE in os.environ:
        raise RuntimeError(
            "compare was called by one of its own workers, which imports the script: put the call under "
            'if __name__ == "__main__":'
        )
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
    """What every rank of a comparison gets from the caller."""

    make: Callable[[], Task]
    extensions: tuple[Extension, ...] = ()
    on_result: OnResult | None = None
    threads: int = 1

    def made(self, config: LearningOptions) -> tuple[Workload, Course]:
        """Make the task's workload, and the course, which has the task's target if the options name none."""
        with Draws(config.seed):
            task = self.make()
        if not isinstance(task, Task):
            raise TypeError(f"make returned {task!r}: it must return an avgpipe.Task")
        course = Course.of(config)
        course = replace(course, target=task.target) if course.target is None else course
        if course.target is not None and task.held_out is None:
            raise ValueError(
                f"target {course.target}: {config.workload} has nothing to validate on: give it held_out"
            )
        return workload_of(task, config.workload, config.build_options()), course

    def options(self, config: TrainConfig, workload: Workload) -> dict[str, Any]:
        """Return the arguments of a pipeline; the caller's extensions replace those of the same kind."""
        found, kinds = pipeline_options(config, workload), set(map(type, self.extensions))
        others = (extension for extension in found["extensions"] if type(extension) not in kinds)
        return {**found, "extensions": [*self.extensions, *others]}


class RanksStudy(Study):
    """A comparison whose runs are spawned ranks that call a function."""

    def __init__(self, config: CompareConfig, job: Job) -> None:
        super().__init__(config, config.workload)
        self._job, self._batch_size = job, job.made(config)[0].batch_size

    def say(self, line: str) -> None:
        _log.info("%s", line)

    def plan(self, system: str) -> Plan:
        return choose_plan(TrainConfig.of(**options_of(self.config, system)), self._batch_size)

    def profile(self) -> tuple[Profile, int]:
        self.say(f"profiling {self.config.workload}, to choose plans")
        found = _on_ranks(profiled, self.config.stages, self._job, self.config)
        return Profile.from_json(found), self._batch_size

    def train(self, system: str, seed: int, plan: Plan, place: str) -> Ended:
        config = TrainConfig.of(**{**options_of(self.config, system), "seed": seed})
        try:
            found = _on_ranks(trained, plan.workers, self._job, config, plan)
        except ProcessRaisedException as error:
            status, reason = verdict(FAILED, str(error))
            return Ended(status, f"rank {error.error_index}: {reason}")
        except ProcessExitedException as error:
            status, reason = verdict(error.exit_code, "" if error.signal_name else _UNGUARDED)
            return Ended(status, f"rank {error.error_index}: {reason}")
        return Ended(OK, summary=found["summary"], rows=found["rows"])


# ---- processes -------------------------------------------------------------------------------------------------------


def _on_ranks(function: Callable[..., Any], ranks: int, job: Job, *given: Any) -> Any:
    """Call ``function(job, *given)`` on ranks, each a process that torch spawns; return the first one's result."""
    with tempfile.TemporaryDirectory(prefix="avgpipe-") as folder:
        asked = function, ranks, folder, job, given
        start: Any = start_processes  # torch leaves it untyped
        processes = start(_enter, asked, ranks, join=False, daemon=True, start_method="spawn")
        while not processes.join():
            pass
        return json.loads((Path(folder) / "0.json").read_text())


def _enter(
    rank: int, function: Callable[..., Any], ranks: int, folder: str, job: Job, given: tuple[Any, ...]
) -> None:
    os.environ.update(rank_environment(rank, ranks) | private_meeting(folder))
    torch.set_num_threads(job.threads)
    result = function(job, *given)
    if rank == 0:
        (Path(folder) / "0.json").write_text(strict_json(result))


def profiled(job: Job, config: CompareConfig) -> str:
    """Profile the model, as one of the workers; the result of the first one is used."""
    workload, _ = job.made(config)
    options, world = profile_options(config, workload), meet(config.timeout_s)
    own = next((e.autocast for e in job.extensions if isinstance(e, Precision)), options["autocast"])
    batch = typical_batch(workload)
    found = profile_together(workload.layers, batch, _PROFILING_S, world, **{**options, "autocast": own})
    return found.to_json()


def trained(job: Job, config: TrainConfig, plan: Plan) -> dict[str, Any]:
    """Train to the end or to the target, as one of the workers; the result of the first one is used."""
    workload, course = job.made(config)
    with Pipeline(workload.layers, plan, **job.options(config, workload)) as pipeline:
        on_result = None if pipeline.world.rank else job.on_result
        results = KeptResults(on_result and partial(on_result, plan.system))
        done = Totals(workload.lower_is_better, course.target)
        loop = TrainingLoop(pipeline, workload, course, results, done)
        loop.train()
        found = loop.rows.summary(pipeline, done, seed=course.seed)
    return {} if found is None else {"summary": found[0], "rows": results.rows}
