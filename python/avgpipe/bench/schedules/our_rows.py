"""Our pipelines as rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

from torch import nn

from avgpipe.bench.schedules.rows import Task
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan


class OurRow:
    """`plan.pipelines` pipelines, streaming; `modules`: one for each stage."""

    def __init__(
        self,
        name: str,
        task: Task,
        modules: Sequence[nn.Module],
        plan: Plan,
        *,
        link: str = "auto",
        timeout_s: float = 60,
        **options: Any,
    ) -> None:
        self.name, self.pipelines = name, plan.pipelines
        self._task = task
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
        for result in self.pipeline.train(repeat((self._task.inputs, self._task.targets), batches)):
            yield result.loss

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
