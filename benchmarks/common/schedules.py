"""Our schedules and systems beside torch's as studies measure them: all in turn, in the same processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist

from avgpipe.plan import Plan
from avgpipe.planning import Costs, steady_batch_s
from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.process import progress
from avgpipe.ranks.rendezvous import join
from avgpipe.schedule import Schedule, build_schedule
from avgpipe_lab.bench.schedules import (
    ALL,
    DEFAULT,
    ROWS,
    SEVERAL,
    SYSTEMS,
    TORCH,
    EmulatedStage,
    mean_loss,
    precise_sleeps,
)
from benchmarks.common.rows import OurRow, PassingRow, Task, TrainingRow, Unavailable, measure_rows, torch_row

_WHOLE_BATCHES = ("pipedream-2bw", "data-parallel")  # the other systems' batches are one micro-batch
_LEAST_ACTIVATION_BYTES = 64


@dataclass(frozen=True)
class ScheduleSettings:
    """What is compared.

    Attributes:
        forward_s, backward_s: Of a micro-batch on a worker.
        activation_bytes: Of a micro-batch, float32.
        pipelines: Of the row advance-forward, each number a row.
        batches: Of a row in a round, at least.
        only: Names of rows; ("all",) is every one, () those of DEFAULT.
    """

    stages: int = 6
    micro_batches: int = 12
    forward_s: float = 10e-3
    backward_s: float = 20e-3
    activation_bytes: int = 2**20
    pipelines: tuple[int, ...] = (1, 2, 3)
    link: str = "auto"
    batches: int = 6
    rounds: int = 3
    only: tuple[str, ...] = ()
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("pipelines", "only"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.activation_bytes < _LEAST_ACTIVATION_BYTES or self.activation_bytes % 4:
            raise ValueError(
                f"--activation {self.activation_bytes}: must be a multiple of 4 bytes and at least "
                f"{_LEAST_ACTIVATION_BYTES}"
            )
        for name in self.only:
            if name not in (*ROWS, ALL):
                raise ValueError(f"--rows {name}: no such row, use some of {','.join(ROWS)}, or {ALL}")

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of what is measured, in the order of the table."""
        chosen = ROWS if ALL in self.only else self.only or DEFAULT
        return tuple(name for name in ROWS if name in chosen)

    @property
    def no_bubble_s(self) -> float:
        """Seconds of a batch where every worker computes all the time: M (t_f + t_b)."""
        return self.micro_batches * (self.forward_s + self.backward_s)

    @property
    def flush_s(self) -> float:
        """Seconds of a batch that begins when the one before has ended: (M + K - 1) (t_f + t_b)."""
        return self.no_bubble_s + (self.stages - 1) * (self.forward_s + self.backward_s)

    @property
    def budget_s(self) -> float:
        """Seconds that all workers may take: far above what any row should need."""
        rows = len(self.rows) + len(self.pipelines) + 2  # some names are two rows
        if "model-parallel" in self.rows:
            rows += math.ceil(self.stages * self.no_bubble_s / max(self.flush_s, 1e-9))
        return (
            120 + self.timeout_s + 6 * rows * (self.rounds + 1) * (self.batches + 5) * (self.flush_s + 0.02)
        )

    def stage_s(self, stages: int) -> tuple[float, float]:
        """Return the seconds of a stage's forward and backward, for so many stages: all rows do the same work."""
        return self.forward_s * self.stages / stages, self.backward_s * self.stages / stages


class PlanCase(NamedTuple):
    """One of our rows: ``plan``, on all workers, with a stage for each module.

    Attributes:
        per_batch: How many of the plan's batches are one of the comparison, which has M micro-batches.
    """

    name: str
    plan: Plan
    per_batch: int

    def simulated_s(self, settings: ScheduleSettings) -> float:
        """Return seconds per batch in the steady state, where nothing but the stages takes time."""
        return self.shares * steady_batch_s(
            self.schedule, self.costs(settings), pipelines=self.plan.pipelines
        )

    @property
    def shares(self) -> int:
        """How many batches of one pipeline, as the simulation has them, are a batch of the comparison."""
        return self.per_batch * self.plan.shares

    @property
    def schedule(self) -> Schedule:
        """The schedule of one replica of the stages."""
        plan = self.plan
        own = -(-plan.micro_batches_each // max(plan.replication or [1]))
        return build_schedule(plan.schedule, plan.stages, own, plan.advance, plan.stages_per_worker)

    def costs(self, settings: ScheduleSettings) -> Costs:
        forward_s, backward_s = settings.stage_s(self.plan.stages)
        # The first stage spends its backward on the weights alone.
        halves = [0.0, *[backward_s / 2] * (self.plan.stages - 1)]
        return Costs(forward_s, backward_s, input_backward_s=halves)


def our_cases(settings: ScheduleSettings) -> Iterator[PlanCase | Unavailable]:
    """Make our rows that are asked for, in the order of the table."""
    workers, micro_batches = settings.stages, settings.micro_batches
    for row in settings.rows:
        if row.startswith("torch-"):
            continue
        for pipelines in settings.pipelines if row == "advance-forward" else (1,):
            (chunks,) = SEVERAL.get(row, (1,))
            name = f"avgpipe {row}" + (f", {chunks} a rank" if chunks > 1 else "")
            name += f", N = {pipelines}" if row == "advance-forward" else ""
            try:
                if pipelines > micro_batches:
                    raise ValueError(f"{pipelines} pipelines cannot share {micro_batches} micro-batches")
                if row in SYSTEMS:
                    given = {"micro_batches": micro_batches} if row in _WHOLE_BATCHES else {}
                    plan = Plan.for_system(row, stages=workers, **given)
                else:
                    plan = Plan(workers * chunks, pipelines, micro_batches, schedule=row)
            except ValueError as error:
                yield Unavailable(name, " ".join(str(error).split()))
            else:
                plan = replace(plan, partition=list(range(1, plan.stages)), warmup_rounds=0)
                yield PlanCase(name, plan, micro_batches // plan.micro_batches)


def build(settings: ScheduleSettings, without: Sequence[str] = ()) -> Iterator[TrainingRow | Unavailable]:
    """On every rank: all rows but those named, in the order of the table."""
    task = _task(settings)

    def stages(count: int) -> list[EmulatedStage]:
        return [EmulatedStage(*settings.stage_s(count)) for _ in range(count)]

    def begin(name: str) -> None:
        dist.barrier()  # so that whoever fails from here on fails at this row
        progress(f"building: {name}")

    for case in our_cases(settings):
        if isinstance(case, Unavailable):
            yield case
        elif case.name not in without:
            begin(case.name)
            modules = stages(case.plan.stages)
            options: dict[str, Any] = {"per_batch": case.per_batch, "timeout_s": settings.timeout_s}
            options |= {} if settings.link == "auto" else {"link": settings.link}
            try:
                yield PassingRow(partial(OurRow, case.name, task, modules, case.plan, **options))
            except ValueError as error:
                yield Unavailable(case.name, " ".join(str(error).split()))
    for name, schedule, chunks in _torch_rows(settings):
        if name not in without:
            begin(name)
            yield torch_row(name, task, stages(settings.stages * chunks), schedule, settings.micro_batches)


def _torch_rows(settings: ScheduleSettings) -> Iterator[tuple[str, str, int]]:
    """Name of the row, of the schedule, and stages of a rank."""
    for row in settings.rows:
        schedule = row.removeprefix("torch-")
        if row == "torch-advance-forward":
            yield "torch advance-forward (ours)", schedule, 1
        elif row in TORCH:
            for chunks in SEVERAL.get(row, (1,)):
                which = f", {chunks} a rank" if row in SEVERAL else ""
                yield f"torch {schedule}{which}", schedule, chunks


def _task(settings: ScheduleSettings) -> Task:

    inputs = torch.ones(settings.micro_batches, settings.activation_bytes // 4)
    targets = torch.zeros(settings.micro_batches, 1)
    return Task(inputs, targets, mean_loss, lambda parameters: torch.optim.SGD(parameters, lr=1e-3))


def worker(settings: dict[str, Any]) -> dict[str, Any]:
    """A rank: builds all rows and measures them."""
    asked = ScheduleSettings(**settings)
    torch.set_num_threads(1)
    precise_sleeps()
    join(asked.timeout_s, "gloo")  # nobody may wait forever, neither in our rows nor in torch's
    built = list(build(asked))
    rows = [row for row in built if not isinstance(row, Unavailable)]
    measured = measure_rows(rows, asked.rounds, asked.batches, progress)
    for row in rows:
        row.close()
    return {
        "rows": [row._asdict() for row in measured],
        "unavailable": [row._asdict() for row in built if isinstance(row, Unavailable)],
    }


def compare(settings: ScheduleSettings, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Start the workers and measure; the result as one JSON object. PipelineError when a worker fails."""
    arguments = {"settings": asdict(settings)}
    found = run_on_ranks(
        f"{__name__}:worker", settings.stages, arguments, timeout_s=settings.budget_s, say=say
    )
    simulated = {c.name: c.simulated_s(settings) for c in our_cases(settings) if isinstance(c, PlanCase)}
    return {
        "emulated": True,
        "settings": asdict(settings),
        "limit_s": settings.no_bubble_s,
        "bounds": [
            {"name": "no bubble: M (t_f + t_b)", "seconds": settings.no_bubble_s},
            {"name": "flush: (M+K-1) (t_f + t_b)", "seconds": settings.flush_s},
        ],
        "rows": [timed(row, simulated.get(row["name"])) for row in found[0]["rows"]],
        "unavailable": found[0]["unavailable"],
    }


def timed(measured: dict[str, Any], simulated_s: float | None) -> dict[str, Any]:
    """Make a row of the result, of what rank 0 measured, where batches end last, and of its simulated time."""
    row = summary(measured)
    over = row["median_s"] / simulated_s if simulated_s else None
    return {**row, "simulated_s": simulated_s, "over_simulated": over}


def summary(measured: dict[str, Any]) -> dict[str, Any]:
    """Median and quartiles of a row's samples."""
    samples = measured["seconds"]
    quartile1_s, median_s, quartile3_s = numpy.quantile(samples, (0.25, 0.5, 0.75)).tolist()
    return {
        "name": measured["name"],
        "median_s": median_s,
        "quartile1_s": quartile1_s,
        "quartile3_s": quartile3_s,
        "samples_s": samples,
    }


def is_ours(row: dict[str, Any]) -> bool:
    return bool(row["name"].startswith("avgpipe "))
