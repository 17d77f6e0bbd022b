"""``avgpipe.compare``: trains a caller's own model with several systems, in processes of this machine."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from avgpipe import systems as known_systems
from avgpipe.errors import check_count, nearest
from avgpipe.measure.tune import profile_together
from avgpipe.model.batch import LossFn, sample_count
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.profile import Profile
from avgpipe.ranks.launch import private_meeting, rank_environment
from avgpipe.ranks.process import STORE_FILE, peak_memory_bytes
from avgpipe.ranks.world import meet
from avgpipe.report.course import VALIDATIONS, Totals, Validations
from avgpipe.runtime.options import OptimizerFn
from avgpipe.systems import SYSTEMS
from avgpipe.tasks.loaders import first_batch, training_batches
from avgpipe.units import format_bytes
from avgpipe_lab.compare.comparison import (
    DOES_NOT_FIT,
    FAILED,
    KILLED,
    OK,
    REFUSED,
    Comparison,
    Figures,
    SystemResult,
)
from avgpipe_lab.planning.of_system import best_of_system

_log = logging.getLogger("avgpipe")
_PIPELINES, _MICRO_BATCHES = 2, 4  # defaults
_PROFILED = ("device", "clip_grad_norm", "autocast")  # options that a profile has, too
_PROFILING_S = 15.0


def compare(
    make_model: Callable[[], nn.Module | Sequence[nn.Module]],
    make_loader: Callable[[int], Iterable[Any]],
    *,
    loss_fn: LossFn,
    optimizer: OptimizerFn,
    evaluate: Callable[[Pipeline], float] | None = None,
    systems: Sequence[str] = ("avgpipe", "gpipe", "dapple", "data-parallel"),
    workers: int = 2,
    pipelines: int | None = None,
    micro_batches: int | None = None,
    epochs: int = 1,
    max_batches: int | None = None,
    validations: int = VALIDATIONS,
    target: float | None = None,
    lower_is_better: bool = True,
    metric_name: str = "loss",
    seeds: int = 1,
    seed: int = 0,
    memory_limit_bytes: int | None = None,
    device: str = "cpu",
    timeout_s: float = 300,
    threads: int = 1,
    name: str = "model",
    on_result: Callable[[str, Mapping[str, Any]], None] | None = None,
    **options: Any,
) -> Comparison:
    """Train a model with each system in turn, on the same data, seeds and number of workers, and compare.

    Every run has its own worker processes, which import their arguments as ``torch.multiprocessing`` does
    with "spawn": functions and classes must be those of a module, or of the script that runs, whose own work
    must be under ``if __name__ == "__main__":``. Lambdas and functions inside functions are refused;
    ``functools.partial`` and instances of modules, such as ``nn.CrossEntropyLoss()``, are fine. Definitions
    in a notebook cannot be imported.

    A run that fails becomes a row with the reason, and the others continue. Logger ``avgpipe`` logs the runs
    at INFO.

    Args:
        make_model: Makes the model, as a ``Pipeline`` takes it. Torch's seed is set to the run's before each
            call.
        make_loader: Takes an epoch (from 0) and makes its batches, pairs (inputs, targets); the same on every
            worker: the global generators of torch, Python and NumPy are seeded by seed and epoch. The first
            loader must have a length, unless ``max_batches`` is given.
        loss_fn: See ``Pipeline``.
        optimizer: See ``Pipeline``.
        evaluate: Takes the pipeline and returns the metric, such as ``pipeline.evaluate(held_out).loss``. It
            runs before training and at ``validations`` places at equal numbers of samples, outside the
            measured time; every worker calls it, and gets the same value. None: only speed and memory are
            compared.
        systems: Names of systems, see the reference.
        workers: Workers of each system: its stages, or its replicas if it has no stages.
        pipelines: Pipelines, of systems that leave them open; None: 2, or the tuner's choice.
        micro_batches: Micro-batches, of systems that split batches; None: 4, or the tuner's choice.
        epochs: Number of epochs to train.
        max_batches: Stop after this many batches.
        validations: Evaluations in a run, the last one at its end.
        target: The metric at which a run stops.
        lower_is_better: Whether low metrics are good.
        metric_name: Name of the metric.
        seeds: Runs of each system; figures are then medians, with the least and greatest value.
        seed: Seed of the first run; the others count up from it.
        memory_limit_bytes: Memory of a worker, on the CPU of its whole process. With it the model is
            profiled, and each system gets the plan that is predicted to be the fastest one that fits; a run
            that used more is not ranked.
        device: Where to compute.
        timeout_s: Longest wait for another worker, in seconds.
        threads: Threads of torch in each worker.
        name: Name of the model.
        on_result: Called with the system's name and each row, of a batch or of an evaluation, as in
            metrics.jsonl of ``avgpipe train``, in the first worker of a run; for a logger of
            ``avgpipe.report.loggers``, or another.
        options: Further options of the ``Pipeline``, such as ``clip_grad_norm`` or ``lr_scheduler``.

    Returns:
        The comparison: it prints as a table with notes and advice, ``plot(path)`` draws bars, ``plot_curves(path)``
        of the losses and metrics, and ``to_json()`` has a row for each system.

    Raises:
        ValueError: An argument is wrong, or cannot be imported by other processes.
        RuntimeError: A worker called this function, as it imported a script that does not guard the call with
            ``__main__``.
        PipelineError: Profiling failed.
    """
    _check(systems, target, evaluate)
    counts = {"workers": workers, "epochs": epochs, "validations": validations, "seeds": seeds}
    for what, count in counts.items():
        check_count(what, count)
    job = {
        "make_model": make_model,
        "make_loader": make_loader,
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "evaluate": evaluate,
        "on_result": on_result,
        "options": {"device": device, "timeout_s": timeout_s, **options},
    }
    course = {
        "epochs": epochs,
        "max_batches": max_batches,
        "validations": validations,
        "target": target,
        "lower_is_better": lower_is_better,
    }
    _check_importable(job)
    given = {n: v for n, v in (("pipelines", pipelines), ("micro_batches", micro_batches)) if v is not None}
    profile: tuple[Profile, int] | None = None
    if memory_limit_bytes is not None:
        _log.info("profiling %s, to choose plans", name)
        found = _on_ranks(profiled, workers, threads, job, seed)[0]
        profile = Profile.from_json(found["profile"]), found["batch_size"]
    outcomes = []
    for system in systems:
        try:
            plan = _plan(system, workers, given, profile, memory_limit_bytes)
        except ValueError as error:
            status = DOES_NOT_FIT if profile is not None else REFUSED
            outcomes.append(SystemResult(system, status, reason=str(error)))
            continue
        runs = {}
        for of_run in range(seed, seed + seeds):
            asked = job, course, plan, of_run
            runs[of_run] = _run(system, plan, asked, memory_limit_bytes, threads)
            _log.info("%s, seed %d: %s %s", system, of_run, runs[of_run].status, runs[of_run].reason)
        outcomes.append(SystemResult.joined(runs))
    return Comparison(
        what=name,
        workers=workers,
        outcomes=tuple(outcomes),
        metric_name=metric_name,
        lower_is_better=lower_is_better,
        target=target,
        memory_limit_bytes=memory_limit_bytes,
    )


def _check(systems: Sequence[str], target: float | None, evaluate: object) -> None:
    if STORE_FILE in os.environ:
        raise RuntimeError(
            "compare was called by one of its own workers, which imports the script: put the call under "
            'if __name__ == "__main__":'
        )
    for system in systems:
        if system not in SYSTEMS:
            raise ValueError(f"unknown system {system!r}: {nearest(system, tuple(SYSTEMS))}")
    if not systems or len(set(systems)) < len(systems):
        raise ValueError(f"systems={list(systems)}: name each system once, at least one")
    if target is not None and evaluate is None:
        raise ValueError(
            f"target={target!r} needs evaluate=, a function of the pipeline that returns the metric"
        )


def _plan(
    system: str,
    workers: int,
    given: Mapping[str, int],
    profiled: tuple[Profile, int] | None,
    memory_limit_bytes: int | None,
) -> Plan:
    """Return the fastest plan within the memory, or the given one without a profile and its batch size."""
    if profiled is not None:
        profile, batch_size = profiled
        cluster = Cluster.like(profile, workers, memory_limit_bytes)
        return best_of_system(system, profile, cluster, batch_size, given).plan
    row, chosen = SYSTEMS[system], {"stages": workers}
    if "pipelines" not in row:
        chosen["pipelines"] = given.get("pipelines", _PIPELINES)
    if "micro_batches" not in row:
        # micro-batches only keep stages busy
        wanted = given.get("micro_batches", 1 if "stages" in row else _MICRO_BATCHES)
        replication = known_systems.row(system, workers).get("replication")
        chosen["micro_batches"] = known_systems.micro_batches(system, workers, replication, wanted)
    return Plan.for_system(system, **chosen)


def _run(
    system: str, plan: Plan, asked: tuple[Any, ...], memory_limit_bytes: int | None, threads: int
) -> SystemResult:
    """Train in separate processes and return the outcome."""
    try:
        found = _on_ranks(trained, plan.workers, threads, *asked)
    except ProcessRaisedException as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return SystemResult(system, FAILED, reason=f"rank {error.error_index} failed: {lines[-1].strip()}")
    except ProcessExitedException as error:
        status = KILLED if error.signal_name == "SIGKILL" else FAILED
        why = "" if error.signal_name else ' (a script must put the call under if __name__ == "__main__":)'
        return SystemResult(system, status, reason=f"rank {error.error_index}: {error}{why}")
    peaks = [rank["peak_memory_bytes"] for rank in found]
    replicas = plan.pipelines if plan.spread else max(plan.replication or [1])
    figures = Figures.of({**found[0]["summary"], "peak_memory_bytes": peaks}, replicas)
    result = SystemResult(system, OK, figures, rows=(found[0]["rows"],))
    if memory_limit_bytes is None or max(peaks) <= memory_limit_bytes:
        return result
    return replace(result, status=DOES_NOT_FIT, reason=f"needs {format_bytes(max(peaks))}")


# ---- processes -------------------------------------------------------------------------------------------------------


def _check_importable(job: Mapping[str, Any]) -> None:
    """Refuse functions that other processes cannot import by their names."""
    import __main__

    interactive = not hasattr(__main__, "__file__")
    for name, value in job.items():
        told = getattr(value, "__qualname__", "")
        if "<" in told:
            raise ValueError(
                f"{name}={value!r} cannot be sent to the workers, which import it by its name: give a function of a "
                "module or of the script, not a lambda or a nested function"
            )
        if interactive and getattr(value, "__module__", "") == "__main__":
            raise ValueError(
                "functions that were defined in an interactive session cannot be imported by the workers: write them "
                "to a file and import it"
            )


def _on_ranks(function: Callable[..., Any], ranks: int, threads: int, *given: Any) -> list[Any]:
    """Call ``function(*given)`` on every rank, each a process that torch spawns; return the results, as JSON."""
    with tempfile.TemporaryDirectory(prefix="avgpipe-") as folder:
        asked = function, ranks, folder, threads, given
        start: Any = start_processes  # torch leaves it untyped
        processes = start(_enter, asked, ranks, join=False, daemon=True, start_method="spawn")
        while not processes.join():
            pass
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def _enter(
    rank: int, function: Callable[..., Any], ranks: int, folder: str, threads: int, given: tuple[Any, ...]
) -> None:
    os.environ.update(rank_environment(rank, ranks) | private_meeting(folder))
    torch.set_num_threads(threads)
    result = function(*given)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))


# ---- in a worker -----------------------------------------------------------------------------------------------------


def profiled(given: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Profile the model, as one of the workers; the result of the first one is used."""
    options = given["options"]
    torch.manual_seed(seed)
    model, batch = given["make_model"](), first_batch(given["make_loader"], seed)
    found = profile_together(
        model,
        batch,
        _PROFILING_S,
        meet(options["timeout_s"]),
        **{name: given[name] for name in ("loss_fn", "optimizer")},
        **{name: options[name] for name in _PROFILED if name in options},
    )
    return {"profile": found.to_json(), "batch_size": sample_count(*batch)}


def trained(given: Mapping[str, Any], course: Mapping[str, Any], chosen: Plan, seed: int) -> dict[str, Any]:
    """Train to the end or to the target, as one of the workers; the summary of the first one is used."""
    torch.manual_seed(seed)
    made = {name: given[name] for name in ("loss_fn", "optimizer")}
    with Pipeline(given["make_model"](), chosen, seed=seed, **made, **given["options"]) as pipeline:
        tell = None if pipeline.world.rank else given.get("on_result")
        run = _Run(pipeline, given["make_loader"], given["evaluate"], course, seed, tell)
        run.train()
        timeline = pipeline.timeline()
        peak = peak_memory_bytes(pipeline.device)
    if pipeline.world.rank:
        return {"peak_memory_bytes": peak}
    sizes = ("stages", "pipelines", "micro_batches", "schedule")
    summary = {
        **{name: getattr(chosen, name) for name in sizes},
        **run.summary(),
        "seed": seed,
        "worker_busy_fraction": timeline.worker_busy_fraction,
    }
    return {"peak_memory_bytes": peak, "summary": summary, "rows": run.rows}


class _Run:
    """A run of a pipeline; the same on all ranks.

    Attributes:
        rows: Results, batch by batch and validation by validation, as rows of a run's metrics.jsonl.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        make_loader: Callable[[int], Any],
        evaluate: Callable[[Pipeline], float] | None,
        course: Mapping[str, Any],
        seed: int,
        on_result: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._pipeline, self._evaluate, self._on_result = pipeline, evaluate, on_result
        self._epoch_batches = partial(training_batches, make_loader, seed, course["max_batches"])
        self._epochs = course["epochs"]
        self._batches = len(self._epoch_batches(0))
        self._size = sample_count(*first_batch(make_loader, seed))
        whole = self._epochs * self._batches
        self._left = min(whole, course["max_batches"] or whole)
        round_samples = pipeline.plan.batches_per_round * self._size
        self._validations = Validations(self._left * self._size, course["validations"], round_samples)
        self._done = Totals(course["lower_is_better"], course["target"])
        self.rows: list[dict[str, Any]] = []

    def train(self) -> None:
        self._validate()
        for epoch in range(self._epochs):
            self._train_epoch(epoch)
        if self._done.validated < self._done.batches:
            self._validate()

    def _train_epoch(self, epoch: int) -> None:
        source, ended = iter(self._epoch_batches(epoch)), False
        self._done.enter(epoch)
        while self._left and not ended and not self._done.reached:
            rounds = self._validations.rounds_to_next(self._done.samples)
            ahead = self._left + 1 if rounds is None else rounds * self._pipeline.plan.batches_per_round
            count = min(self._left, ahead)
            before = self._done.batches
            self._train_batches(islice(source, count))
            trained = self._done.batches - before
            self._left, ended = self._left - trained, trained < count
            if ended:  # the length of the loader is known only now
                self._batches = -(-self._done.epoch_samples // self._size)
            if trained == ahead:
                self._validate()

    def _train_batches(self, batches: Iterable[Any]) -> None:
        done, clock = self._done, time.perf_counter()
        for result in self._pipeline.train(batches):
            now = time.perf_counter()
            done.note_batch(result.samples, now - clock)
            place = {"kind": "train", "batch": result.batch, "epoch": done.epoch, "samples": done.samples}
            self._note({**place, "loss": _finite(result.loss), "seconds": done.seconds})
            clock = now

    def _validate(self) -> None:
        if self._evaluate is None:
            return
        done = self._done
        metric = _finite(self._pipeline.world.gather(float(self._evaluate(self._pipeline)))[0])
        done.note_validation(done.batches, None, metric)
        row = {"kind": "valid", "batch": done.batches, "epoch": done.epoch, "samples": done.samples}
        if self._pipeline.plan.pipelines > 1:
            row["distances"] = asdict(self._pipeline.distances())
        self._note({**row, "loss": None, "metric": metric, "seconds": done.seconds})

    def _note(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self._on_result is not None:
            self._on_result(self._pipeline.plan.system, row)

    def summary(self) -> dict[str, Any]:
        """Return the figures of the run, with the names of a run's summary.json."""
        done = self._done
        return {
            "batch_size": self._size,
            "epochs": done.samples / (self._batches * self._size),
            "train_seconds": done.seconds,
            "samples_to_target": done.samples_to_target,
            "seconds_to_target": _finite(done.seconds_to_target),
            "metric": _finite(done.metric),
            "best_metric": _finite(done.best),
            **{name: getattr(done, name) for name in ("batches", "samples")},
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
