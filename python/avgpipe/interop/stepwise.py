"""Support for trainers of other libraries that train batch by batch."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan

_log = logging.getLogger("avgpipe")


def check_plan(plan: Plan) -> None:
    """Raise unless ``plan`` is a plan whose pipelines end each batch together, before the next one begins."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be an avgpipe.Plan, not {plan!r}")
    if not plan.build_schedule().flush:
        raise ValueError(
            f"the schedule {plan.schedule!r} never flushes, and a trainer ends every update before the next: use one "
            "that flushes, such as '1f1b', or Pipeline.train"
        )
    if plan.batches_per_round > 1:
        raise ValueError(
            f"batch={plan.batch!r} has {plan.pipelines} pipelines train in turn, and a trainer ends every batch before "
            "the next: use Plan(batch='global'), or Pipeline.train"
        )


def resume(pipeline: Pipeline, folder: Path) -> None:
    """Load a checkpoint, or warn where a trainer's own files alone are there."""
    if any(pipeline.world.gather(folder.is_dir())):
        pipeline.load(folder)  # the error names a rank that cannot read the folder
    elif not pipeline.world.rank:
        _log.warning("%s is not there: optimizers and schedules start from scratch", folder)


class StageOptimizers(torch.optim.Optimizer):
    """Placeholder for a trainer's optimizer: the optimizers of a rank's stages, which the pipeline already steps.

    ``param_groups`` are theirs, so learning rates can be read. ``step`` and ``zero_grad`` do nothing.
    ``state_dict`` is empty: the pipeline's own checkpoints have the state.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.members = list(optimizers)
        self.defaults = {}
        self.state = defaultdict(dict)
        super().__setstate__({})  # the base class's __init__ would build its own groups

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # read-only: the members' own
        return [group for member in self.members for group in member.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run the closure, if there is one."""
        if closure is not None:
            closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def __repr__(self) -> str:
        return f"StageOptimizers({self.members!r})"
