"""Our pipelines as rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import chain, islice, repeat
from typing import Any

from torch import nn

from avgpipe.bench.schedules.action_costs import action_costs
from avgpipe.bench.schedules.emulation import EmulatedStage
from avgpipe.bench.schedules.our_plans import OurCase, stage_costs
from avgpipe.bench.schedules.rows import Task, Unavailable
from avgpipe.bench.schedules.settings import ScheduleSettings
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan


class OurRow:
    """`plan.pipelines` pipelines, streaming; `modules`: one for each stage. The task's batch is cut into `per_batch` of
    the plan's, which are one batch of the row.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        modules: Sequence[nn.Module],
        plan: Plan,
        *,
        per_batch: int = 1,
        link: str = "auto",
        timeout_s: float = 60,
        **options: Any,
    ) -> None:
        self.name, self.pipelines = name, OurCase(name, plan, per_batch).pipelines
        self.actions: dict[str, list[float]] | None = None
        inputs, targets = (x.chunk(per_batch) for x in (task.inputs, task.targets))
        self._batches = list(zip(inputs, targets))
        if link != "auto":
            options["link"] = link
        self.pipeline = Pipeline(
            list(modules),
            plan,
            loss_fn=task.loss_fn,
            optimizer=task.optimizer,
            timeout_s=timeout_s,
            **options,
        )

    def losses(self, batches: int) -> Iterator[float | None]:
        loader = chain.from_iterable(repeat(self._batches, batches))
        losses = (result.loss for result in self.pipeline.train(loader))
        for first in losses:
            others = list(islice(losses, len(self._batches) - 1))
            yield (first + sum(others)) / len(self._batches)
        plan = self.pipeline.plan
        self.actions = action_costs(self.pipeline.timeline(), plan.stages, first_batch=plan.pipelines)

    def close(self) -> None:
        self.pipeline.close()


def our_plan(
    stages: int, micro_batches: int, schedule: str = "advance-forward", pipelines: int = 1, **options: Any
) -> Plan:
    """A stage for each module."""
    return Plan(
        stages=stages,
        pipelines=pipelines,
        micro_batches=micro_batches,
        schedule=schedule,
        partition=list(range(1, stages)),
        staleness=1,
        **options,
    )


class PassingRow:
    """An `OurRow` that is there only while it trains: one that waits still watches over its ranks, and many of them
    take a noticeable part of the processor from the row whose turn it is.
    """

    def __init__(self, make: Callable[[], OurRow]) -> None:
        """ValueError from `make` for what cannot be."""
        self._make = make
        with closing(make()) as row:
            self.name, self.pipelines = row.name, row.pipelines
        self.actions: dict[str, list[float]] | None = None

    def losses(self, batches: int) -> Iterator[float | None]:
        with closing(self._make()) as row:
            for _ in row.losses(row.pipelines):
                pass  # finds its buffers, and the speed of its connections
            yield from row.losses(batches)
            self.actions = row.actions

    def close(self) -> None:
        pass


def our_row(case: OurCase, task: Task, settings: ScheduleSettings) -> PassingRow | Unavailable:
    """The row on emulated stages, or why it cannot be."""
    plan, link, limit = case.plan, settings.effective_link, settings.timeout_s
    modules = [EmulatedStage(*stage_costs(settings, plan.stages)) for _ in range(plan.stages)]
    options: dict[str, Any] = {"per_batch": case.per_batch, "link": link, "timeout_s": limit}
    try:
        return PassingRow(lambda: OurRow(case.name, task, modules, plan, **options))
    except ValueError as error:
        return Unavailable(case.name, " ".join(str(error).split()))
